"""Where costs come from: the cost model, the cluster's benchmark pool, or both."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plays import AMPLE, deal, game_of, greedily

from autoshard.benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from autoshard.cost_model import CostModel, EstimatedCosts, TaskOutlook
from autoshard.envs import (
    Costs,
    Deck,
    EstimatedRewards,
    MeasuredRewards,
    MixedRewards,
    NegativeStep,
    RandomDeals,
    ShardingGame,
    ShardingVectorEnv,
)
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    Shard,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.objective import Link
from autoshard.workload.step_price import StepPrice

BATCH_SIZE = 512
DEALS = [deal([0, 1, 2], AMPLE, AMPLE), deal([3, 4, 5], AMPLE, AMPLE, AMPLE)]
MOVES = np.array([[0, 1], [1, 1], [0, 1]])  # the second game leaves two devices empty
Asked = list[list[Measurement]]


@pytest.fixture(scope="module")
def small_deck(model: CostModel, tables: tuple[EmbeddingTable, ...]) -> Deck:
    quick = sorted(tables, key=lambda table: table.rows * table.dim)[:6]
    return Deck.of_tables(model, quick, BATCH_SIZE)


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


class Pretended(MeasuredRewards):
    """Measures nothing: every device costs -1, every plan -2."""

    def __init__(self) -> None:
        super().__init__("nowhere.db")
        self.seats: list[int] = []

    def __call__(self, game: ShardingGame, seats: Sequence[int]) -> Costs:
        self.seats += seats
        self.measured += len(seats)
        plans = torch.full((len(seats),), -2.0)
        return Costs(plans, torch.full((len(seats), game.max_devices), -1.0))


def finished(deck: Deck) -> ShardingGame:
    game = game_of(deck, *DEALS)
    for devices in MOVES:
        game.place(torch.from_numpy(devices))
    assert not game.stuck.any()
    return game


def played(deck: Deck, source: object) -> tuple[np.ndarray, ShardingVectorEnv]:
    """The last rewards of the two games, and the environment they were played in."""
    generator = RandomDeals((3, 3), (3, 3))
    env = ShardingVectorEnv(deck, 2, generator, NegativeStep(), source)  # type: ignore[arg-type]
    env.reset(seed=0, options={"deals": DEALS})
    for devices in MOVES:
        _, rewards, ended, _, _ = env.step(devices)
    assert ended.all()
    return rewards, env


def test_estimated_costs_are_what_the_game_foretold(small_deck: Deck) -> None:
    game = finished(small_deck)
    for seats in ([0, 1], [1]):
        costs = EstimatedRewards()(game, seats)
        assert torch.equal(costs.devices_ms, game.cost_ms[seats])
        assert torch.equal(costs.plan_ms, game.plan_ms[seats])
    costs.devices_ms[:] = 0
    assert game.cost_ms[1].sum() > 0  # what was handed out is a copy


def test_in_scenarios_the_slowest_device_is_the_expected_one(small_deck: Deck) -> None:
    """As a plan's outlook tells, in other scenarios."""
    game = finished(small_deck)
    expected = EstimatedRewards(scenarios=64)(game, [0, 1])
    ratios = expected.devices_ms / game.cost_ms.clamp_min(1e-9)
    oracle = EstimatedCosts(small_deck.model, small_deck.batch_size)
    for seat in (0, 1):
        deal = game.deals[seat]
        assert deal is not None
        tables = tuple(small_deck.pieces[n].table for n in deal.pieces)
        task = ShardingTask(tables, Device.uniform(len(deal.memory_bytes), 2**50), BATCH_SIZE)
        plan = ShardingPlan.table_wise(task, game.assignment(seat).tolist())
        told = TaskOutlook(oracle, task).of(plan).expected_ms
        assert float(expected.plan_ms[seat]) == pytest.approx(told, rel=0.03)
        there = ratios[seat][game.cost_ms[seat] > 0]
        scale = float(expected.plan_ms[seat] / game.plan_ms[seat])
        assert there.tolist() == pytest.approx([scale] * len(there))  # as balanced


def test_games_that_end_together_are_measured_in_one_call_and_only_once(
    small_deck: Deck, asked: Asked, tmp_path: Path
) -> None:
    source = MeasuredRewards(tmp_path / "costs.db")
    rewards, env = played(small_deck, source)
    assert [len(answers) for answers in asked] == [3]  # two devices of one game, one of the other
    level = small_deck.model.provenance.quiet
    assert level is not None
    told = [answer.told_at(level).cost() for answer in asked[0]]
    costs = [cost.total_ms for cost in told]
    bound = env.game.bound_ms.tolist()
    slowest = [
        max(cost.forward_ms for cost in told[:2]),
        max(cost.backward_ms for cost in told[:2]),
    ]
    expected = [-sum(slowest) / bound[0], -costs[2] / bound[1]]
    assert rewards.tolist() == pytest.approx(expected, rel=1e-5)
    assert env.tally()["asked"] == source.measured == 3

    again, _ = played(small_deck, MeasuredRewards(tmp_path / "costs.db"))
    assert [answer.reused for answer in asked[1]] == [True] * 3
    assert again.tolist() == pytest.approx(rewards.tolist())

    all_mixed, _ = played(small_deck, MixedRewards(MeasuredRewards(tmp_path / "costs.db"), 1.0))
    assert all_mixed.tolist() == pytest.approx(rewards.tolist())
    assert all(answer.reused for answer in asked[2])

    game = finished(small_deck)
    found = MeasuredRewards(tmp_path / "costs.db")(game, [1, 0])
    assert found.devices_ms[0].tolist() == pytest.approx([0, costs[2], 0])
    assert found.devices_ms[1].tolist() == pytest.approx([*costs[:2], 0])
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert len(store) == 3


def test_what_is_measured_is_the_shards_of_the_game_in_its_batch(
    small_deck: Deck, asked: Asked, make_pool: Callable[..., BenchmarkPool], tmp_path: Path
) -> None:
    game = finished(small_deck)
    found = MeasuredRewards(tmp_path / "costs.db")(game, [0])
    shards = [shard for shard in game.shards(0) if shard is not None]
    assert [answer.shard for answer in asked[0]] == shards
    settings = MeasureSettings(BATCH_SIZE, small_deck.model.provenance.operator)
    measured = make_pool().measure(shards, settings)
    assert all(answer.reused for answer in measured)
    level = small_deck.model.provenance.quiet
    expected = [answer.told_at(level).total_ms for answer in measured]
    assert found.devices_ms[0, :2].tolist() == pytest.approx(expected)


def test_measured_plans_wait_for_their_all_to_alls(
    small_deck: Deck, asked: Asked, tmp_path: Path
) -> None:
    """Each game for its own, over the link of its objective."""
    links = (Link(1e6), Link(1e7, 2e-3))
    deals = [
        replace(mine, objective=Objective("step", link))
        for mine, link in zip(DEALS, links, strict=True)
    ]
    game, without = game_of(small_deck, *deals), finished(small_deck)
    for devices in MOVES:
        game.place(torch.from_numpy(devices))
    source = MeasuredRewards(tmp_path / "costs.db")
    with_link, alone = source(game, [0, 1]), source(without, [0, 1])
    for seat, mine in enumerate(deals):
        columns = np.array([0.0 if s is None else s.total_dim for s in game.shards(seat)])
        price = StepPrice.of(mine.objective, BATCH_SIZE, len(columns), columns.sum())
        each = price.exchange_stage(columns)
        added = with_link.plan_ms[seat] - alone.plan_ms[seat]
        assert float(added) == pytest.approx(each.max(), rel=1e-3)
        waits = (with_link.devices_ms - alone.devices_ms)[seat, : len(columns)]
        assert waits.tolist() == pytest.approx(each.tolist(), rel=1e-3)
    assert source.measured == 6
    assert all(answer.reused for answer in asked[1])


def test_mixed_without_a_share_measures_nothing(small_deck: Deck) -> None:
    estimated, _ = played(small_deck, EstimatedRewards())
    pretended = Pretended()
    mixed, env = played(small_deck, MixedRewards(pretended, 0.0))
    assert mixed.tolist() == estimated.tolist()
    assert pretended.seats == []
    assert env.tally()["asked"] == 0


def test_mixed_measures_its_share_drawn_by_its_seed(deck: Deck) -> None:
    game = game_of(deck, *[deal([3, 8], AMPLE, AMPLE)] * 400)
    while not game.over.all():
        game.place(greedily(game))
    drawn = []
    for seed in (1, 1, 2):
        pretended = Pretended()
        source = MixedRewards(pretended, 0.3, seed)
        costs = source(game, range(100, 400))
        measured = (costs.devices_ms < 0).all(1).nonzero()[:, 0] + 100
        assert ((costs.plan_ms == -2).nonzero()[:, 0] + 100).tolist() == measured.tolist()
        assert pretended.seats == measured.tolist()
        assert source.measured == len(measured)
        estimated = (costs.devices_ms > 0).all(1).nonzero()[:, 0]
        assert len(measured) + len(estimated) == 300
        assert torch.equal(costs.devices_ms[estimated], game.cost_ms[estimated + 100])
        assert torch.equal(costs.plan_ms[estimated], game.plan_ms[estimated + 100])
        drawn.append(measured.tolist())
        source(game, range(300))
        assert pretended.seats[len(measured) :] != measured.tolist()
    assert 60 < len(drawn[0]) < 120
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OutsideTraining")
def test_a_shard_that_cannot_be_measured_counts_with_its_estimate(
    model: CostModel, tables: tuple[EmbeddingTable, ...], asked: Asked, tmp_path: Path
) -> None:
    huge = EmbeddingTable("huge", 2**36, 128, 4.0)
    deck = Deck.of_tables(model, [huge], BATCH_SIZE)
    game = game_of(deck, deal([0], AMPLE, AMPLE))
    game.place(torch.tensor([1]))
    costs = MeasuredRewards(tmp_path / "costs.db")(game, [0])
    assert not asked[0][0].ok
    assert torch.equal(costs.devices_ms, game.cost_ms)
    assert torch.equal(costs.plan_ms, game.plan_ms)


def test_games_at_a_dead_end_are_not_measured(small_deck: Deck) -> None:
    pretended = Pretended()
    env = ShardingVectorEnv(small_deck, 2, RandomDeals((3, 3), (3, 3)), source=pretended)
    env.reset(seed=0, options={"deals": DEALS})
    for devices in ([0, 0], [0, 0], [2, 0]):  # the first game has no third device
        _, _, ended, _, infos = env.step(np.array(devices))
    assert ended.all()
    assert infos["dead_end"].tolist() == [True, False]
    assert pretended.seats == [1]
