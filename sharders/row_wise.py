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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.copying import CopyingSharder, required_tables
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
            return self._with(required, task)
        oracle.check(task)
        try:
            plan = self._with(required, task)
        except PlanError as fault:
            return self._within_memory(required, allowed, task, fault)
        counts = task.objective.in_training or task.objective.counts_exchanges
        if not (self._plans_twice and counts):
            return plan
        even_ms = _even_ms(oracle, task)
        free = [table for table in allowed if table.name not in plan.copied]
        heavier = _gaining(oracle, task, free, even_ms)
        if not heavier:
            return plan
        step_ms = oracle.step_ms(plan, task)
        if step_ms - _least_ms(oracle, task, heavier[-1], even_ms) < _MIN_GAIN * step_ms:
            return plan
        # Greedy plans take little time. Those with rows have to be faster than that without.
        fast = CopyingSharder(FusedGreedySharder(oracle), oracle)
        plans, fastest_ms, chosen = [plan], step_ms, None
        with suppress(PlanError):
            fastest_ms = oracle.step_ms(self._with(required, task, {}, fast), task)
        for gaining in heavier:
            for firsts in ({}, *_on_nodes(oracle, task, gaining)):
                with suppress(PlanError):
                    greedy = self._with(required | gaining, task, firsts, fast)
                    if (greedy_ms := oracle.step_ms(greedy, task)) < fastest_ms:
                        fastest_ms, chosen = greedy_ms, (gaining, firsts)
        if chosen is not None:
            with suppress(PlanError):
                plans.append(self._with(required | chosen[0], task, chosen[1]))
        return min(plans, key=lambda some: oracle.step_ms(some, task))

    def _with(
        self,
        row_wise: frozenset[str],
        task: ShardingTask,
        firsts: Mapping[str, int] | None = None,
        sharder: Sharder | None = None,
    ) -> ShardingPlan:
        """Returns a plan with these tables in blocks of rows, on all devices or on one node.

        Args:
            row_wise: Names of the tables.
            task: The task.
            firsts: First device of the node, for tables that are on one.
            sharder: Places the others; by default the sharder that was given.
        """
        ranks, firsts = len(task.devices), firsts or {}
        node = ranks // task.nodes
        counts = {name: node if name in firsts else ranks for name in row_wise}
        placed = (sharder or self._sharder).shard(task.with_row_blocks(counts, firsts))
        shared = tuple(
            Placement(table.name, 0, table.dim, firsts.get(table.name, 0), counts[table.name])
            for table in task.tables
            if table.name in row_wise
        )
        return placed.with_ways_of(ShardingPlan(shared, ranks, placed.copied), task)

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
                return self._with(required | frozenset(largest[:count]), task)
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


def _gaining(
    oracle: EstimatedCosts, task: ShardingTask, tables: Sequence[EmbeddingTable], even_ms: float
) -> list[frozenset[str]]:
    """Returns the tables that take much of a device, and cost less by rows than by columns.

    The first are those that are too much for one device; each set has those before it, too. By
    columns, a table is in as many slices as there are devices, or as it may be.
    """
    if not tables:
        return []
    ranks = len(task.devices)
    exchange_ms = StepPrice.of_task(task).column_ms()
    alone_ms = _alone_ms(oracle, [table.whole() for table in tables], exchange_ms)
    shares = dict(zip(tables, (alone_ms / even_ms).tolist(), strict=True))
    gaining = dict[str, float]()
    narrowest = {
        name: rule.numbers[0]
        for rule in task.rules
        if rule.kind == "min_width"
        for name in rule.tables
    }
    for table, share in shares.items():
        if share <= min(_HEAVY):
            continue
        least = narrowest.get(table.name, DIM_STEP)
        width = max(least, -(-table.dim // ranks // DIM_STEP) * DIM_STEP)
        width = width if 2 * least <= table.dim else table.dim
        by_columns_ms = float(_alone_ms(oracle, [Piece(table, 0, width)], exchange_ms)[0])
        # On one node if not on all, which repeat outputs more often.
        for count in {ranks, ranks // task.nodes} - {1}:
            blocks = [block.whole() for block in task.row_blocks(table, count)]
            if float(_alone_ms(oracle, blocks, exchange_ms).max()) < by_columns_ms:
                gaining[table.name] = share
    sets = [frozenset(n for n, share in gaining.items() if share > least) for least in _HEAVY]
    return [some for some in dict.fromkeys(sets) if some]


def _on_nodes(
    oracle: EstimatedCosts, task: ShardingTask, row_wise: frozenset[str]
) -> Iterator[Mapping[str, int]]:
    """Yields the first device of the node that each table's blocks are on, if there are nodes.

    Tables that take most time come first, each on the node that has least to do.
    """
    ranks, nodes = len(task.devices), task.nodes
    node = ranks // nodes
    tables = [t for t in task.tables if t.name in row_wise and can_be_blocks(t.rows, node)]
    if nodes == 1 or node == 1 or not tables:
        return
    alone_ms = oracle.alone_ms([table.whole() for table in tables])
    busy_ms, firsts = np.zeros(nodes), dict[str, int]()
    for number in np.argsort(-alone_ms, kind="stable").tolist():
        chosen = int(busy_ms.argmin())
        busy_ms[chosen] += alone_ms[number]
        firsts[tables[number].name] = chosen * node
    yield firsts


def _even_ms(oracle: EstimatedCosts, task: ShardingTask) -> float:
    """Returns what each device takes if all tables are spread evenly and nothing is repeated."""
    whole = oracle.amounts([table.whole() for table in task.tables]).sum(0)
    exchange_ms = StepPrice.of_task(task).column_ms() * task.exchanged_columns
    return (float(oracle.price(whole[None]).total_ms) + exchange_ms) / len(task.devices)


def _least_ms(
    oracle: EstimatedCosts, task: ShardingTask, row_wise: frozenset[str], even_ms: float
) -> float:
    """Returns a step that a plan with these tables by rows hardly falls short of."""
    overhead = oracle.model.counted_overhead
    saved_ms = (
        0.0
        if overhead is None
        else min(0.0, overhead.of_rows.ms(task, dict.fromkeys(row_wise, len(task.devices)), ()))
    )
    return even_ms + oracle.common_ms(task) + saved_ms


def _alone_ms(oracle: EstimatedCosts, pieces: Sequence[Piece], exchange_ms: float) -> Floats:
    """Returns what each piece takes on a device of its own, with what it sends: [pieces]."""
    columns = np.array([piece.exchanged_columns for piece in pieces])
    return np.asarray(oracle.alone_ms(pieces) + exchange_ms * columns)
