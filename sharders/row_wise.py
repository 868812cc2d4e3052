"""Tables in blocks of rows, on all devices (row-wise) or on those of a node (table-row-wise);
another sharder places the others.

Blocks divide the lookups of a table, where slices of columns repeat them, but each block has
outputs of full width for the samples of all devices. So rows pay for a table that is too much for
one device and has many lookups for each column, and they are what is left for a table that fits on
no device even in the narrowest slices. Which tables gain follows from their own prices; whether the
plan gains is decided by planning with blocks and without. With several nodes, greedy plans decide
whether blocks are on all devices, which share the lookups of each table, or on those of one node,
which repeat outputs less often.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.copying import even_ms, plan_with_copies, required_tables
from autoshard.sharders.cost_greedy import FusedGreedySharder
from autoshard.workload import EmbeddingTable, Piece, PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.placements import Placement
from autoshard.workload.step_price import StepPrice
from autoshard.workload.tables import DIM_STEP, can_be_blocks

# Of what a device takes on average: a table that takes more may be worth blocks of rows.
_HEAVY = (1.0, 0.5, 0.25)
_MIN_GAIN = 0.01  # of the step: less is not worth planning twice
_COUNTS = (1, 4, 16)  # of tables by rows that are tried where no plan fits without


class RowWiseSharder:
    """Shards tables by rows where that is faster, a constraint says so, or no other plan fits.

    Args:
        sharder: Places the other tables.
        oracle: Prices plans. Without one, only those tables are sharded by rows that have to be.
        plans_twice: Whether the sharder may plan with rows and without; otherwise it plans with
            rows only where there is no plan without.
    """

    def __init__(
        self, sharder: Sharder, oracle: EstimatedCosts | None = None, plans_twice: bool = True
    ) -> None:
        self._sharder = sharder
        self._oracle = oracle
        self._plans_twice = plans_twice

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if none is found."""
        required, allowed = _required(task), _allowed(task)
        oracle = self._oracle
        if oracle is None:
            return _with_rows(self._sharder, task, required)
        oracle.check(task)
        try:
            plan = _with_rows(self._sharder, task, required)
        except PlanError as fault:
            return self._within_memory(required, allowed, task, fault)
        counts = task.objective.in_training or task.objective.counts_exchanges
        if not (self._plans_twice and counts):
            return plan
        plans = [plan]
        if (chosen := _Trials(oracle, task, plan, required, allowed).fastest()) is not None:
            with suppress(PlanError):
                plans.append(_with_rows(self._sharder, task, required | chosen[0], chosen[1]))
        return min(plans, key=lambda some: oracle.step_ms(some, task))

    def _within_memory(
        self,
        required: frozenset[str],
        allowed: Sequence[EmbeddingTable],
        task: ShardingTask,
        fault: PlanError,
    ) -> ShardingPlan:
        """Returns a plan with few of the largest tables by rows, or raises the fault."""
        largest = [t.name for t in sorted(allowed, key=lambda t: -task.table_bytes(t))]
        if sum(map(task.table_bytes, task.tables)) > task.usable_bytes.sum():
            raise fault
        for count in sorted({min(count, len(largest)) for count in _COUNTS} - {0}):
            with suppress(PlanError):
                return _with_rows(self._sharder, task, required | frozenset(largest[:count]))
        raise fault


def _required(task: ShardingTask) -> frozenset[str]:
    """Returns the tables that have to be by rows; PlanError if that is not possible."""
    required = required_tables(task, "row_wise", lambda rule: rule.allows_rows)
    ranks = len(task.devices)
    for table in task.tables:
        if table.name in required and not (ranks > 1 and can_be_blocks(table.rows, ranks)):
            why = f"{table.rows} rows in {ranks} even blocks leave a device without rows"
            raise PlanError(
                f"the constraint {required[table.name].name!r} cannot be kept for table "
                f"{table.name}: {why if ranks > 1 else 'rows need two devices or more'}"
            )
    return frozenset(required)


def _allowed(task: ShardingTask) -> list[EmbeddingTable]:
    """Returns the tables that may be by rows, and need not be."""
    fixed = {
        name
        for rule in task.rules
        if rule.kind == "row_wise" or not rule.allows_rows
        for name in rule.tables
    }
    ranks = len(task.devices)
    return [
        table
        for table in task.tables
        if ranks > 1 and table.name not in fixed and can_be_blocks(table.rows, ranks)
    ]


class _Trials:
    """Greedy plans with tables in blocks of rows, which show whether these may be faster.

    Args:
        oracle: Prices plans.
        task: The task.
        plan: Plan without, or with as few rows as there have to be.
        required: Tables that have to be by rows.
        allowed: Tables that may be.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        task: ShardingTask,
        plan: ShardingPlan,
        required: frozenset[str],
        allowed: Sequence[EmbeddingTable],
    ) -> None:
        self._oracle, self._task, self._plan, self._required = oracle, task, plan, required
        self._allowed = [table for table in allowed if table.name not in plan.copied]
        self._exchange_ms = StepPrice.of_task(task).column_ms()

    def fastest(self) -> tuple[frozenset[str], Mapping[str, int]] | None:
        """Returns the tables whose blocks make the greedy plan fastest, and the first devices of
        those that are on one node; None if the greedy plan without is as fast.
        """
        heavier = self._gaining()
        if not heavier:
            return None

        def greedy_ms(row_wise: frozenset[str], firsts: Mapping[str, int]) -> float:
            try:
                plan = _with_rows(self, self._task, self._required | row_wise, firsts)
            except PlanError:
                return math.inf
            return self._oracle.step_ms(plan, self._task)

        limit_ms = (1 - _MIN_GAIN) * self._oracle.step_ms(self._plan, self._task)
        tried = [
            (gaining, firsts)
            for gaining in heavier
            for firsts in ({}, *self._on_nodes(gaining))
            if self._least_ms(gaining, firsts) < limit_ms
        ]
        if not tried:
            return None
        without_ms = greedy_ms(frozenset(), {})
        steps_ms = [greedy_ms(*each) for each in tried]
        best = int(np.argmin(steps_ms))
        return tried[best] if steps_ms[best] < without_ms else None

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns the greedy plan with the copies of the given plan."""
        greedy = FusedGreedySharder(self._oracle)
        return plan_with_copies(greedy.shard, frozenset(self._plan.copied), task)

    def _gaining(self) -> list[frozenset[str]]:
        """Returns tables that take much of a device, and cost less by rows than by columns.

        The first are those that are too much for one device; each set has those before it, too. By
        columns, a table is in as many slices as there are devices, or as it may be.
        """
        ranks, task = len(self._task.devices), self._task
        if not self._allowed:
            return []
        alone_ms = self._alone_ms([table.whole() for table in self._allowed])
        shares = alone_ms / even_ms(self._oracle, self._task)
        heavy = [table for table, share in zip(self._allowed, shares, strict=True)
                 if share > min(_HEAVY)]  # fmt: skip
        if not heavy:
            return []
        narrowest = {
            name: rule.numbers[0]
            for rule in task.rules
            if rule.kind == "min_width"
            for name in rule.tables
        }
        slices = []
        for table in heavy:
            least = narrowest.get(table.name, DIM_STEP)
            width = max(least, -(-table.dim // ranks // DIM_STEP) * DIM_STEP)
            slices.append(Piece(table, 0, width if 2 * least <= table.dim else table.dim))
        # On one node if not on all, which repeat outputs more often.
        blocks_ms = [
            self._alone_ms([self._largest_block(table, count) for table in heavy])
            for count in {ranks, ranks // task.nodes} - {1}
        ]
        gains = np.min(blocks_ms, axis=0) < self._alone_ms(slices)
        share_of = dict(zip((table.name for table in self._allowed), shares, strict=True))
        names = [table.name for table, gain in zip(heavy, gains, strict=True) if gain]
        sets = [frozenset(name for name in names if share_of[name] > least) for least in _HEAVY]
        return [some for some in dict.fromkeys(sets) if some]

    def _largest_block(self, table: EmbeddingTable, count: int) -> Piece:
        blocks = self._task.row_blocks(table, count)
        return max(blocks, key=lambda block: block.pooling_factor).whole()

    def _on_nodes(self, row_wise: frozenset[str]) -> Iterator[Mapping[str, int]]:
        """Yields the first device of the node that each table's blocks are on, if there are nodes.

        Tables that take most time come first, each on the node that has least to do.
        """
        ranks, nodes = len(self._task.devices), self._task.nodes
        node = ranks // nodes
        tables = [t for t in self._allowed if t.name in row_wise and can_be_blocks(t.rows, node)]
        if nodes == 1 or node == 1 or not tables:
            return
        alone_ms = self._oracle.alone_ms([table.whole() for table in tables])
        busy_ms, firsts = np.zeros(nodes), dict[str, int]()
        for number in np.argsort(-alone_ms, kind="stable").tolist():
            chosen = int(busy_ms.argmin())
            busy_ms[chosen] += alone_ms[number]
            firsts[tables[number].name] = chosen * node
        yield firsts

    def _least_ms(self, row_wise: frozenset[str], firsts: Mapping[str, int]) -> float:
        """Returns a step that a plan with these tables by rows hardly falls short of."""
        counts = _counts(self._task, row_wise, firsts)
        overhead = self._oracle.model.counted_overhead
        saved_ms = 0.0 if overhead is None else overhead.of_rows.ms(self._task, counts, ())
        spread_ms = even_ms(self._oracle, self._rest.with_row_blocks(counts, firsts))
        return spread_ms + self._common_ms + min(0.0, saved_ms)

    @cached_property
    def _rest(self) -> ShardingTask:
        return self._task.without(self._plan.copied, reserve=False)

    @cached_property
    def _common_ms(self) -> float:
        return self._oracle.common_ms(self._task, self._plan)

    def _alone_ms(self, pieces: Sequence[Piece]) -> Floats:
        """Returns what each piece takes on a device of its own, with what it sends: [pieces]."""
        columns = np.array([piece.exchanged_columns for piece in pieces])
        return np.asarray(self._oracle.alone_ms(pieces) + self._exchange_ms * columns)


def _with_rows(
    sharder: Sharder,
    task: ShardingTask,
    row_wise: frozenset[str],
    firsts: Mapping[str, int] | None = None,
) -> ShardingPlan:
    """Returns a plan with these tables in blocks of rows, on all devices or on one node.

    Args:
        sharder: Places the others.
        task: The task.
        row_wise: Names of the tables.
        firsts: First device of the node, for tables that are on one.
    """
    firsts = firsts or {}
    counts = _counts(task, row_wise, firsts)
    placed = sharder.shard(task.with_row_blocks(counts, firsts))
    shared = tuple(
        Placement(table.name, 0, table.dim, firsts.get(table.name, 0), counts[table.name])
        for table in task.tables
        if table.name in row_wise
    )
    return placed.with_ways_of(ShardingPlan(shared, len(task.devices), placed.copied), task)


def _counts(
    task: ShardingTask, row_wise: frozenset[str], firsts: Mapping[str, int]
) -> dict[str, int]:
    """Returns the number of blocks of each table."""
    ranks = len(task.devices)
    return {name: ranks // task.nodes if name in firsts else ranks for name in row_wise}
