"""Sets of options that a search may begin with: which tables are copied, or by rows.

With even devices, a table's lookups cost each of them a share of the operators and of the
all-to-alls. A copy costs each its own lookups, and the update and all-reduce of all rows instead.
Both are nearly additive, so the tables that gain from a copy follow from their own numbers. Rows
divide the lookups of a table, where slices of columns repeat them, but each block has outputs of
full width for the samples of all devices: they pay for tables that are too much for one device.

Greedy plans tell which set is the best to begin with. The search changes what they got wrong.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.prediction import Placed
from autoshard.sharders.heuristics.cost_greedy import FusedGreedySharder
from autoshard.sharders.heuristics.split_greedy import cut_greedy, split_greedy
from autoshard.workload import EmbeddingTable, Piece, PlanError, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.packing.table_options import (
    NO_RESOURCES,
    OptionResources,
    TableOptions,
    until_worse,
)
from autoshard.workload.packing.units import Placeable, PlacementUnit
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.tables.table import DIM_STEP, can_be_blocks
from autoshard.workload.ways.option import COLUMN_WISE, DATA_PARALLEL, Options, ShardingOption

_MIN_GAIN = 0.01  # of the step: less is not worth another optimizer for copied tables
_SHARES = (1.0, 0.5, 0.25, 0.1)  # of the tables that gain: fewer where they do not fit into memory
_MORE = (1.0, 1.3, 1.6, 2.0)  # the same, where tables that lose a little may be copied, too
_HEAVY = 0.25  # of what a device takes on average: tables that take more may be worth rows
_Splits = Literal["never", "quickly", "thoroughly"]
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tables by rows that are tried


class Start:
    """A set of options to begin with, and greedy plans by it.

    Args:
        sets: Where it comes from.
        options: Options of tables that are not in columns.
        splits: How large tables are split where whole ones do not fit.

    Attributes:
        task: Task of what single devices hold.

    Raises:
        PlanError: There is no memory for copies.
    """

    def __init__(self, sets: "OptionSets", options: Options, splits: _Splits) -> None:
        self.options, self._sets, self._splits = options, sets, splits
        self.task = sets.options.columns_task(options)

    @cached_property
    def greedy(self) -> Sequence[Sharded]:
        """The greedy plan, and more with large tables in pieces; none if none fits."""
        sets, thoroughly = self._sets, self._splits == "thoroughly"
        with suppress(PlanError):
            whole = sets.options.sharded(FusedGreedySharder(sets.oracle), self.options)
            cut = sets.cut(self.task, self.options) if thoroughly else []
            return [whole, *map(self._of_columns, cut)]
        if self._splits == "never":
            return []
        return list(map(self._of_columns, split_greedy(sets.oracle, self.task, thoroughly)))

    def _of_columns(self, placed: Placed) -> Sharded:
        return Sharded.of_columns(self._sets.task, placed, self.options)

    @cached_property
    def is_split(self) -> bool:
        """Whether whole tables do not fit, and parts of them do."""
        return any(found.is_split for found in self.greedy[:1])

    @cached_property
    def step_ms(self) -> float:
        """What the best greedy plan takes; infinite without one."""
        oracle, task = self._sets.oracle, self._sets.task
        return min((oracle.step_ms(g.plan(task), task) for g in self.greedy), default=math.inf)


class OptionSets:
    """Proposes sets of options for a task, and plans greedily by them.

    Args:
        oracle: Cost oracle of the task.
        task: The task.
        resources: Ids of hot rows, hashed ids and host memory, as far as options may use them.

    Attributes:
        options: What tables may take.
    """

    def __init__(
        self, oracle: EstimatedCosts, task: ShardingTask, resources: OptionResources = NO_RESOURCES
    ) -> None:
        self.oracle, self.task = oracle, task
        limits = replace(oracle.priced_options(task), hash_ids=resources.hash_ids)
        if resources.num_hot_ids:
            from autoshard.sharders.search.hot_row_counts import hot_row_counts  # few tasks need it

            counts = hot_row_counts(oracle, task, resources.num_hot_ids)
            limits = replace(limits, hot_rows=counts)
        self.options = TableOptions(limits, resources.host_bytes)
        self._common = oracle.common(task)
        self._exchange_ms = StepPrice.of_task(task).column_ms()

    def starts(self) -> list[Start]:
        """Returns the sets that fit with their greedy plans, that of the fastest first.

        Where no greedy plan fits, there may be others.
        """
        found = list[Start]()
        if not self.options.cached or self.options.fit_into_devices:
            found = self._of_columns_and_copies()
        if self.options.cached and not self._any_fits(found):
            self._append_until_worse(found, ([some] for some in self.options.cached))
            # Smaller caches leave memory for rows: the best is wanted of each size.
            found = [min(self._with_rows([start]), key=_step_ms) for start in found]
            return sorted(found, key=_step_ms)
        base = _best(found).options if found else self.options.required
        found, hot = self._with_rows(found), list[Start]()
        if found and not _copied(base) and _best(found).options is not base:
            # A table that was too much for one device may have hidden what copies gain.
            self._append_copies(found, _best(found).options)
        if self.task.objective.counts_exchanges:
            self._append_until_worse(found, self._without_columns())
        if (hot_rows := self._hot_rows(base)) is not None:
            self._append(hot, hot_rows)
            found += self._with_rows(hot) if hot else []
        return sorted(found, key=_step_ms) if len(found) > 1 else found

    def cut(self, columns: ShardingTask, options: Options) -> list[Placed]:
        """Returns greedy plans with costly tables in pieces, where a search that splits one table
        after another may not get there: the first split costs more than others.

        Args:
            columns: Task of what single devices hold.
            options: Options of tables that are not in columns.
        """
        if not self._common.counts_splits:
            return []
        return cut_greedy(self.oracle, columns, self.even_ms(options), self.alone_ms)

    def _with_rows(self, found: Sequence[Start]) -> list[Start]:
        """Returns these starts, and those that have rows beside the options of the best one."""
        found = list(found)
        base = _best(found).options if found else self.options.required
        rows = ([{**base, **some} for some in sets] for sets in self._rows(base))
        self._append_until_worse(found, rows)
        return found

    def _any_fits(self, found: Sequence[Start]) -> bool:
        """Whether there is a plan by any of these sets, greedy or not."""
        if not any(start.greedy for start in found):
            try:
                self.options.any_plan(in_host=False)
            except PlanError:
                return False
        return True

    def _of_columns_and_copies(self) -> list[Start]:
        """Returns the set of required options, and the first one with copies that fits."""
        required, found = self.options.required, list[Start]()
        with suppress(PlanError):
            found.append(Start(self, required, "thoroughly"))
        self._append_copies(found, required)
        return found

    def _append_copies(self, found: list[Start], options: Options) -> None:
        """Appends the first set with copies beside these options that fits."""
        for copies in self._copies():
            if self._append(found, {**copies, **options}) < math.inf:
                break

    def _append_until_worse(self, found: list[Start], sets: Iterable[Iterable[Options]]) -> None:
        """Appends sets of options until some in a row are no better than the best."""
        steps_ms = (min(self._append(found, options) for options in alike) for alike in sets)
        until_worse(steps_ms, found, min(map(_step_ms, found), default=math.inf))

    def _hot_rows(self, options: Options) -> Options | None:
        """Returns the options with hot rows of all tables of which they may pay; None if none."""
        hot = dict[str, ShardingOption]()
        for table in self.task.tables:
            count = self.options.limits.hot_rows.get(table.name, 0)
            option = replace(options.get(table.name, COLUMN_WISE), hot_rows=count)
            if count and option in self.options.of(table):
                hot[table.name] = option
        return {**options, **hot} if hot else None

    def _append(self, found: list[Start], options: Options) -> float:
        """Appends a set of options if its greedy plan fits; returns what that takes.

        Blocks of many tables take long to plan: where the exchange of their outputs alone takes
        longer than the best plan, they are not.
        """
        if found and self._of_blocks_ms(options) >= _best(found).step_ms:
            return math.inf
        with suppress(PlanError):
            splits: _Splits = "thoroughly"
            if found:
                splits = "quickly" if found[0].is_split else "never"
            start = Start(self, options, splits)
            if start.greedy:
                found.append(start)
            return start.step_ms
        return math.inf

    def _of_blocks_ms(self, options: Options) -> float:
        """Returns what devices take on average to exchange outputs of tables by rows."""
        task, columns = self.task, 0.0
        for table in task.tables:
            count = len(options.get(table.name, COLUMN_WISE).homes)
            if count:
                columns += task.block_share(table, count) * count * table.whole().exchanged_columns
        return columns * self._exchange_ms / len(task.devices)

    def _copies(self) -> Iterator[Options]:
        """Yields sets of copies, the largest first; none where copies gain too little."""
        free = self._free_to_copy
        if not free:
            return
        gains_ms, spread_ms = self._gains_ms
        order, gaining = np.argsort(-gains_ms), int((gains_ms > 0).sum())
        all_ms = float(gains_ms.sum())
        if len(free) + len(self.options.required) == len(self.task.tables):
            all_ms += self._starts_ms()
        names = [free[number].name for number in order]
        if all_ms >= max(_MIN_GAIN * spread_ms, float(gains_ms[gains_ms > 0].sum())):
            yield dict.fromkeys(names, DATA_PARALLEL)
        if float(gains_ms[gains_ms > 0].sum()) >= _MIN_GAIN * spread_ms:
            for share in _SHARES:
                yield dict.fromkeys(names[: max(1, round(share * gaining))], DATA_PARALLEL)

    def _without_columns(self) -> Iterator[Iterator[Options]]:
        """Yields sets with copies and rows alone: then no all-to-alls of columns have to start."""
        free = self._free_to_copy
        if not free:
            return
        gains_ms, _ = self._gains_ms
        order, gaining = np.argsort(-gains_ms).tolist(), int((gains_ms > 0).sum())
        for count in sorted({min(round(share * gaining), len(free)) for share in _MORE} - {0}):
            copies = {free[number].name: DATA_PARALLEL for number in order[:count]}
            rest = [t for t in self.task.tables if t.name not in copies]
            yield ({**copies, **rows} for rows in self._on_devices(rest, self.options.required))

    @cached_property
    def _free_to_copy(self) -> list[EmbeddingTable]:
        """Tables that may be copied, and need not be."""
        return [t for t in self.task.tables if DATA_PARALLEL in self.options.of(t)[1:]]

    @cached_property
    def _gains_ms(self) -> tuple[Floats, float]:
        """By how much a copy of each of `_free_to_copy` shortens the step of even devices,
        [tables], and that step.
        """
        oracle, task, tables = self.oracle, self.task, self._free_to_copy
        ranks = len(task.devices)
        whole = oracle.amounts([table.whole() for table in task.tables]).sum(0)
        mine = oracle.amounts([table.whole() for table in tables])
        without_ms = oracle.price(whole - mine).total_ms.double().numpy()
        whole_ms = float(oracle.price(whole[None]).total_ms)
        columns = np.array([table.whole().exchanged_columns for table in tables])
        spread_ms = (whole_ms - without_ms + self._exchange_ms * columns) / ranks
        step_ms = (whole_ms + self._exchange_ms * task.exchanged_columns) / ranks
        gains_ms = spread_ms + self._common.copy_gains_ms([table.name for table in tables])
        return gains_ms, step_ms + oracle.common_ms(task)

    def _starts_ms(self) -> float:
        """Returns what operators take to start, less what copies do."""
        overhead = self.oracle.model.counted_overhead
        assert overhead is not None
        assert overhead.copies is not None
        return overhead.forward.start_ms + overhead.backward.start_ms - overhead.copies.start_ms

    def _rows(self, options: Options) -> Iterator[Iterator[Options]]:
        """Yields sets of tables by rows: the one that is most for a device, then more.

        Each is yielded on all devices and, where there are nodes, each table on one node.
        """
        free = [
            table
            for table in self._in_columns(options)
            if any(option.homes for option in self.options.of(table))
        ]
        if not free:
            return
        alone_ms = self.alone_ms([table.whole() for table in free])
        shares = alone_ms / self.even_ms(options)
        order = np.argsort(-shares, kind="stable").tolist()
        heavy = [free[number] for number in order if shares[number] > _HEAVY]
        if not heavy:
            return
        gaining = self._cheaper_by_rows(heavy)
        for count in sorted({min(count, len(gaining)) for count in _ROWS} - {0}):
            yield self._on_devices(gaining[:count], options)

    def _in_columns(self, options: Options) -> list[EmbeddingTable]:
        """Returns what devices hold of the tables that are in columns by these options."""
        found = [(table, options.get(table.name, COLUMN_WISE)) for table in self.task.tables]
        batch = self.task.batch_size
        return [option.held(table, batch) for table, option in found if option.by_columns]

    def _on_devices(self, tables: Sequence[EmbeddingTable], options: Options) -> Iterator[Options]:
        ranks, nodes = len(self.task.devices), self.task.nodes
        columns = {table.name: options.get(table.name, COLUMN_WISE) for table in tables}
        everywhere = {n: self.options.in_blocks(o, ranks) for n, o in columns.items()}
        yield {t.name: o for t in tables if (o := everywhere[t.name]) in self.options.of(t)}
        node = ranks // nodes
        if nodes == 1 or node == 1:
            return
        # Tables that take most time come first, each on the node that has least to do.
        alone_ms, busy_ms = self.oracle.alone_ms([t.whole() for t in tables]), np.zeros(nodes)
        found = {}
        for number in np.argsort(-alone_ms, kind="stable").tolist():
            chosen = int(busy_ms.argmin())
            table = tables[number]
            option = self.options.in_blocks(columns[table.name], node, chosen * node)
            if option in self.options.of(table):
                busy_ms[chosen] += alone_ms[number]
                found[table.name] = option
        if found:
            yield found

    def _cheaper_by_rows(self, tables: Sequence[EmbeddingTable]) -> list[EmbeddingTable]:
        """Returns the tables whose blocks cost less than as many slices of columns."""
        ranks, task = len(self.task.devices), self.task
        narrowest = {
            name: rule.numbers[0]
            for rule in task.rules
            if rule.kind == "min_width"
            for name in rule.tables
        }
        slices = []
        for table in tables:
            least = narrowest.get(table.name, DIM_STEP)
            width = max(least, -(-table.dim // ranks // DIM_STEP) * DIM_STEP)
            slices.append(Piece(table, 0, width if 2 * least <= table.dim else table.dim))
        # On one node if not on all, which repeat outputs more often.
        blocks_ms = [
            self.alone_ms([self._largest_block(table, count) for table in tables])
            for count in {ranks, ranks // task.nodes} - {1}
        ]
        gains = np.min(blocks_ms, axis=0) < self.alone_ms(slices)
        return [table for table, gain in zip(tables, gains, strict=True) if gain]

    def _largest_block(self, table: EmbeddingTable, count: int) -> Piece:
        if not can_be_blocks(table.rows, count):
            return table.whole()
        held = self.options.in_blocks(COLUMN_WISE, count).held(table, self.task.batch_size)
        blocks = self.task.row_blocks(held, count)
        return max(blocks, key=lambda block: block.pooling_factor).whole()

    def even_ms(self, options: Options) -> float:
        """Returns what each device takes if what is in columns is spread evenly.

        Where devices differ, it is spread so that all take equally long.
        """
        task, tables = self.task, self._in_columns(options)
        devices, whole = len(task.devices), self.oracle.amounts([t.whole() for t in tables]).sum(0)
        columns = sum(table.whole().exchanged_columns for table in tables)
        sums = whole[None] + self.oracle.of_devices(task.hardware)
        each_ms = self.oracle.price(sums).total_ms.numpy().astype(float)
        # Nothing is in columns where it takes no time.
        shared_ms = 1 / np.broadcast_to(1 / each_ms, devices).sum() if each_ms.all() else 0.0
        return float(shared_ms + self._exchange_ms * columns / devices)

    def alone_ms(self, units: Sequence[Placeable]) -> Floats:
        """Returns what each unit takes on a device of its own, with what it sends: [units]."""
        columns = np.array([PlacementUnit.of(unit).columns for unit in units])
        return np.asarray(self.oracle.alone_ms(units) + self._exchange_ms * columns)


def _copied(options: Options) -> bool:
    return any(option.copied for option in options.values())


def _best(found: Sequence[Start]) -> Start:
    """Returns the fastest start; of a single one the step need not be known."""
    return found[0] if len(found) == 1 else min(found, key=_step_ms)


def _step_ms(start: Start) -> float:
    return start.step_ms
