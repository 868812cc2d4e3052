"""Where costs come from: the cost model, the cluster's benchmark pool, or both."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from episodes import AMPLE, assignment, episodes_of, greedily, instance

from autoshard.benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from autoshard.cost_model import CostModel, EstimatedCosts, StepPredictor
from autoshard.cost_model.step.overhead import SHARED_LOADS, DirectionOverhead, StepOverhead
from autoshard.envs import (
    BatchedPlacementEnv,
    Costs,
    EstimatedCostSource,
    MeasuredCostSource,
    MixedCostSource,
    NegativeStep,
    RandomTaskSampler,
    ShardingVectorEnv,
    TableCatalog,
)
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    Shard,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.plans.step_price import StepPrice

BATCH_SIZE = 512
INSTANCES = [instance([0, 1, 2], AMPLE, AMPLE), instance([3, 4, 5], AMPLE, AMPLE, AMPLE)]
MOVES = np.array([[0, 1], [1, 1], [0, 1]])  # the second episode leaves two devices empty
Asked = list[list[Measurement]]


@pytest.fixture(scope="module")
def small_catalog(model: CostModel, tables: tuple[EmbeddingTable, ...]) -> TableCatalog:
    quick = sorted(tables, key=lambda table: table.rows * table.dim)[:6]
    return TableCatalog.of_tables(model, quick, BATCH_SIZE)


@pytest.fixture
def asked(cluster: object, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The answers to each call of the pool."""
    calls: Asked = []
    measure = BenchmarkPool.measure

    def listen(
        pool: BenchmarkPool, shards: Sequence[Shard], *settings: object
    ) -> list[Measurement]:
        calls.append(measure(pool, shards, *settings))  # type: ignore[arg-type]
        return calls[-1]

    monkeypatch.setattr(BenchmarkPool, "measure", listen)
    return calls


class Pretended(MeasuredCostSource):
    """Measures nothing: every device costs -1, every plan -2."""

    def __init__(self) -> None:
        super().__init__("nowhere.db")
        self.env_ids: list[int] = []

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        self.env_ids += env_ids
        self.num_requested += len(env_ids)
        plans = torch.full((len(env_ids),), -2.0)
        return Costs(plans, torch.full((len(env_ids), episodes.max_devices), -1.0))


def finished(catalog: TableCatalog) -> BatchedPlacementEnv:
    episodes = episodes_of(catalog, *INSTANCES)
    for devices in MOVES:
        episodes.place(torch.from_numpy(devices))
    assert not episodes.infeasible.any()
    return episodes


def played(catalog: TableCatalog, source: object) -> tuple[np.ndarray, ShardingVectorEnv]:
    """The last rewards of the two episodes, and the environment they were played in."""
    task_sampler = RandomTaskSampler((3, 3), (3, 3))
    env = ShardingVectorEnv(catalog, 2, task_sampler, NegativeStep(), source)  # type: ignore[arg-type]
    env.reset(seed=0, options={"instances": INSTANCES})
    for devices in MOVES:
        _, rewards, ended, _, _ = env.step(devices)
    assert ended.all()
    return rewards, env


def test_estimated_costs_are_what_the_episode_predicted(small_catalog: TableCatalog) -> None:
    episodes = finished(small_catalog)
    for env_ids in ([0, 1], [1]):
        costs = EstimatedCostSource()(episodes, env_ids)
        assert torch.equal(costs.devices_ms, episodes.cost_ms[env_ids])
        assert torch.equal(costs.plan_ms, episodes.plan_ms[env_ids])
    costs.devices_ms[:] = 0
    assert episodes.cost_ms[1].sum() > 0  # what was handed out is a copy


def test_in_scenarios_the_slowest_device_is_the_expected_one(small_catalog: TableCatalog) -> None:
    """As a plan's outlook tells, in other scenarios."""
    episodes = finished(small_catalog)
    expected = EstimatedCostSource(scenarios=64)(episodes, [0, 1])
    ratios = expected.devices_ms / episodes.cost_ms.clamp_min(1e-9)
    oracle = EstimatedCosts(small_catalog.model, small_catalog.batch_size)
    for env_id in (0, 1):
        instance = episodes.instances[env_id]
        assert instance is not None
        tables = tuple(small_catalog.undivided[n].table for n in instance.units)
        task = ShardingTask(tables, Device.uniform(len(instance.memory_bytes), 2**50), BATCH_SIZE)
        plan = ShardingPlan.table_wise(task, assignment(episodes, env_id))
        told = StepPredictor(oracle, task).of(plan).expected_ms
        assert float(expected.plan_ms[env_id]) == pytest.approx(told, rel=0.03)
        there = ratios[env_id][episodes.cost_ms[env_id] > 0]
        scale = float(expected.plan_ms[env_id] / episodes.plan_ms[env_id])
        assert there.tolist() == pytest.approx([scale] * len(there))  # as balanced


def test_episodes_that_end_together_are_measured_in_one_call_and_only_once(
    small_catalog: TableCatalog, asked: Asked, tmp_path: Path
) -> None:
    source = MeasuredCostSource(tmp_path / "costs.db")
    rewards, env = played(small_catalog, source)
    assert [len(answers) for answers in asked] == [3]  # devices of both
    level = small_catalog.model.provenance.reference_level
    assert level is not None
    told = [answer.normalized_to(level).cost() for answer in asked[0]]
    costs = [cost.total_ms for cost in told]
    bound = env.episodes.lower_bound_ms.tolist()
    slowest = [
        max(cost.forward_ms for cost in told[:2]),
        max(cost.backward_ms for cost in told[:2]),
    ]
    expected = [-sum(slowest) / bound[0], -costs[2] / bound[1]]
    assert rewards.tolist() == pytest.approx(expected, rel=1e-5)
    assert env.tally()["requested_shards"] == source.num_requested == 3

    again, _ = played(small_catalog, MeasuredCostSource(tmp_path / "costs.db"))
    assert [answer.reused for answer in asked[1]] == [True] * 3
    assert again.tolist() == pytest.approx(rewards.tolist())

    all_mixed, _ = played(
        small_catalog, MixedCostSource(MeasuredCostSource(tmp_path / "costs.db"), 1.0)
    )
    assert all_mixed.tolist() == pytest.approx(rewards.tolist())
    assert all(answer.reused for answer in asked[2])

    episodes = finished(small_catalog)
    found = MeasuredCostSource(tmp_path / "costs.db")(episodes, [1, 0])
    assert found.devices_ms[0].tolist() == pytest.approx([0, costs[2], 0])
    assert found.devices_ms[1].tolist() == pytest.approx([*costs[:2], 0])
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert len(store) == 3


def test_what_is_measured_is_the_shards_of_the_episode_in_its_batch(
    small_catalog: TableCatalog,
    asked: Asked,
    make_pool: Callable[..., BenchmarkPool],
    tmp_path: Path,
) -> None:
    episodes = finished(small_catalog)
    found = MeasuredCostSource(tmp_path / "costs.db")(episodes, [0])
    shards = [shard for shard in episodes.shards(0) if shard is not None]
    assert [answer.shard for answer in asked[0]] == shards
    settings = MeasureSettings(BATCH_SIZE, small_catalog.model.provenance.operator)
    measured = make_pool().measure(shards, settings)
    assert all(answer.reused for answer in measured)
    level = small_catalog.model.provenance.reference_level
    expected = [answer.normalized_to(level).total_ms for answer in measured]
    assert found.devices_ms[0, :2].tolist() == pytest.approx(expected)


def test_a_measured_step_of_training_includes_what_comes_with_operators(
    small_catalog: TableCatalog, asked: Asked, tmp_path: Path
) -> None:
    passes = DirectionOverhead(2.0, 0.0, 0.0, 0.0, 5.0)
    overhead = StepOverhead(passes, passes, *[0.0] * len(SHARED_LOADS))
    objective = Objective("step")
    training = replace(small_catalog.model, overhead=overhead).for_objective(objective)
    tables = [piece.table for unit in small_catalog.units for piece in unit.pieces]
    found = []
    for model in (small_catalog.model, training):
        episodes = finished(TableCatalog.of_tables(model, tables, BATCH_SIZE))
        found.append(MeasuredCostSource(tmp_path / "costs.db")(episodes, [0]).devices_ms[0, :2])
    assert (2 * found[0] + 2 * 5.0).tolist() == pytest.approx(found[1].tolist(), rel=1e-3)
    assert all(answer.reused for answer in asked[1])


def test_measured_plans_include_their_all_to_alls(
    small_catalog: TableCatalog, asked: Asked, tmp_path: Path
) -> None:
    """Each episode for its own, over the link of its objective."""
    links = (Link(1e6), Link(1e7, 2e-3))
    instances = [
        replace(mine, objective=Objective("operators", link))
        for mine, link in zip(INSTANCES, links, strict=True)
    ]
    episodes, without = episodes_of(small_catalog, *instances), finished(small_catalog)
    for devices in MOVES:
        episodes.place(torch.from_numpy(devices))
    source = MeasuredCostSource(tmp_path / "costs.db")
    with_link, alone = source(episodes, [0, 1]), source(without, [0, 1])
    for env_id, mine in enumerate(instances):
        columns = np.array([0.0 if s is None else s.total_dim for s in episodes.shards(env_id)])
        price = StepPrice.of(mine.objective, BATCH_SIZE, len(columns), columns.sum())
        each = price.exchange_stage(columns)
        added = with_link.plan_ms[env_id] - alone.plan_ms[env_id]
        assert float(added) == pytest.approx(each.max(), rel=1e-3)
        waits = (with_link.devices_ms - alone.devices_ms)[env_id, : len(columns)]
        assert waits.tolist() == pytest.approx(each.tolist(), rel=1e-3)
    assert source.num_requested == 6
    assert all(answer.reused for answer in asked[1])


def test_mixed_without_a_share_measures_nothing(small_catalog: TableCatalog) -> None:
    estimated, _ = played(small_catalog, EstimatedCostSource())
    pretended = Pretended()
    mixed, env = played(small_catalog, MixedCostSource(pretended, 0.0))
    assert mixed.tolist() == estimated.tolist()
    assert pretended.env_ids == []
    assert env.tally()["requested_shards"] == 0


def test_mixed_measures_its_share_drawn_by_its_seed(catalog: TableCatalog) -> None:
    episodes = episodes_of(catalog, *[instance([3, 8], AMPLE, AMPLE)] * 400)
    while not episodes.over.all():
        episodes.place(greedily(episodes))
    drawn = []
    for seed in (1, 1, 2):
        pretended = Pretended()
        source = MixedCostSource(pretended, 0.3, seed)
        costs = source(episodes, range(100, 400))
        measured = (costs.devices_ms < 0).all(1).nonzero()[:, 0] + 100
        assert ((costs.plan_ms == -2).nonzero()[:, 0] + 100).tolist() == measured.tolist()
        assert pretended.env_ids == measured.tolist()
        assert source.num_requested == len(measured)
        estimated = (costs.devices_ms > 0).all(1).nonzero()[:, 0]
        assert len(measured) + len(estimated) == 300
        assert torch.equal(costs.devices_ms[estimated], episodes.cost_ms[estimated + 100])
        assert torch.equal(costs.plan_ms[estimated], episodes.plan_ms[estimated + 100])
        drawn.append(measured.tolist())
        source(episodes, range(300))
        assert pretended.env_ids[len(measured) :] != measured.tolist()
    assert 60 < len(drawn[0]) < 120
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OutsideTraining")
def test_a_shard_that_cannot_be_measured_counts_with_its_estimate(
    model: CostModel, tables: tuple[EmbeddingTable, ...], asked: Asked, tmp_path: Path
) -> None:
    huge = EmbeddingTable("huge", 2**36, 128, 4.0)
    catalog = TableCatalog.of_tables(model, [huge], BATCH_SIZE)
    episodes = episodes_of(catalog, instance([0], AMPLE, AMPLE))
    episodes.place(torch.tensor([1]))
    costs = MeasuredCostSource(tmp_path / "costs.db")(episodes, [0])
    assert not asked[0][0].ok
    assert torch.equal(costs.devices_ms, episodes.cost_ms)
    assert torch.equal(costs.plan_ms, episodes.plan_ms)


def test_infeasible_episodes_are_not_measured(small_catalog: TableCatalog) -> None:
    pretended = Pretended()
    env = ShardingVectorEnv(small_catalog, 2, RandomTaskSampler((3, 3), (3, 3)), source=pretended)
    env.reset(seed=0, options={"instances": INSTANCES})
    for devices in ([0, 0], [0, 0], [2, 0]):  # the first episode has no third device
        _, _, ended, _, infos = env.step(np.array(devices))
    assert ended.all()
    assert infos["infeasible"].tolist() == [True, False]
    assert pretended.env_ids == [1]
