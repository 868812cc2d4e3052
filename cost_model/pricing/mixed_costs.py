"""`MixedCosts`: the cost oracle of devices of several kinds, each with the cost model of its own.

The amounts of a piece are those by each kind's model, one after the other, so that they still add
up. The sums of a device begin with a mark of its kind, by which it is priced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.models.model import CostModel
from autoshard.cost_model.networks.compute import Prices
from autoshard.cost_model.networks.network import DIRECTIONS
from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.cost_model.step.common_price import CommonPrice
from autoshard.cost_model.uncertainty.scenarios import Pricing, Scenarios
from autoshard.workload import (
    EmbeddingTable,
    Objective,
    Piece,
    Shard,
    ShardCost,
    ShardingTask,
    UserError,
)
from autoshard.workload.arrays import Floats

_MIN_SPEED_RATIO = 1.3  # of machines that count as different


def costs_of_machines(model: CostModel, batch_size: int) -> EstimatedCosts:
    """Returns an oracle for devices of the model's machine and those it also knows.

    Machines that are about as fast as one before them are left out. Where no others are known, it
    is the oracle of the model's machine, on which all devices are equal.
    """
    levels = model.levels_ms
    for machine in () if model.machines is None else model.machines.trained_on:
        if (level := machine.reference_level) is None:
            continue
        own_ms = level.both_ms
        if all(max(ms / own_ms, own_ms / ms) > _MIN_SPEED_RATIO for ms in levels.values()):
            levels[machine.hardware] = own_ms
    models = [model, *map(model.on_hardware, levels)]
    parts = {m.provenance.hardware: EstimatedCosts(m, batch_size) for m in models if m is not None}
    return MixedCosts(parts) if len(parts) > 1 else EstimatedCosts(model, batch_size)


@dataclass(frozen=True)
class _Layout:
    """Where the amounts of each kind lie, and its mark.

    Args:
        kinds: Numbers of the kinds by hardware; devices without a name are of kind 0.
        members: Members, and scenarios, of each kind's amounts.
        widths: Amounts of each kind.
    """

    kinds: Mapping[str, int]
    members: tuple[int, ...]
    widths: tuple[int, ...]

    def joined(self, amounts: Sequence[Tensor]) -> Tensor:
        """Returns the amounts by each kind as one, [..., members, amounts], without a mark."""
        most = max(self.members)
        # Kinds with fewer members repeat some of them; means and prices leave repeated ones out.
        each = [
            own if count == most else own[..., torch.arange(most) % count, :]
            for own, count in zip(amounts, self.members, strict=True)
        ]
        marks = each[0].new_zeros(*each[0].shape[:-1], len(self.kinds))
        return torch.cat([*each, marks], dim=-1)

    def of_devices(self, hardware: Sequence[str]) -> Tensor:
        """Returns the marks of devices as amounts, [devices, members, amounts]."""
        numbers = torch.tensor([self.kinds.get(name, 0) for name in hardware])
        marks = torch.eye(len(self.kinds))[numbers, None].expand(-1, max(self.members), -1)
        amounts = torch.zeros(len(numbers), max(self.members), sum(self.widths))
        return torch.cat([amounts, marks], dim=-1)

    def by_kind(self, sums: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields each kind, a mask of its devices, and their sums of its amounts.

        What has no mark, as a table alone, is priced for kind 0.
        """
        numbers, first = sums[..., 0, -len(self.kinds) :].argmax(-1), 0
        for kind, (members, width) in enumerate(zip(self.members, self.widths, strict=True)):
            chosen = numbers == kind
            if bool(chosen.any()):
                yield kind, chosen, sums[chosen][..., :members, first : first + width]
            first += width


class MixedExpectation:
    """Pricing of devices of several kinds, in the mean scenario.

    Args:
        parts: Pricing of each kind.
        layout: Layout of their amounts.
        scenarios: Number of scenarios.
    """

    def __init__(self, parts: Sequence[Pricing], layout: _Layout, scenarios: int = 1) -> None:
        self._parts, self._layout, self.count = parts, layout, scenarios

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns the amounts of each piece by all kinds, [pieces, members, amounts]."""
        return self._layout.joined([part.amounts(pieces) for part in self._parts])

    def of_devices(self, hardware: Sequence[str]) -> Tensor | float:
        """Returns the amounts with which the sums of these devices begin."""
        return self._layout.of_devices(hardware) if hardware else 0.0

    def price(self, sums: Tensor) -> Tensor:
        """Returns forward and backward ms, [..., scenarios, 2]."""
        return self._priced(sums, [part.price for part in self._parts])

    def _priced(self, sums: Tensor, prices: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Returns what each kind's function says of the sums of its devices."""
        found = sums.new_zeros(*sums.shape[:-2], self.count, DIRECTIONS)
        for kind, chosen, own in self._layout.by_kind(sums):
            found[chosen] = prices[kind](own)
        return found

    def common(self, task: ShardingTask) -> CommonPrice:
        """Returns the price of what all devices bear alike, by the first kind."""
        return self._parts[0].common(task)


class MixedScenarios(MixedExpectation, Scenarios):
    """Prices in several scenarios: in each, a table has one correction for each kind of device.

    What training takes beside operators on all devices alike is that of the first kind.
    """

    def __init__(self, parts: Sequence[Scenarios], layout: _Layout) -> None:
        MixedExpectation.__init__(self, parts, layout, parts[0].count)
        self._scenarios, self.overhead = parts, parts[0].overhead

    def with_parts(self, tables: Mapping[str, str]) -> "MixedScenarios":
        """Returns the same scenarios for parts of tables, as `Scenarios.with_parts` does."""
        return MixedScenarios([part.with_parts(tables) for part in self._scenarios], self._layout)

    def operators_ms(self, sums: Tensor) -> Tensor:
        """Returns forward and backward ms of operators, [..., scenarios, 2]."""
        return self._priced(sums, [part.operators_ms for part in self._scenarios])

    def in_training(self, operators_ms: Tensor, sums: Tensor) -> Tensor:
        """Returns ms of passes, of which operators take these [..., scenarios, 2]."""
        found = torch.empty_like(operators_ms)
        for kind, chosen, own in self._layout.by_kind(sums):
            found[chosen] = self._scenarios[kind].in_training(operators_ms[chosen], own)
        return found


class MixedCosts(EstimatedCosts):
    """A `CostOracle` for devices of several kinds of hardware.

    What is the same on all devices, all-to-alls among it, is by the first kind's model, and so
    is what is not known of it.

    Args:
        parts: Oracle of each kind by its hardware, for the same batch size.
    """

    def __init__(self, parts: Mapping[str, EstimatedCosts]) -> None:
        self._parts = tuple(parts.values())
        first = self._parts[0]
        super().__init__(first.model, first.batch_size, first.residuals)
        compute = [part.model.compute for part in self._parts]
        self._layout = _Layout(
            {name: number for number, name in enumerate(parts)},
            tuple(each.ensemble.members for each in compute),
            tuple(each.shape.amounts for each in compute),
        )

    def fresh(self) -> "MixedCosts":
        """Returns an oracle of the same costs that keeps nothing of tables that were priced."""
        return MixedCosts({name: part.fresh() for name, part in self.of_kinds().items()})

    def for_objective(self, objective: Objective, ranks: int) -> "MixedCosts":
        """Returns the oracle of another objective or number of devices, for the same batch size."""
        return MixedCosts(
            {n: p.for_objective(objective, ranks) for n, p in self.of_kinds().items()}
        )

    def costs(self, shards: Sequence[Shard], hardware: Sequence[str] = ()) -> list[ShardCost]:
        """Returns the estimated cost of each shard on the hardware that it is on."""
        kinds = [self._layout.kinds[name] for name in hardware or [""] * len(shards)]
        by_kind = {
            kind: iter(part.costs([s for s, of in zip(shards, kinds, strict=True) if of == kind]))
            for kind, part in enumerate(self._parts)
        }
        return [next(by_kind[kind]) for kind in kinds]

    def price(self, sums: Tensor) -> Prices:
        """Returns the costs of devices with these sums of amounts; 0 for empty ones."""
        found = sums.new_zeros(3, *sums.shape[:-2])
        for kind, chosen, own in self._layout.by_kind(sums):
            prices = self._parts[kind].price(own)
            found[:, chosen] = torch.stack(
                (prices.forward_ms, prices.backward_ms, prices.deviation)
            )
        return Prices(*found.unbind())

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns what each piece adds to its shard by all kinds, [pieces, members, amounts]."""
        return self._layout.joined([part.amounts(pieces) for part in self._parts])

    def of_kinds(self) -> dict[str, EstimatedCosts]:
        """Returns the oracle of each kind of devices by its hardware."""
        return dict(zip(self._layout.kinds, self._parts, strict=True))

    def of_devices(self, hardware: Sequence[str]) -> Tensor | float:
        """Returns the amounts with which the sums of these devices begin."""
        return self._layout.of_devices(hardware) if hardware else 0.0

    def check_hardware(self, task: ShardingTask) -> None:
        """Raises UserError if a device's hardware is none of the kinds."""
        for device in task.devices:
            if device.hardware not in self._layout.kinds:
                known = "; ".join(self._layout.kinds)
                named = device.hardware or "hardware without a name"
                raise UserError(f"{device.name} is of {named}, the oracle's kinds are {known}")

    def slowness(self, task: ShardingTask) -> Floats:
        """Returns what the task's tables alone take on each device, relative to the mean device."""
        whole = [table.whole() for table in task.tables]
        totals_ms = [part.alone_ms(whole).sum() for part in self._parts]
        of_devices = np.array([totals_ms[self._layout.kinds[name]] for name in task.hardware])
        return np.asarray(of_devices / of_devices.mean())

    def expectation(self) -> MixedExpectation:
        """Returns the pricing by mean costs, which has one scenario."""
        return MixedExpectation([part.expectation() for part in self._parts], self._layout)

    def scenarios(
        self, tables: Sequence[EmbeddingTable], count: int, seed: int = 0
    ) -> MixedScenarios:
        """Samples scenarios of all kinds; what is uncertain of a table is drawn for all alike."""
        parts = [part.scenarios(tables, count, seed) for part in self._parts]
        members = tuple(own + count for own in self._layout.members)
        return MixedScenarios(parts, replace(self._layout, members=members))

    def _sums(self, held: Sequence[Sequence[Piece]]) -> Tensor:
        return self._layout.joined([part._sums(held) for part in self._parts])
