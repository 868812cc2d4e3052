"""Plans that are being made or changed, as arrays: what devices hold, have free and cost.

A piece brings amounts to its device that add up, so any change of a device is one addition, and
all changes of a kind are priced together.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model.inputs import bundle_amounts, sums_of_devices
from autoshard.cost_model.network import DIRECTIONS
from autoshard.cost_model.scenarios import Pricing
from autoshard.workload import ShardingTask
from autoshard.workload.admission import Ints, Occupancy, RuleMasks, Truths
from autoshard.workload.step_price import StepPrice
from autoshard.workload.units import Bundle, Piece, bytes_of_bundles

Floats: TypeAlias = npt.NDArray[np.float64]


class PieceCatalog:
    """Pieces of a task and what is known of each; it grows as pieces are split.

    Args:
        pricing: What pieces bring to their device, and what that costs.
        task: Of the pieces.
        masks: The task's rules.
        pieces: Slices, or units of several tables.

    Attributes:
        amounts: What each piece brings to its device, [pieces, members, amounts].
        bytes: Of each piece on its device, [pieces].
        columns: Output columns of each, [pieces].
        units: The unit of the task that each is of, [pieces].
    """

    def __init__(
        self, pricing: Pricing, task: ShardingTask, masks: RuleMasks, pieces: Sequence[Piece]
    ) -> None:
        self.task, self.masks, self.pricing = task, masks, pricing
        self.pieces: list[Bundle] = []
        self.amounts = torch.empty(0)
        self.bytes, self.units = np.empty(0, np.int64), np.empty(0, np.int64)
        self.columns = np.empty(0)
        self.extend(pieces)

    def extend(self, pieces: Sequence[Piece]) -> int:
        """Adds pieces; returns the number of the first."""
        first, new = len(self.pieces), [Bundle.of(piece) for piece in pieces]
        self.pieces += new
        amounts = bundle_amounts(self.pricing.amounts, new)
        sizes = bytes_of_bundles(self.task.operator, self.task.batch_size, new)
        self.amounts = torch.cat([self.amounts, amounts]) if first else amounts
        self.bytes = np.concatenate([self.bytes, sizes])
        self.units = np.concatenate([self.units, self.masks.numbers(new)])
        columns = np.array([float(piece.columns) for piece in new])
        self.columns = np.concatenate([self.columns, columns])
        return first


class PlacementState(Occupancy):
    """Devices of a task with the pieces that they hold, in one plan or in several side by side.

    Costs are told by the stages of a step that count (`StepPrice`): S scenarios, W stages.

    Args:
        catalog: The pieces, which are numbers in it.
        plans: How many there are.
    """

    def __init__(self, catalog: PieceCatalog, plans: int = 1) -> None:
        task = catalog.task
        super().__init__(catalog.masks, np.tile(task.usable_bytes, (plans, 1)))
        self.catalog, self.price = catalog, StepPrice.of_task(task)
        # In double precision, so that what is put and taken again leaves nothing behind; flat.
        shape = (plans * len(task.devices), *catalog.amounts.shape[1:])
        self._sums = torch.zeros(shape, dtype=torch.float64)
        self.columns = np.zeros((plans, len(task.devices)))

    def fill(self, homes: Ints) -> None:
        """Puts each piece of the catalog on its device of the only plan: [pieces]."""
        catalog = self.catalog
        self._sums += sums_of_devices(catalog.amounts, homes, len(self._sums))
        np.add.at(self.columns[0], homes, catalog.columns)
        np.subtract.at(self.free[0], homes, catalog.bytes)
        for unit, device in zip(catalog.units.tolist(), homes.tolist(), strict=True):
            self.settle(unit, device)

    def add(self, piece: int, device: int) -> None:
        """Adds what a piece brings to a device of the only plan, beside what `enter` notes."""
        self._sums[device] += self.catalog.amounts[piece]
        self.columns[0, device] += self.catalog.columns[piece]

    def put(self, piece: int, device: int) -> None:
        """Puts a piece on a device of the only plan."""
        catalog = self.catalog
        self.add(piece, device)
        self.enter(int(catalog.units[piece]), int(catalog.bytes[piece]), device)

    def take(self, piece: int, device: int) -> None:
        """Takes a piece off its device."""
        catalog = self.catalog
        self._sums[device] -= catalog.amounts[piece]
        self.columns[0, device] -= catalog.columns[piece]
        self.leave(int(catalog.units[piece]), int(catalog.bytes[piece]), device)

    def put_each(self, plans: Ints, pieces: Ints, devices: Ints) -> None:
        """Puts a piece on a device in each of these plans, which are different ones."""
        catalog, places = self.catalog, plans * self.free.shape[1] + devices
        self._sums.index_add_(0, torch.from_numpy(places), catalog.amounts[pieces].double())
        self.columns[plans, devices] += catalog.columns[pieces]
        self.enter_each(plans, catalog.units[pieces], catalog.bytes[pieces], devices)

    def admits_pieces(self, pieces: Ints) -> Truths:
        """Returns whether each device may take a piece more, one a plan: [plans, devices]; or, for
        the only plan, of any number of pieces: [pieces, devices].
        """
        return self.admits(self.catalog.units[pieces], self.catalog.bytes[pieces])

    def admits_swaps(self, devices: Ints, leaving: Ints, entering: Ints) -> Truths:
        """Returns whether devices may take pieces in place of others; all arguments broadcast."""
        units, sizes = self.catalog.units, self.catalog.bytes
        return self.admits_exchange(
            devices, units[leaving], sizes[leaving], units[entering], sizes[entering]
        )

    def beside(self, first: int = 0) -> Floats:
        """Returns about what pieces, from number `first` on, add to each stage of a device, in the
        mean of scenarios: [pieces, W].
        """
        alone = self.catalog.amounts[first:, :, :DIRECTIONS].mean(1).double().numpy()
        stages = self.price.compute_stages(alone[:, 0], alone[:, 1])
        if self.price.exchanges:
            stages = (*stages, self.catalog.columns[first:] * self.price.column_ms())
        return np.stack(stages, axis=-1)

    def costs(self) -> Floats:
        """Returns what each device of the only plan spends: [devices, W, S]."""
        return self.stages(self._priced(self._sums), self.columns[0])

    def compute_joined(self, pieces: Ints) -> Tensor:
        """Returns milliseconds of compute of each device with each piece more: [pieces, devices,
        S, 2].
        """
        return self._priced(self._sums.float() + self.catalog.amounts[pieces][:, None])

    def joined(self, pieces: Ints) -> Floats:
        """Returns what each device would spend with each piece more: [pieces, devices, W, S]."""
        columns = self.columns[0] + self.catalog.columns[pieces][:, None]
        return self.stages(self.compute_joined(pieces), columns)

    def joined_at(self, places: Ints, pieces: Ints) -> Floats:
        """Returns milliseconds of compute where devices take a piece more: [places, 2].

        Args:
            places: Devices, numbered over all plans.
            pieces: The piece of each.
        """
        sums = self._sums[places] + self.catalog.amounts[pieces]
        return np.asarray(self._priced(sums)[:, 0].double().numpy())

    def without(self, pieces: Ints, devices: Ints) -> Floats:
        """Returns what the device of each piece would spend without it: [pieces, W, S]."""
        catalog = self.catalog
        columns = self.columns[0, devices] - catalog.columns[pieces]
        return self.stages(self._priced(self._sums[devices] - catalog.amounts[pieces]), columns)

    def exchanged(self, out: Ints, devices: Ints, into: Ints) -> Floats:
        """Returns what devices would spend if some pieces left them and others came: [..., W, S].

        Args:
            out: The piece that leaves each device.
            devices: Numbers of devices.
            into: The piece that comes.
        """
        catalog = self.catalog
        sums = self._sums[devices] - catalog.amounts[out] + catalog.amounts[into]
        columns = self.columns[0, devices] - catalog.columns[out] + catalog.columns[into]
        return self.stages(self._priced(sums), columns)

    def _priced(self, sums: Tensor) -> Tensor:
        return self.catalog.pricing.price(sums.float())

    def stages(self, prices: Tensor, columns: Floats) -> Floats:
        """Returns what devices spend in each stage: [..., W, S].

        Args:
            prices: Milliseconds of forward and backward, [..., S, 2].
            columns: Output columns, [...].
        """
        ms = np.asarray(prices.double().numpy())
        stages = self.price.compute_stages(ms[..., 0], ms[..., 1])
        if self.price.exchanges:
            stages = (*stages, self.price.sending_stage(columns[..., None]))
        return np.stack(np.broadcast_arrays(*stages), axis=-2)
