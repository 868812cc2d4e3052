"""Random plans with splits, to learn from: each other plan balances otherwise and splits more."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import numpy as np

from autoshard.workload import EmbeddingTable, Placement, PlanError, ShardingPlan, ShardingTask
from autoshard.workload.tables.table import DIM_STEP
from autoshard.workload.ways import OptionLimits, Way
from autoshard.workload.ways.copies import Copies
from autoshard.workload.ways.rows import Rows

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

    If no table is small, or there is one device, there are none. PlanError as for `random_plans`.
    """
    small = [table for table in task.tables if table.rows * table.dim <= _MAX_COPIED]
    return _valid(_with_options(plans, task, rng, Copies(), small, _COPIED_SHARES), task)


def row_wise_plans(
    plans: Iterable[ShardingPlan], task: ShardingTask, rng: np.random.Generator
) -> Iterator[ShardingPlan]:
    """Yields plans in which a random share of the tables is in blocks of rows on all devices.

    On one device there are none. PlanError as for `random_plans`.
    """
    return _valid(_with_options(plans, task, rng, Rows(), task.tables, _ROW_SHARES), task)


def _with_options(
    plans: Iterable[ShardingPlan],
    task: ShardingTask,
    rng: np.random.Generator,
    way: Way,
    tables: Sequence[EmbeddingTable],
    shares: Sequence[float],
) -> Iterator[ShardingPlan]:
    """Yields plans in which a random share of some tables takes the option of a way that is on
    all devices.
    """
    limits, ranks = OptionLimits(task), len(task.devices)
    known = {
        table.name: option
        for table in tables
        for option in way.options(table, (), limits)
        if option.copied or len(option.homes) == ranks
    }
    for plan in plans if known else ():
        number = max(1, round(rng.choice(shares) * len(known)))
        chosen = rng.permutation([*known])[:number].tolist()
        yield plan.with_options(task, {name: known[name] for name in chosen})


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
