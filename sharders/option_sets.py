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
from functools import cached_property

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.common_price import CommonPrice
from autoshard.sharders.cost_greedy import FusedGreedySharder
from autoshard.sharders.split_greedy import split_greedy
from autoshard.sharders.table_options import TableOptions
from autoshard.workload import EmbeddingTable, Piece, PlanError, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.options import DATA_PARALLEL, Options, Sharded, ShardingOption
from autoshard.workload.step_price import StepPrice
from autoshard.workload.tables import DIM_STEP, can_be_blocks

_MIN_GAIN = 0.01  # of the step: less is not worth another optimizer for copied tables
_SHARES = (1.0, 0.5, 0.25, 0.1)  # of the tables that gain: fewer where they do not fit into memory
_HEAVY = 0.25  # of what a device takes on average: tables that take more may be worth rows
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tables by rows that are tried
_WORSE = 2  # so many sets that are no better than the best end that


class Start:
    """A set of options to begin with, and greedy plans by it.

    Args:
        sets: Where it comes from.
        options: Options of tables that are not in columns.
        splits: Whether large tables are split where whole ones do not fit.

    Attributes:
        task: Task of what single devices hold.

    Raises:
        PlanError: There is no memory for copies.
    """

    def __init__(self, sets: "OptionSets", options: Options, splits: bool) -> None:
        self.options, self._sets, self._splits = options, sets, splits
        self.task = sets.options.columns_task(options)

    @cached_property
    def greedy(self) -> Sequence[Sharded]:
        """The greedy plan; two if large tables are split for it; none if it does not fit."""
        oracle, of = self._sets.oracle, self._sets.options
        with suppress(PlanError):
            return [of.sharded(FusedGreedySharder(oracle), self.options)]
        found = split_greedy(oracle, self.task) if self._splits else []
        return [Sharded.of_columns(self._sets.task, placed, self.options) for placed in found]

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

    Attributes:
        options: What tables may take.
    """

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask) -> None:
        self.oracle, self.task = oracle, task
        objective = task.objective
        counts = objective.in_training or objective.counts_exchanges
        self.options = TableOptions(task, copies=oracle.copies is not None, rows=counts)
        self._common = CommonPrice(oracle.model.counted_overhead, task)
        self._exchange_ms = StepPrice.of_task(task).column_ms()

    def starts(self) -> list[Start]:
        """Returns the sets that fit with their greedy plans, that of the fastest first.

        Where no greedy plan fits, there may be others.
        """
        required: Options = self.options.required
        found = list[Start]()
        with suppress(PlanError):
            found.append(Start(self, required, splits=True))
        copied = required
        for copies in self._copies():
            if self._append(found, {**required, **copies}) < math.inf:
                copied = min(found, key=_step_ms).options
                break
        worse = 0
        for sets in self._rows(copied):
            best_ms = min(map(_step_ms, found), default=math.inf)
            least_ms = min(self._append(found, {**copied, **rows}) for rows in sets)
            worse = 0 if least_ms < best_ms else worse + 1
            if worse == _WORSE:
                break
        return sorted(found, key=_step_ms) if len(found) > 1 else found

    def _append(self, found: list[Start], options: Options) -> float:
        """Appends a set of options if its greedy plan fits; returns what that takes."""
        with suppress(PlanError):
            start = Start(self, options, splits=not found)
            if start.greedy:
                found.append(start)
            return start.step_ms
        return math.inf

    def _copies(self) -> Iterator[Options]:
        """Yields sets of copies, the largest first; none where copies gain too little."""
        free = [t for t in self.task.tables if DATA_PARALLEL in self.options.of(t)[1:]]
        if not free:
            return
        gains_ms, spread_ms = self._gains_ms(free)
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

    def _gains_ms(self, tables: Sequence[EmbeddingTable]) -> tuple[Floats, float]:
        """Returns by how much a copy of each table shortens the step of even devices, [tables],
        and that step.
        """
        oracle, task = self.oracle, self.task
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
            for table in self.task.tables
            if table.name not in options
            and any(o.row_blocks > 1 for o in self.options.of(table)[1:])
        ]
        if not free:
            return
        alone_ms = self._alone_ms([table.whole() for table in free])
        shares = alone_ms / self._even_ms(options)
        order = np.argsort(-shares, kind="stable").tolist()
        heavy = [free[number] for number in order if shares[number] > _HEAVY]
        if not heavy:
            return
        gaining = self._cheaper_by_rows(heavy)
        for count in sorted({min(count, len(gaining)) for count in _ROWS} - {0}):
            yield self._on_devices(gaining[:count])

    def _on_devices(self, tables: Sequence[EmbeddingTable]) -> Iterator[Options]:
        ranks, nodes = len(self.task.devices), self.task.nodes
        everywhere = ShardingOption(row_blocks=ranks)
        yield {t.name: everywhere for t in tables if everywhere in self.options.of(t)}
        node = ranks // nodes
        if nodes == 1 or node == 1:
            return
        # Tables that take most time come first, each on the node that has least to do.
        alone_ms, busy_ms = self.oracle.alone_ms([t.whole() for t in tables]), np.zeros(nodes)
        found = {}
        for number in np.argsort(-alone_ms, kind="stable").tolist():
            chosen = int(busy_ms.argmin())
            option = ShardingOption(row_blocks=node, first=chosen * node)
            if option in self.options.of(tables[number]):
                busy_ms[chosen] += alone_ms[number]
                found[tables[number].name] = option
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
            self._alone_ms([self._largest_block(table, count) for table in tables])
            for count in {ranks, ranks // task.nodes} - {1}
        ]
        gains = np.min(blocks_ms, axis=0) < self._alone_ms(slices)
        return [table for table, gain in zip(tables, gains, strict=True) if gain]

    def _largest_block(self, table: EmbeddingTable, count: int) -> Piece:
        if not can_be_blocks(table.rows, count):
            return table.whole()
        blocks = self.task.row_blocks(table, count)
        return max(blocks, key=lambda block: block.pooling_factor).whole()

    def _even_ms(self, options: Options) -> float:
        """Returns what each device takes if what is in columns is spread evenly.

        Where devices differ, it is spread so that all take equally long.
        """
        task = self.task
        tables = [table for table in task.tables if table.name not in options]
        devices, whole = len(task.devices), self.oracle.amounts([t.whole() for t in tables]).sum(0)
        columns = sum(table.whole().exchanged_columns for table in tables)
        sums = whole[None] + self.oracle.of_devices(task.hardware)
        each_ms = self.oracle.price(sums).total_ms.numpy().astype(float)
        shared_ms = 1 / np.broadcast_to(1 / each_ms, devices).sum()
        return float(shared_ms + self._exchange_ms * columns / devices)

    def _alone_ms(self, pieces: Iterable[Piece]) -> Floats:
        """Returns what each piece takes on a device of its own, with what it sends: [pieces]."""
        pieces = list(pieces)
        columns = np.array([piece.exchanged_columns for piece in pieces])
        return np.asarray(self.oracle.alone_ms(pieces) + self._exchange_ms * columns)


def _step_ms(start: Start) -> float:
    return start.step_ms
