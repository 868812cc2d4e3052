"""Tables in host memory: planned caches beside those that hold the same share of all tables."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

from autoshard.cost_model.roofline import roofline_model
from autoshard.sharders import make_sharder, needs_of, open_context
from autoshard.workload import Device, Objective, PlanError, ShardingTask, load_tables
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.packing.gpu_memory import SORT_BYTES
from autoshard.workload.packing.table_options import OptionResources
from autoshard.workload.tables.operators import INDEX_BYTES, OperatorOptions
from autoshard.workload.tasks.rules import Rule
from autoshard.workload.ways.option import ShardingOption, columns_task
from bench.metric import Metric
from bench.workbench import say

_SHEET, _RANKS, _BATCH = DATA_SHEETS["h100-80gb"], 8, 65_536
_SHARES = (0.5, 0.25, 0.1)  # of the memory that tables need
_OF_SHARE = (1.0, 0.8, 0.6, 0.4, 0.2)  # that caches of all tables alike may hold
_SKEWS = {"even lookups": 0.0, "Zipf 1.05": 1.05}
_HOST_BYTES = 2**39


def host_memory_metrics() -> list[Metric]:
    """Step by price on 8 H100 that have too little memory, for tables of MLPerf DLRM-v2."""
    found = []
    for name, skew in _SKEWS.items():
        tables = tuple(
            replace(t, zipf_alpha=skew, reuse=None, reuse_batch_size=None)
            for t in load_tables("mlperf:dlrm-v2")
        )
        task = ShardingTask(
            tables,
            Device.uniform(_RANKS, 2**40),
            _BATCH,
            OperatorOptions(lookup_bytes=INDEX_BYTES + SORT_BYTES),
            objective=Objective("step", _SHEET.link(_RANKS)),
        )
        needed = sum(map(task.table_bytes, tables)) / _RANKS
        for share in _SHARES:
            say(f"host memory: {name}, {share:.0%} of what tables need")
            tight = replace(task, devices=Device.uniform(_RANKS, int(share * needed)))
            ours, even = _steps(tight, share)
            label = f"mlperf dlrm-v2, {name}, memory for {share:.0%}: step by price"
            found.append(Metric(f"{label}, planned caches", "", ours, "ms"))
            over = f"{label}, over the same share of all tables"
            found.append(Metric(over, "at most 1", ours / even))
    return found


def _steps(task: ShardingTask, share: float) -> tuple[float, float]:
    """Returns the step with planned caches, and the least one where caches hold the same share of
    all tables that are not copied.
    """
    model = roofline_model(_SHEET).for_objective(task.objective, _RANKS)
    context = open_context(needs_of(["autoshard"]), task.tables, _BATCH, model)
    known = replace(context, resources=OptionResources(host_bytes=_HOST_BYTES))
    planned = make_sharder("autoshard", known).shard(task)
    planned.check(task)
    even_ms = []
    names = tuple(table.name for table in task.tables)
    for part, rules in product(_OF_SHARE, ((), (Rule("not_copied", names),))):
        options = {
            table.name: ShardingOption(cached_rows=int(part * share * table.rows))
            for table in task.tables
        }
        with suppress(PlanError):  # copies take more than the caches in their place
            cached = columns_task(replace(task, rules=rules), options)
            plan = make_sharder("autoshard", context).shard(cached)
            plan = replace(plan, options={**options, **plan.options})
            plan.check(task)
            even_ms.append(context.costs.step_ms(plan, task))
    return context.costs.step_ms(planned, task), min(even_ms)
