"""How much another choice of copies and rows would save: random changes of ways, planned anew.

It bounds what learning to choose ways could add to plans by `autoshard`, which chooses them by
greedy plans.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np

from autoshard.sharders import make_sharder
from autoshard.workload import PlanError, ShardingPlan, ShardingTask, UserError
from autoshard.workload.tasks.rules import Kind, Rule
from bench.metric import Metric
from bench.workbench import context_of, say

_SECONDS = 20.0  # for each task
_WAYS = ("", "copied", "row_wise")
_CHANGED = (1, 1, 2, 4)  # tables at once; of many tables, a fiftieth more


def other_ways_metrics(tasks: Mapping[str, ShardingTask]) -> Iterator[Metric]:
    """Yields the step by price after many changes of ways, over that of autoshard's own plan."""
    for name, task in tasks.items():
        say(f"other ways for {name}")
        context = context_of(task)
        sharder, oracle = make_sharder("autoshard", context), context.costs
        plan = sharder.shard(task)
        own_ms = best_ms = oracle.step_ms(plan, task)
        ways, rng = _ways_of(plan, task), np.random.default_rng(0)
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            changed = _changed(ways, rng)
            with suppress(PlanError, UserError):
                other = sharder.shard(replace(task, rules=_rules(changed)))
                if (ms := oracle.step_ms(other, task)) < best_ms:
                    best_ms, ways = ms, changed
        yield Metric(f"{name}: step by price, best of random ways over autoshard's", "",
                     best_ms / own_ms)  # fmt: skip


def _ways_of(plan: ShardingPlan, task: ShardingTask) -> dict[str, str]:
    return {
        table.name: "copied"
        if table.name in plan.copied
        else "row_wise"
        if table.name in plan.row_wise
        else ""
        for table in task.tables
    }


def _changed(ways: Mapping[str, str], rng: np.random.Generator) -> dict[str, str]:
    """Returns the ways with those of some random tables changed."""
    found, names = dict(ways), list(ways)
    count = int(rng.choice(_CHANGED)) + len(names) // 50
    for name in rng.choice(names, min(count, len(names)), replace=False):
        found[name] = str(rng.choice([way for way in _WAYS if way != ways[name]]))
    return found


def _rules(ways: Mapping[str, str]) -> tuple[Rule, ...]:
    """Returns the rules that demand these ways."""
    kinds: tuple[tuple[Kind, str], ...] = (
        ("copied", "copied"), ("row_wise", "row_wise"), ("not_copied", ""), ("not_row_wise", ""),
    )  # fmt: skip
    tables = {kind: tuple(name for name, way in ways.items() if way == of) for kind, of in kinds}
    return tuple(Rule(kind, names) for kind, names in tables.items() if names)
