"""Sharding options as actions: the kinds there are, and what each does to the units of a catalog.

An option of a kind changes the one that a whole unit has (`ShardingOption`). The unit then leaves:
its blocks of rows go onto their devices, each device gets a copy, or another unit takes its place,
such as the cold rows of the table. Whatever all devices bear alike is added to loads of the episode
(`cost_model.step.common_price`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.networks.inputs import unit_amounts
from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.cost_model.step.common_price import NODES, CommonPrice
from autoshard.workload import EmbeddingTable
from autoshard.workload.packing.table_options import TableOptions
from autoshard.workload.packing.units import PlacementUnit, bytes_of_units
from autoshard.workload.tables.table import Piece
from autoshard.workload.ways import WAYS
from autoshard.workload.ways.option import COLUMN_WISE, Options, ShardingOption, pinned_parts

SPLIT = "split"  # in halves by columns, which is no option of its own
_WAYS = {action: way for way in WAYS for action in way.actions}
OPTION_KINDS = (SPLIT, *_WAYS)
Array = np.ndarray[Any, Any]
NOT_YET = -1  # in place of the first block, of blocks that nobody asked for
NO_UNIT = -1


def changed(
    kind: str, options: TableOptions, table: EmbeddingTable, option: ShardingOption
) -> ShardingOption | None:
    """Returns the option to which an action of a kind changes that of a table; None if it may not.

    Blocks of rows on the devices of a node are on those of the first.
    """
    if kind == SPLIT:
        return None
    known = options.of(table)
    found = _WAYS[kind].after(kind, option, known, options.limits)
    return found if found is not None and found != option and found in known else None


def changed_units(options: TableOptions, base: Options) -> list[tuple[ShardingOption, Piece]]:
    """Returns what devices hold of tables whose unit is replaced by an action, with their options.

    Args:
        options: Options of the task's tables.
        base: Options that tables have at first, but for those in columns.
    """
    found = list[tuple[ShardingOption, Piece]]()
    for table in options.task.tables:
        option: ShardingOption | None = base.get(table.name, COLUMN_WISE)
        waiting = [option]
        while waiting:
            option = waiting.pop()
            assert option is not None
            for kind in _WAYS:
                other = changed(kind, options, table, option)
                if other is not None and other.by_columns:
                    held = other.held(table, options.task.batch_size)
                    found.append((other, held.whole()))
                    waiting.append(other)
    return found


class UnitOptions:
    """Effects of options on the units of a catalog, in tasks of as many devices and links alike.

    Arrays are [units, kinds], and all is relative to the option that a unit has.

    Args:
        oracle: Prices copies.
        options: Options that tables may take.
        units: Units of the catalog, without halves.
        base: Options that tables have at first, but for those in columns.
        known: Options of further units, which replace others: by their numbers.
        one_task: Whether there is one task, of all these tables; else tasks are of some of them.

    Attributes:
        base_loads: Loads on all devices before any action, [loads]; None for several tasks.
        may: Whether rules and costs let a unit take an option of each kind.
        loads: What it adds to loads, without columns on nodes: [units, kinds, NODES].
        node_columns: What it adds to the columns of its node.
        common_bytes: What it takes on each device.
        blocks: Number of blocks of rows; 0 if there are none.
        replaced: Number of the unit that takes the place of this one, or `NO_UNIT`.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        options: TableOptions,
        units: Sequence[PlacementUnit],
        base: Options,
        known: Mapping[int, ShardingOption],
        one_task: bool = True,
    ) -> None:
        self.options, self.base, self._known = options, base, known
        shape = len(units), len(OPTION_KINDS)
        self.may, self.node_columns = np.zeros(shape, bool), np.zeros(shape)
        self.loads = np.zeros((*shape, NODES))
        self.common_bytes, self.blocks = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.replaced = np.full(shape, NO_UNIT)
        self.taken: dict[tuple[int, int], tuple[EmbeddingTable, ShardingOption]] = {}
        price = CommonPrice(oracle.model.counted_overhead, options.task)
        self.base_loads = price.loads_of(base) if one_task else None
        tables = {table.name: table for table in options.task.tables}
        numbers = {(units[n].name, option): n for n, option in known.items()}
        for number, unit in enumerate(units):
            table = tables.get(unit.name)
            if table is not None and self._holds(number, unit, table):
                self._describe(number, table, price, numbers)

    def option_of(self, number: int, table: str) -> ShardingOption:
        """Returns the option that a unit has."""
        return self._known.get(number, self.base.get(table, COLUMN_WISE))

    def _holds(self, number: int, unit: PlacementUnit, table: EmbeddingTable) -> bool:
        """Returns whether a unit is what devices hold of a table by its option."""
        held = self.option_of(number, table.name).held(table, self.options.task.batch_size)
        return unit.pieces == (held.whole(),)

    def _describe(
        self,
        number: int,
        table: EmbeddingTable,
        price: CommonPrice,
        numbers: Mapping[tuple[str, ShardingOption], int],
    ) -> None:
        task, before = self.options.task, self.option_of(number, table.name)
        for column, kind in enumerate(OPTION_KINDS):
            option = changed(kind, self.options, table, before)
            if option is None:
                continue
            where = number, column
            self.may[where], self.taken[where] = True, (table, option)
            loads = price.loads(table.name, option) - price.loads(table.name, before)
            self.loads[where], self.node_columns[where] = loads[:NODES], loads[NODES:].sum()
            bytes_before = before.common_memory(table, task).total
            self.common_bytes[where] = option.common_memory(table, task).total - bytes_before
            self.blocks[where] = len(option.homes)
            if option.by_columns:
                self.replaced[where] = numbers[table.name, option]

    def pinned_parts(self, number: int, column: int, first: int = 0) -> list[tuple[Piece, int]]:
        """Returns the blocks of rows of an option as pieces, with their devices.

        Args:
            number: Number of the unit.
            column: Number of the kind.
            first: First device.
        """
        table, option = self.taken[number, column]
        return pinned_parts(self.options.task, table, option.at(first))


NO_OPTIONS = 0  # the row of `OptionCatalog` for tasks without options


class OptionCatalog:
    """Effects of options on the units of a catalog in all its tasks: all `UnitOptions` in a row.

    Blocks of rows are priced once an episode asks for them. The first row stands for tasks without
    options.

    Attributes:
        may, loads, node_columns, common_bytes, blocks, replaced: Those of each `UnitOptions`,
            [tasks, units, kinds, ...].
        amounts: What each block adds to its device, [blocks, members, amounts].
        columns: Output columns of each block, [blocks].
        sizes: Bytes of each block, [blocks].
        described: Amounts of each block that have a name, [blocks, amounts].
    """

    def __init__(self, units: int) -> None:
        shape = 1, units, len(OPTION_KINDS)
        self._units = units
        self.known: list[UnitOptions | None] = [None]
        self.may = torch.zeros(shape, dtype=torch.bool)
        self.loads, self.node_columns = np.zeros((*shape, NODES)), np.zeros(shape)
        self.common_bytes, self.blocks = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        self.replaced, self._first = (torch.full(shape, NO_UNIT) for _ in range(2))
        self.amounts = torch.empty(0)
        self.columns, self.sizes = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self.described = torch.empty(0)

    def add(self, found: UnitOptions) -> int:
        """Adds what options do in tasks of a kind; returns its number."""
        self.known.append(found)
        self.loads = np.concatenate([self.loads, self._padded(found.loads)])
        self.node_columns = np.concatenate([self.node_columns, self._padded(found.node_columns)])
        for name in ("may", "common_bytes", "blocks", "replaced"):
            new = torch.from_numpy(self._padded(getattr(found, name)))
            setattr(self, name, torch.cat([getattr(self, name), new]))
        self._first = torch.cat([self._first, torch.full_like(self._first[:1], NOT_YET)])
        return len(self.known) - 1

    def _padded(self, values: Array) -> Array:
        """Returns values of whole units [units, kinds, ...] as those of all units, with 0 for
        halves: [1, all units, kinds, ...].
        """
        padding = [(0, self._units - len(values)), *[(0, 0)] * (values.ndim - 1)]
        return np.pad(values, padding)[None]

    def first_blocks(
        self, tasks: Tensor, units: Tensor, kinds: Tensor, oracle: EstimatedCosts
    ) -> Tensor:
        """Returns the number of the first block of each option, or `NOT_YET` without blocks.

        Args:
            tasks: Number of the `UnitOptions` of each option, [options].
            units: Number of its unit.
            kinds: Number of its kind.
            oracle: Prices blocks.
        """
        found = self._first[tasks, units, kinds]
        new = ((found == NOT_YET) & (self.blocks[tasks, units, kinds] > 0)).nonzero()[:, 0]
        if not len(new):
            return found
        pieces = list[Piece]()
        keys = zip(*(values[new].tolist() for values in (tasks, units, kinds)), strict=True)
        for task, unit, kind in dict.fromkeys(keys):
            options = self.known[task]
            assert options is not None
            self._first[task, unit, kind] = len(self.columns) + len(pieces)
            pieces += [piece for piece, _ in options.pinned_parts(unit, kind)]
            operator, batch_size = options.options.task.operator, options.options.task.batch_size
        amounts = unit_amounts(oracle.amounts, pieces)
        sizes = bytes_of_units(operator, batch_size, [PlacementUnit.of(p) for p in pieces])
        columns = torch.tensor([piece.exchanged_columns for piece in pieces], dtype=torch.float32)
        described = oracle.model.compute.described(amounts)
        known = len(self.columns) > 0
        self.amounts = torch.cat([self.amounts, amounts]) if known else amounts
        self.described = torch.cat([self.described, described]) if known else described
        self.columns = torch.cat([self.columns, columns])
        self.sizes = torch.cat([self.sizes, torch.from_numpy(sizes)])
        return self._first[tasks, units, kinds]
