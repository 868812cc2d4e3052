"""`TableCatalog`: the tables that tasks are sampled from. `TaskInstance`: a sampled task."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model import CostModel, EstimatedCosts, Prices
from autoshard.cost_model.inputs import unit_amounts
from autoshard.cost_model.scenarios import Scenarios
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    OperatorOptions,
    ShardingTask,
    UserError,
)
from autoshard.workload.admission import RuleMasks
from autoshard.workload.tables import DIM_STEP, Piece
from autoshard.workload.units import Placeable, PlacementUnit, bytes_of_units

Ints = npt.NDArray[np.int64]

WHOLE = -1  # in place of the halves of what cannot be halved
_COLUMNS = 6.0  # logarithm of 64 columns, to base 2
BESIDE = 6  # what is known of a unit beside what its amounts describe


@dataclass(frozen=True)
class Larger:
    """The task that a deal is a part of, as all-to-alls know it.

    Args:
        ranks: all its devices.
        columns: of all its tables.
    """

    ranks: int
    columns: float


@dataclass(frozen=True)
class TaskInstance:
    """A task as numbers: which units of the deck, the memory of each device, the rules, what the
    plan is to have little of, and the larger task of which this is a part, if it is.
    """

    units: Ints
    memory_bytes: Ints
    masks: RuleMasks | None = None
    objective: Objective = field(default_factory=Objective)
    larger: Larger | None = None


class TableCatalog:
    """Tables, column slices or bundles of them, with amounts, costs and sizes, looked up once.

    A deck serves one game: when that learns another cost model, the deck does.

    Args:
        oracle: what tables and devices cost.
        units: what may be dealt.
        split: know the halves of each as well, their halves, and so on. Halves are numbered after
            the units; those of equal width of one table are one, wherever they begin.
    """

    def __init__(
        self, oracle: EstimatedCosts, units: Sequence[Placeable], split: bool = False
    ) -> None:
        if not units:
            raise UserError("a game needs at least one table")
        self.undivided = tuple(units)
        known = [PlacementUnit.of(unit) for unit in units]
        self.halves = torch.from_numpy(_with_halves(known) if split else _whole(known))
        self.units = tuple(known)
        self.operator: OperatorOptions = oracle.model.provenance.operator
        self.batch_size = oracle.batch_size
        self.bytes = bytes_of_units(self.operator, self.batch_size, known)
        self.sizes = torch.from_numpy(self.bytes)
        self.columns = torch.tensor([unit.columns for unit in known], dtype=torch.float32)
        # Of what can be halved, which is one slice; of others nobody asks.
        self.widths = torch.tensor([unit.pieces[0].width for unit in known])
        self.narrow = torch.where(self.halves[:, 0] == WHOLE, 0, self.widths[self.halves[:, 0]])
        self._called: dict[str, Ints] = {}
        self.learn(oracle)

    @staticmethod
    def of_tables(
        model: CostModel, tables: Sequence[EmbeddingTable], batch_size: int, split: bool = False
    ) -> "TableCatalog":
        """A deck of whole tables."""
        oracle = EstimatedCosts(model, batch_size)
        return TableCatalog(oracle, [table.whole() for table in tables], split)

    def task(self, instance: TaskInstance) -> ShardingTask:
        """A deal as a task of its own, without the rules, and as no part of a larger one."""
        numbers = instance.units.tolist()
        tables = [piece.table for number in numbers for piece in self.units[number].pieces]
        devices = tuple(Device(f"device{n}", int(m)) for n, m in enumerate(instance.memory_bytes))
        return ShardingTask(
            tuple(tables), devices, self.batch_size, self.operator, objective=instance.objective
        )

    def called(self, beginning: str) -> Ints:
        """Numbers of the units whose names begin like that; UserError if there are none."""
        if beginning not in self._called:
            names = enumerate(unit.name for unit in self.units[: len(self.undivided)])
            found = [number for number, name in names if name.startswith(beginning)]
            if not found:
                raise UserError(f"no table to be dealt has a name that begins with {beginning!r}")
            self._called[beginning] = np.array(found, np.int64)
        return self._called[beginning]

    @cached_property
    def by_width(self) -> tuple[Ints, Ints, Ints]:
        """Bytes of each unit however narrow, of each of its columns, and its columns: [units].

        What cannot be split counts as of no more than four columns.
        """
        found = []
        for unit, size in zip(self.units, self.bytes[: len(self.undivided)].tolist(), strict=False):
            if not unit.can_be_split:
                found.append((size, 0, DIM_STEP))
                continue
            (piece,) = unit.pieces
            narrow = Piece(piece.table, piece.start, DIM_STEP)
            least = self.operator.memory((narrow,), self.batch_size).total
            column = (size - least) // (piece.width - DIM_STEP)  # bytes grow linearly
            found.append((size - column * piece.width, column, piece.width))
        fixed, column, width = np.array(found, np.int64).T
        return fixed, column, width

    def learn(self, oracle: EstimatedCosts) -> None:
        """Believe another cost model from now on; called by the game."""
        self.model = oracle.model
        self._oracle = oracle
        self._in_scenarios: dict[int, tuple[Scenarios, Tensor]] = {}
        self.amounts: Tensor = unit_amounts(oracle.amounts, self.units)
        self.described: Tensor = oracle.model.compute.described(self.amounts)
        alone = self.price(self.amounts)
        self.alone_ms: Tensor = alone.total_ms
        self.narrowest_ms = self._least()
        self.facts = torch.cat([self.described, self._beside(alone.deviation)], dim=1)

    def in_scenarios(self, count: int) -> tuple[Scenarios, Tensor]:
        """What prices devices in so many scenarios, and the amounts of all units in them."""
        if count not in self._in_scenarios:
            pieces = [piece for unit in self.units for piece in unit.pieces]
            tables = {piece.table.access_digest: piece.table for piece in pieces}
            scenarios = self._oracle.scenarios(list(tables.values()), count)
            amounts = unit_amounts(scenarios.amounts, self.units)
            self._in_scenarios[count] = scenarios, amounts
        return self._in_scenarios[count]

    def price(self, sums: Tensor) -> Prices:
        """What devices with these sums of amounts cost."""
        return self.model.compute.price(sums)

    def _beside(self, doubt: Tensor) -> Tensor:
        """Of each unit: what it costs alone, its uncertainty, its bytes; what both halves cost
        more, what the wider one costs, and how wide that is: [units, BESIDE].
        """
        can, (first, second) = self.halves[:, 0] != WHOLE, self.halves.clamp_min(0).unbind(1)
        added = self.alone_ms[first] + self.alone_ms[second] - self.alone_ms
        of_halves = (added, self.alone_ms[second], self.widths[second].log2() / _COLUMNS)
        known = (self.alone_ms, doubt, self.sizes.float())
        return torch.stack([*known, *(some * can for some in of_halves)], dim=1)

    def _least(self) -> Tensor:
        """Of each unit, what a slice of it costs alone that is halved as far as it goes: some
        device costs no less.
        """
        narrowest = torch.arange(len(self.units))
        while bool((further := self.halves[narrowest, 1] != WHOLE).any()):  # the wider of the two
            narrowest = torch.where(further, self.halves[narrowest, 1], narrowest)
        return self.alone_ms[narrowest]


def _whole(units: Sequence[PlacementUnit]) -> Ints:
    return np.full((len(units), 2), WHOLE, np.int64)


def _with_halves(units: list[PlacementUnit]) -> Ints:
    """Adds all halves to the bundles; the numbers of the two of each: [bundles, 2]."""
    found: list[tuple[int, int]] = []
    known: list[dict[int, int]] = [{} for _ in units]  # by width, of each that is dealt
    origin = list(range(len(units)))
    for number, unit in enumerate(units):  # grows as it goes
        if not unit.can_be_split:
            found.append((WHOLE, WHOLE))
            continue
        pair = []
        for half in unit.halves():
            width = half.pieces[0].width
            if width not in known[origin[number]]:
                known[origin[number]][width] = len(units)
                units.append(half)
                origin.append(origin[number])
            pair.append(known[origin[number]][width])
        found.append((pair[0], pair[1]))
    return np.array(found, np.int64)
