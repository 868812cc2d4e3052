"""Tables in host memory, where that of devices is too small: for GPUs, by a data sheet."""

from contextlib import suppress
from dataclasses import replace

import pytest

from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.cost_model.roofline import roofline_model
from autoshard.sharders import Policy, SharderContext, make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.packing.table_options import NO_RESOURCES, OptionResources
from autoshard.workload.ways.option import ShardingOption, columns_task

SHEET, RANKS, BATCH = DATA_SHEETS["h100-80gb"], 4, 8192
# Half of the tables are skewed, and of the same sizes as those that are used evenly.
TABLES = tuple(
    EmbeddingTable(f"t{n:02}", 200_000 + 50_000 * (n // 2), 32, 4.0, zipf_alpha=1.1 * (n % 2))
    for n in range(16)
)
HOST = 2**34


def task_of(share: float) -> ShardingTask:
    """A task whose devices have so much of the memory that tables need."""
    task = ShardingTask(
        TABLES, Device.uniform(RANKS, 2**40), BATCH, objective=Objective(link=SHEET.link(RANKS))
    )
    memory = int(share * sum(map(task.table_bytes, TABLES)) / RANKS)
    return replace(task, devices=Device.uniform(RANKS, memory))


def context_of(task: ShardingTask, policy: Policy, host_bytes: int = HOST) -> SharderContext:
    model = roofline_model(SHEET).for_objective(task.objective, RANKS)
    return SharderContext(
        EstimatedCosts(model, BATCH), policy, resources=OptionResources(host_bytes=host_bytes)
    )


@pytest.mark.parametrize(
    ("name", "share"),
    [("autoshard", 0.5), ("policy", 0.7), ("neuroshard", 0.6)],
)
def test_tables_that_do_not_fit_are_cached(name: str, share: float, policy: Policy) -> None:
    task = task_of(share)
    context = context_of(task, policy)
    with pytest.raises(PlanError, match="of memory are missing"):
        make_sharder(name, replace(context, resources=NO_RESOURCES)).shard(task)
    plan = make_sharder(name, context).shard(task)
    plan.check(task)
    cached = set(plan.cached_rows)
    assert cached
    assert not cached & set(plan.copied)

    # The same share of all tables in caches is the usual setting.
    even_ms = []
    for part in (0.7, 0.5, 0.3, 0.1):
        counts = {table.name: int(part * share * table.rows) for table in TABLES}
        options = {name: ShardingOption(cached_rows=n) for name, n in counts.items()}
        apart = columns_task(task, options)
        with suppress(PlanError):  # for all but the smallest, memory may be missing
            even = make_sharder(name, replace(context, resources=NO_RESOURCES)).shard(apart)
            even = replace(even, options={**even.options, **options})
            even.check(task)
            even_ms.append(context.costs.step_ms(even, task))
    assert context.costs.step_ms(plan, task) < 0.9 * min(even_ms, default=0.0)


def test_tables_that_fit_stay_in_device_memory(policy: Policy) -> None:
    task = task_of(1.5)
    context = context_of(task, policy)
    plan = make_sharder("autoshard", context).shard(task)
    assert not plan.cached_rows
    assert plan == make_sharder("autoshard", replace(context, resources=NO_RESOURCES)).shard(task)


def test_the_link_to_the_host_counts_where_plans_are_priced(policy: Policy) -> None:
    """In the mean and in scenarios, on the device that has the table, and by the bandwidth."""
    task = task_of(2.0)
    costs = context_of(task, policy).costs
    plan = ShardingPlan.table_wise(task, [number % RANKS for number in range(len(TABLES))])
    none = replace(plan, options={TABLES[0].name: ShardingOption(cached_rows=0)})
    some = replace(plan, options={TABLES[0].name: ShardingOption(cached_rows=100_000)})
    steps = [costs.step_ms(each, task) for each in (plan, some, none)]
    assert steps == sorted(steps)
    assert steps[0] < steps[1] < steps[2]
    predictor = StepPredictor(costs, task)
    expected = [predictor.of(each).expected_ms for each in (plan, some, none)]
    assert expected[0] < expected[1] < expected[2]
    lookups = BATCH * TABLES[0].pooling_factor
    first, same = (costs.plan_cost(each, task).devices[0] for each in (none, plan))
    more_ms = first.forward_ms - same.forward_ms
    assert more_ms == pytest.approx(lookups * 32 * 4 * SHEET.host_ms_of_byte, rel=1e-3)


def test_the_host_s_memory_is_a_limit(policy: Policy) -> None:
    task = task_of(0.3)
    with pytest.raises(PlanError, match=r"would keep .* in host memory, of which each device has"):
        make_sharder("cost_fused", context_of(task, policy, host_bytes=2**20)).shard(task)


def test_cpus_have_no_link_to_the_host() -> None:
    task = replace(task_of(0.5), objective=Objective(), batch_size=1024)
    costs = EstimatedCosts(load_model("cpu"), 1024)
    sharder = make_sharder(
        "cost_fused", SharderContext(costs, resources=OptionResources(host_bytes=HOST))
    )
    with pytest.raises(UserError, match=r"is in host memory, and no bandwidth from cpu: "):
        sharder.shard(task)
