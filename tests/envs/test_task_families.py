"""Families of tasks: what each promises, on the shipped model's costs."""

from itertools import islice

import numpy as np
import pytest
import torch

from autoshard.cost_model import StepPredictor, load_model
from autoshard.cost_model.pricing.mixed_costs import costs_of_machines
from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.envs import (
    BatchedPlacementEnv,
    EstimatedCostSource,
    MixedTaskSampler,
    RandomTaskSampler,
    TableCatalog,
)
from autoshard.envs.task_families import (
    FAMILIES,
    FILLS,
    Choice,
    Memory,
    read_choices,
    tables_of,
    task_sampler_of,
)
from autoshard.experiments.evaluation.task_sets import sample_tasks
from autoshard.workload import ShardingPlan, ShardingTask, UserError
from autoshard.workload.packing.pack import pack
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.tables.parts import PARTS, Part, part_of, tables_by_part

TRAINED = read_choices("all", "--families")
UNTRAINED = {"thousand", "thousand_tiny", "thousands"}


@pytest.fixture(scope="module")
def catalog() -> TableCatalog:
    """Of the test tables of all families that are trained on."""
    tables = tables_by_part(tables_of(TRAINED))["test"]
    return TableCatalog.of_tables(load_model("cpu"), tables, 1024)


@pytest.fixture
def machines() -> EstimatedCosts:
    """Costs of devices of several kinds."""
    return costs_of_machines(load_model("cpu"), 1024)


def of_pool(oracle: EstimatedCosts) -> TableCatalog:
    """Catalog of the test tables of the family `mixed`."""
    tables = tables_by_part(FAMILIES["mixed"].tables())["test"]
    return TableCatalog(oracle, [table.whole() for table in tables])


def some(catalog: TableCatalog, name: str, memory: Memory, count: int = 24) -> list[ShardingTask]:
    return list(islice(sample_tasks(catalog, FAMILIES[name].task_sampler(memory), 3), count))


def fill_of(task: ShardingTask) -> float:
    return sum(map(task.table_bytes, task.tables)) / int(task.usable_bytes.sum())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [choice.name for choice in TRAINED])
def test_each_part_has_tables_of_each_family(name: str, part: Part) -> None:
    family = FAMILIES[name]
    tables = tables_by_part(family.tables())[part]
    assert len({table.access_digest for table in tables}) > 0.9 * len(tables)
    if part != "validation":  # tasks for validation may be smaller
        assert len(tables) >= family.num_tables[1]
    assert len(tables) >= 40


@pytest.mark.parametrize("memory", FILLS)
@pytest.mark.parametrize("name", [choice.name for choice in TRAINED])
def test_its_tasks_are_as_it_says_and_can_be_solved(
    catalog: TableCatalog, name: str, memory: Memory
) -> None:
    family, (least, most) = FAMILIES[name], FILLS[memory]
    tasks = some(catalog, name, memory)
    for task in tasks:
        assert all(table.name.startswith(family.prefix) for table in task.tables)
        assert all(part_of(table) == "test" for table in task.tables)
        assert family.num_tables[0] <= len(task.tables) <= family.num_tables[1]
        assert family.num_devices[0] <= len(task.devices) <= family.num_devices[1]
        assert fill_of(task) <= most + 1e-3
        pack(task, split=True)
        assert min(task.usable_bytes) >= (1 - family.unevenness) * max(task.usable_bytes) * 0.999
    assert np.median([fill_of(task) for task in tasks]) >= least * 0.98


def test_giants_are_few_and_may_be_larger_than_any_device(catalog: TableCatalog) -> None:
    tasks = some(catalog, "giants", "tight")
    larger = [
        sum(task.table_bytes(table) > max(task.usable_bytes) for table in task.tables)
        for task in tasks
    ]
    assert 0 < max(larger) <= 5
    for task in tasks:
        sizes = np.sort([task.table_bytes(table) for table in task.tables])[::-1]
        assert sizes[: len(sizes) // 3].sum() > 0.8 * sizes.sum()


@pytest.mark.parametrize("name", ["slow_link", "skewed"])
def test_all_to_alls_of_a_slow_link_are_a_good_part_of_a_step(
    catalog: TableCatalog, name: str
) -> None:
    oracle = EstimatedCosts(catalog.model, 1024)
    shares = []
    for task in some(catalog, name, "loose"):
        columns = np.full(8, sum(table.dim for table in task.tables) / 8)
        exchanged = StepPrice.of_task(task).exchange_stage(columns)[0]
        alone = oracle.amounts([table.whole() for table in task.tables])[..., :2]
        computed = float(alone.mean(1).sum()) / 8
        shares.append(exchanged / (exchanged + computed))
    assert 0.25 < min(shares) < 0.45  # the operator's start is left out here
    assert 0.6 < max(shares) < 0.75


def test_directions_differ(catalog: TableCatalog) -> None:
    oracle = EstimatedCosts(catalog.model, 1024)
    for task in some(catalog, "directions", "loose", 8):
        alone = oracle.amounts([table.whole() for table in task.tables])[..., :2].mean(1)
        ratios = np.sort((alone[:, 1] / alone[:, 0]).numpy())
        assert np.quantile(ratios, 0.2) < 3 < 12 < np.quantile(ratios, 0.8)


def test_devices_are_uneven_where_they_should_be(catalog: TableCatalog) -> None:
    rooms = [task.usable_bytes for task in some(catalog, "uneven", "loose")]
    assert max(room.max() / room.min() for room in rooms) > 3


def test_mixed_devices_are_of_two_kinds_where_the_model_knows_several(
    catalog: TableCatalog, machines: EstimatedCosts
) -> None:
    assert not any(task.hardware for task in some(catalog, "mixed", "loose"))
    assert len(machines.of_kinds()) == 3  # two more are about as fast as the first
    mixed = of_pool(machines)
    tasks = some(mixed, "mixed", "loose")
    for task in tasks:
        machines.check(task)
        assert len(set(task.hardware)) == 2
    assert {name for task in tasks for name in task.hardware} == set(machines.of_kinds())
    (alike,) = some(mixed, "small", "loose", 1)
    assert set(alike.hardware) == {mixed.model.provenance.hardware}
    machines.check(alike)


def test_episodes_of_mixed_devices_expect_what_their_plans_do(machines: EstimatedCosts) -> None:
    """Devices that take a fifth of the time do so in all scenarios, too."""
    mixed = of_pool(machines)
    sampler = FAMILIES["mixed"].task_sampler("loose")
    instances = sampler.sample(mixed, np.random.default_rng(1), 4)
    episodes = BatchedPlacementEnv(mixed, 4, 60, 8)
    episodes.start(range(4), instances)
    while not episodes.over.all():
        costs = episodes.joined_ms.masked_fill(~episodes.allowed, torch.inf)
        episodes.place(costs.argmin(1))
    expected = EstimatedCostSource(scenarios=64)(episodes, range(4)).plan_ms
    for env_id, instance in enumerate(instances):
        task = mixed.task(instance)
        plan = ShardingPlan.of_pieces(task, episodes.placed_pieces(env_id))
        predicted = StepPredictor(machines, task).of(plan).expected_ms
        assert float(expected[env_id]) == pytest.approx(predicted, rel=0.05)
        assert float(episodes.plan_ms[env_id]) == pytest.approx(
            machines.step_ms(plan, task), rel=1e-3
        )


def test_a_mixture_samples_each_family_as_often(catalog: TableCatalog) -> None:
    sampler, rng = task_sampler_of(TRAINED), np.random.default_rng(0)
    assert sampler.max_tables == 100
    assert sampler.max_devices == 8
    dealt = sampler.sample(catalog, rng, 600)
    sources = [catalog.units[instance.units[0]].name.split("/")[0] for instance in dealt]
    of_pool = sources.count(FAMILIES["small"].source) / 600
    assert 0.36 < of_pool < 0.53  # small, large, uneven and mixed of nine
    fills = [
        catalog.bytes[instance.units].sum() / instance.memory_bytes.sum() for instance in dealt
    ]
    assert 0.35 < np.mean(np.array(fills) > 0.8) < 0.6
    linked = np.mean([instance.objective.link is not None for instance in dealt])
    assert 0.15 < linked < 0.3  # slow_link and skewed
    alone = MixedTaskSampler((RandomTaskSampler((2, 2)), RandomTaskSampler((3, 3))))
    assert {len(alone.sample(catalog, rng, 1)[0].units) for _ in range(40)} == {2, 3}


def test_sizes_that_are_never_trained_on_are_asked_for_by_name() -> None:
    assert {choice.name for choice in TRAINED} == set(FAMILIES) - UNTRAINED
    assert read_choices("thousand:tight, small", "x") == (
        Choice("thousand", "tight"),
        Choice("small"),
    )
    for name in UNTRAINED:
        assert FAMILIES[name].num_devices[0] > max(
            choice.family.num_devices[1] for choice in TRAINED
        )


@pytest.mark.parametrize("wrong", ["", "huge", "small:loos", "small:", "all,small", "small,,large"])
def test_a_wrong_name_is_reported_with_those_there_are(wrong: str) -> None:
    says = r"--families: .* is not one of small, large, giants"
    with pytest.raises(UserError, match=says) as told:
        read_choices(wrong, "--families")
    assert "\n" not in str(told.value)


def test_what_cannot_be_sampled_is_reported(catalog: TableCatalog) -> None:
    with pytest.raises(UserError, match="no table of the catalog has a name that begins with 'x/'"):
        RandomTaskSampler(prefix="x/").sample(catalog, np.random.default_rng(0), 1)
    with pytest.raises(UserError, match="exchange_share: must lie between 0 and 1"):
        RandomTaskSampler(exchange_share=(0.5, 1.0))
