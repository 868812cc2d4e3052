"""Random plans with splits, to learn from: each other plan balances otherwise and splits more."""

from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np

from autoshard.workload import Placement, PlanError, ShardingPlan, ShardingTask
from autoshard.workload.tables.table import DIM_STEP, can_be_blocks
from autoshard.workload.ways.option import DATA_PARALLEL

_SPLIT_SHARES = (0.0, 0.2, 0.6)  # shares of tables that a plan splits
_EVENNESS = (3.0, 30.0)  # parameters of Dirichlet's distribution of tables over devices
_COPIED_SHARES = (0.3, 0.6, 1.0)
_MAX_COPIED = 2**22  # weights of a table that is copied: 16 MiB
_ROW_SHARES = (0.1, 0.3, 1.0)
_TRIALS = 100  # plans in a row that do not fit into memory


def random_plans(task: ShardingTask, seed: int = 0) -> Iterator[ShardingPlan]:
    """Yields random plans that keep the task's rules.

    Raises:
        PlanError: Many plans in a row do not fit into memory.
    """
    rng = np.random.default_rng(seed)
    return _valid((_drawn(task, rng) for _ in count()), task)


def copying_plans(
    plans: Iterable[ShardingPlan], task: ShardingTask, rng: np.random.Generator
) -> Iterator[ShardingPlan]:
    """Yields plans with copies of a random share of the tables that are small enough.

    If no table is small there are none. PlanError as for `random_plans`.
    """
    small = [table.name for table in task.tables if table.rows * table.dim <= _MAX_COPIED]

    def copying(plan: ShardingPlan) -> ShardingPlan:
        number = max(1, round(rng.choice(_COPIED_SHARES) * len(small)))
        copied = frozenset(rng.permutation(small)[:number].tolist())
        kept = tuple(placement for placement in plan.placements if placement.table not in copied)
        return ShardingPlan(kept, plan.num_devices, dict.fromkeys(copied, DATA_PARALLEL))

    return _valid(map(copying, plans if small else ()), task)


def row_wise_plans(
    plans: Iterable[ShardingPlan], task: ShardingTask, rng: np.random.Generator
) -> Iterator[ShardingPlan]:
    """Yields plans in which a random share of the tables is in blocks of rows on all devices.

    On one device there are none. PlanError as for `random_plans`.
    """
    ranks = len(task.devices)
    tables = [table for table in task.tables if can_be_blocks(table.rows, ranks)]

    def row_wise(plan: ShardingPlan) -> ShardingPlan:
        number = max(1, round(rng.choice(_ROW_SHARES) * len(tables)))
        chosen = {tables[n].name: tables[n].dim for n in rng.permutation(len(tables))[:number]}
        kept = (placement for placement in plan.placements if placement.table not in chosen)
        shared = (Placement(name, 0, dim, 0, ranks) for name, dim in chosen.items())
        return ShardingPlan((*kept, *shared), ranks)

    return _valid(map(row_wise, plans if tables and ranks > 1 else ()), task)


def _valid(plans: Iterable[ShardingPlan], task: ShardingTask) -> Iterator[ShardingPlan]:
    """Yields those that are valid; PlanError after many in a row that are not."""
    failed = 0
    for plan in plans:
        try:
            plan.check(task)
        except PlanError:
            failed += 1
            if failed == _TRIALS:
                raise
            continue
        failed = 0
        yield plan


def plans_of_all_ways(task: ShardingTask, seed: int = 0) -> Iterator[ShardingPlan]:
    """Yields random plans in turn: of columns alone, with copies, with blocks of rows, with both.

    Without small tables none has copies.
    """
    rng = np.random.default_rng(seed)
    drawn = random_plans(task, seed)
    kinds = [
        drawn,
        copying_plans(drawn, task, rng),
        row_wise_plans(drawn, task, rng),
        copying_plans(row_wise_plans(drawn, task, rng), task, rng),
    ]
    while True:
        for kind in kinds:
            plan = next(kind, None)
            if plan is not None:
                yield plan


def _drawn(task: ShardingTask, rng: np.random.Generator) -> ShardingPlan:
    ranks = len(task.devices)
    share = rng.choice(_SPLIT_SHARES)
    weights = rng.dirichlet(np.full(ranks, rng.choice(_EVENNESS)))
    placements = []
    for table in task.tables:
        units = table.dim // DIM_STEP
        parts = 1
        if rng.random() < share and min(units, ranks) > 1:
            parts = int(rng.integers(2, min(units, ranks) + 1))
        homes = rng.choice(ranks, parts, replace=False, p=weights)
        inner = np.sort(rng.choice(units - 1, parts - 1, replace=False)) + 1 if parts > 1 else ()
        edges = [0, *map(int, inner), units]
        for home, first, last in zip(homes.tolist(), edges, edges[1:], strict=False):
            start, width = first * DIM_STEP, (last - first) * DIM_STEP
            placements.append(Placement(table.name, start, width, int(home)))
    return ShardingPlan(tuple(sorted(placements)), ranks)
