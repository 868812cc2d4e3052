"""Tables that tasks draw from (`TableCatalog`), and tasks as arrays (`TaskInstance`)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model import CostModel, EstimatedCosts, Prices
from autoshard.cost_model.networks.inputs import unit_amounts
from autoshard.cost_model.step.overhead import StepOverhead
from autoshard.cost_model.uncertainty.scenarios import Scenarios
from autoshard.envs.options import NO_OPTIONS, OptionCatalog, UnitOptions
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    OperatorOptions,
    ShardingTask,
    UserError,
)
from autoshard.workload.arrays import Ints
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.packing.table_options import TableOptions
from autoshard.workload.packing.units import Placeable, PlacementUnit, bytes_of_units
from autoshard.workload.tables.table import DIM_STEP, Piece
from autoshard.workload.ways.option import Options, ShardingOption

NO_HALVES = -1  # in place of the halves of a unit that cannot be split
_LOG_COLUMNS = 6.0  # base-2 logarithm of 64 columns
NUM_SCALARS = 6  # features of a unit beside its named amounts


@dataclass(frozen=True)
class FullTask:
    """The task that an instance is a part of, as far as all-to-alls depend on it.

    Args:
        ranks: Number of devices.
        columns: Output columns of all tables.
    """

    ranks: int
    columns: float


@dataclass(frozen=True)
class TaskInstance:
    """A task as arrays.

    Args:
        units: Numbers of the catalog's units, [units].
        memory_bytes: Memory of each device, [devices].
        masks: Placement constraints, if any.
        objective: Objective of the plan.
        larger: The task that this one is a part of, if any.
        hardware: Hardware of each device; empty where all are equal.
        options: What options do to its units, as `TableCatalog.add_options` numbers it; by default
            what they do where there are no rules.
    """

    units: Ints
    memory_bytes: Ints
    masks: RuleMasks | None = None
    objective: Objective = field(default_factory=Objective)
    larger: FullTask | None = None
    hardware: tuple[str, ...] = ()
    options: int | None = None


class TableCatalog:
    """Placement units of all tasks, with their features, costs and sizes computed in advance.

    A catalog serves one environment, which updates it when the cost model changes.

    Args:
        oracle: Predicts costs of tables and devices.
        units: Tables, column slices or groups of tables that tasks draw from.
        split: Whether to add the halves of each unit, their halves, and so on. They are numbered
            after the given units. Slices of a table that have equal widths share a number.
        operator: Operator of the tasks, by which units take memory. Default: the cost model's.
        replacing: Units that take the place of others by actions (`envs.options.changed_units`).

    Attributes:
        oracle: The cost oracle.
        undivided: The units that were given, without halves.
        units: All units.
        halves: Numbers of the two halves of each unit, or `NO_HALVES`: [units, 2].
        alone_ms: Predicted cost of each unit alone, [units].
        features: Named amounts of each unit, then `NUM_SCALARS` scalars (see `_scalars`).
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        units: Sequence[Placeable],
        split: bool = False,
        operator: OperatorOptions | None = None,
        replacing: Sequence[tuple[ShardingOption, Piece]] = (),
    ) -> None:
        if not units:
            raise UserError("an environment needs at least one table")
        self.undivided = tuple(units)
        known = [PlacementUnit.of(unit) for unit in (*units, *(piece for _, piece in replacing))]
        self._replacing = {len(units) + n: option for n, (option, _) in enumerate(replacing)}
        self._whole = len(known)
        halves = _add_halves(known) if split else np.full((len(known), 2), NO_HALVES)
        self.halves = torch.from_numpy(halves)
        self.units = tuple(known)
        self.operator = operator or oracle.model.provenance.operator
        self.batch_size = oracle.batch_size
        self.bytes = bytes_of_units(self.operator, self.batch_size, known)
        self.sizes = torch.from_numpy(self.bytes)
        self.columns = torch.tensor([unit.columns for unit in known], dtype=torch.float32)
        slices = [sum(piece.table.features for piece in unit.pieces) for unit in known]
        self.slices = torch.tensor(slices)  # of outputs, of each unit
        # Only units of one piece can be split; the widths of others are not used.
        self.widths = torch.tensor([unit.pieces[0].width for unit in known])
        self.min_half_width = torch.where(
            self.halves[:, 0] == NO_HALVES, 0, self.widths[self.halves[:, 0]]
        )
        self._by_prefix: dict[str, Ints] = {}
        self._described: list[tuple[TableOptions, Options, bool]] = []
        self._without_rules: dict[Hashable, int] = {}
        self.set_oracle(oracle)

    @staticmethod
    def of_tables(
        model: CostModel, tables: Sequence[EmbeddingTable], batch_size: int, split: bool = False
    ) -> "TableCatalog":
        """Returns a catalog of whole tables."""
        oracle = EstimatedCosts(model, batch_size)
        return TableCatalog(oracle, [table.whole() for table in tables], split)

    def task(self, instance: TaskInstance) -> ShardingTask:
        """Returns an instance as a task, without its constraints and the larger task."""
        numbers = instance.units.tolist()
        tables = [piece.table for number in numbers for piece in self.units[number].pieces]
        kind, *_ = self.oracle.of_kinds()
        hardware = instance.hardware or (kind,) * len(instance.memory_bytes)
        devices = tuple(
            Device(f"device{number}", int(memory), hardware=name)
            for number, (memory, name) in enumerate(
                zip(instance.memory_bytes, hardware, strict=True)
            )
        )
        return ShardingTask(
            tuple(tables), devices, self.batch_size, self.operator, objective=instance.objective
        )

    def with_prefix(self, prefix: str) -> Ints:
        """Returns the numbers of given units whose names begin with a prefix.

        Raises:
            UserError: There are none.
        """
        if prefix not in self._by_prefix:
            names = enumerate(unit.name for unit in self.units[: len(self.undivided)])
            found = [number for number, name in names if name.startswith(prefix)]
            if not found:
                raise UserError(f"no table of the catalog has a name that begins with {prefix!r}")
            self._by_prefix[prefix] = np.array(found, np.int64)
        return self._by_prefix[prefix]

    @cached_property
    def linear_bytes(self) -> tuple[Ints, Ints, Ints]:
        """Bytes of each given unit as a linear function of its columns, three times [units].

        Constant bytes, bytes for each column, and columns. A unit that cannot be split has the
        minimum number of columns.
        """
        found = []
        for unit, size in zip(self.units, self.bytes[: len(self.undivided)].tolist(), strict=False):
            if not unit.can_be_split:
                found.append((size, 0, DIM_STEP))
                continue
            (piece,) = unit.pieces
            narrow = Piece(piece.table, piece.start, DIM_STEP)
            narrow_bytes = self.operator.memory((narrow,), self.batch_size).total
            column = (size - narrow_bytes) // (piece.width - DIM_STEP)
            found.append((size - column * piece.width, column, piece.width))
        constant, column, width = np.array(found, np.int64).T
        return constant, column, width

    def set_oracle(self, oracle: EstimatedCosts) -> None:
        """Replaces the cost model; only the environment calls it."""
        self.model = oracle.model
        self.oracle = oracle
        self._in_scenarios: dict[int, tuple[Scenarios, Tensor]] = {}
        self.amounts: Tensor = unit_amounts(oracle.amounts, self.units)
        self.described: Tensor = oracle.model.compute.described(self.amounts)
        alone = self.price(self.amounts)
        self.alone_ms: Tensor = alone.total_ms
        self.features = torch.cat([self.described, self._scalars(alone.deviation)], dim=1)
        # Some device costs at least as much as the narrowest slice of each unit: a lower bound.
        narrowest = torch.arange(len(self.units))
        while bool((splits := self.halves[narrowest, 1] != NO_HALVES).any()):  # the wider half
            narrowest = torch.where(splits, self.halves[narrowest, 1], narrowest)
        self.narrowest_ms = self.alone_ms[narrowest]
        self.options = OptionCatalog(len(self.units))
        for described in self._described:
            self._describe(*described)

    def in_scenarios(self, count: int) -> tuple[Scenarios, Tensor]:
        """Returns `count` scenarios, which price devices, and all units' amounts in them."""
        if count not in self._in_scenarios:
            pieces = [piece for unit in self.units for piece in unit.pieces]
            tables = {piece.table.access_digest: piece.table for piece in pieces}
            scenarios = self.oracle.scenarios(list(tables.values()), count)
            amounts = unit_amounts(scenarios.amounts, self.units)
            self._in_scenarios[count] = scenarios, amounts
        return self._in_scenarios[count]

    @property
    def overhead(self) -> StepOverhead | None:
        """What training takes beside operators, if that counts."""
        return self.model.counted_overhead

    def add_options(self, options: TableOptions, base: Options, one_task: bool = True) -> int:
        """Adds the options of a task's tables; returns their number, for `TaskInstance.options`.

        Args:
            options: Options that tables may take.
            base: Options that they have at first, but for those in columns.
            one_task: Whether they are those of one task; else of tasks of some of these tables.
        """
        self._described.append((options, base, one_task))
        return self._describe(options, base, one_task)

    def options_of(self, instance: TaskInstance) -> int:
        """Returns the number of what options do to the units of an instance."""
        if instance.options is not None:
            return instance.options
        ranks, objective = len(instance.memory_bytes), instance.objective
        counts = self.overhead is not None or objective.exchanges(ranks) > 0
        if instance.masks is not None or instance.larger is not None or not counts or ranks == 1:
            return NO_OPTIONS
        # Without overhead only the outputs of blocks depend on links.
        link = objective.link
        shares = None if link is None else (link.nodes(ranks), link.block_share(ranks, ranks))
        key = (ranks, objective if self.overhead is not None else shares)
        if key not in self._without_rules:
            pieces = [unit.pieces[0] for unit in self.units[: len(self.undivided)]]
            tables = {piece.table.name: piece.table for piece in pieces}
            devices = Device.uniform(ranks, 1)
            task = ShardingTask(
                tuple(tables.values()), devices, self.batch_size, self.operator, (), objective
            )
            options = TableOptions(self.oracle.priced_options(task))
            self._without_rules[key] = self.add_options(options, {}, one_task=False)
        return self._without_rules[key]

    def _describe(self, options: TableOptions, base: Options, one_task: bool) -> int:
        units = self.units[: self._whole]
        found = UnitOptions(self.oracle, options, units, base, self._replacing, one_task)
        return self.options.add(found)

    def price(self, sums: Tensor) -> Prices:
        """Returns the costs of devices with these sums of amounts."""
        return self.oracle.price(sums)

    def _scalars(self, deviation: Tensor) -> Tensor:
        """Returns scalar features of each unit, [units, NUM_SCALARS].

        Cost alone, its relative uncertainty, bytes; additional cost of both halves, cost of the
        wider half, and log width of the wider half. The last three are 0 without halves.
        """
        splits = self.halves[:, 0] != NO_HALVES
        first, second = self.halves.clamp_min(0).unbind(1)
        added = self.alone_ms[first] + self.alone_ms[second] - self.alone_ms
        of_halves = (added, self.alone_ms[second], self.widths[second].log2() / _LOG_COLUMNS)
        known = (self.alone_ms, deviation, self.sizes.float())
        return torch.stack([*known, *(values * splits for values in of_halves)], dim=1)


def _add_halves(units: list[PlacementUnit]) -> Ints:
    """Appends the halves of all units, recursively; returns their numbers: [units, 2]."""
    found: list[tuple[int, int]] = []
    known: list[dict[int, int]] = [{} for _ in units]  # numbers by width, for each given unit
    origin = list(range(len(units)))
    for number, unit in enumerate(units):  # the list grows while it is read
        if not unit.can_be_split:
            found.append((NO_HALVES, NO_HALVES))
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
