"""Where costs come from: the cost model, the cluster's benchmark pool, or both."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from plays import AMPLE, deal, game_of, greedily
from torch import Tensor

from autoshard.benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from autoshard.cost_model import CostModel, EstimatedCosts, TaskOutlook
from autoshard.envs import (
    Deck,
    EstimatedRewards,
    MeasuredRewards,
    MixedRewards,
    NegativeStep,
    RandomDeals,
    ShardingGame,
    ShardingVectorEnv,
)
from autoshard.workload import Device, EmbeddingTable, Shard, ShardingPlan, ShardingTask

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
    """Measures nothing: every device costs -1."""

    def __init__(self) -> None:
        super().__init__("nowhere.db")
        self.seats: list[int] = []

    def __call__(self, game: ShardingGame, seats: Sequence[int]) -> Tensor:
        self.seats += seats
        self.measured += len(seats)
        return torch.full((len(seats), game.max_devices), -1.0)


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
    assert torch.equal(EstimatedRewards()(game, [0, 1]), game.cost_ms)
    assert torch.equal(EstimatedRewards()(game, [1]), game.cost_ms[1:])
    costs = EstimatedRewards()(game, [0])
    costs[:] = 0
    assert game.cost_ms[0].sum() > 0  # what was handed out is a copy


def test_in_scenarios_the_slowest_device_is_the_expected_one(small_deck: Deck) -> None:
    """As a plan's outlook tells, in other scenarios."""
    game = finished(small_deck)
    expected = EstimatedRewards(scenarios=64)(game, [0, 1])
    ratios = expected / game.cost_ms.clamp_min(1e-9)
    oracle = EstimatedCosts(small_deck.model, small_deck.batch_size)
    for seat in (0, 1):
        deal = game.deals[seat]
        assert deal is not None
        tables = tuple(small_deck.pieces[n].table for n in deal.pieces)
        task = ShardingTask(tables, Device.uniform(len(deal.memory_bytes), 2**50), BATCH_SIZE)
        plan = ShardingPlan.table_wise(task, game.assignment(seat).tolist())
        told = TaskOutlook(oracle, task).of(plan).expected_ms
        assert float(expected[seat].max()) == pytest.approx(told, rel=0.03)
        there = ratios[seat][game.cost_ms[seat] > 0]
        assert there.tolist() == pytest.approx([float(there[0])] * len(there))  # as balanced


def test_games_that_end_together_are_measured_in_one_call_and_only_once(
    small_deck: Deck, asked: Asked, tmp_path: Path
) -> None:
    source = MeasuredRewards(tmp_path / "costs.db")
    rewards, env = played(small_deck, source)
    assert [len(answers) for answers in asked] == [3]  # two devices of one game, one of the other
    level = small_deck.model.provenance.quiet
    assert level is not None
    costs = [answer.told_at(level).total_ms for answer in asked[0]]
    bound = env.game.bound_ms.tolist()
    expected = [-max(costs[:2]) / bound[0], -costs[2] / bound[1]]
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
    assert found[0].tolist() == pytest.approx([0, costs[2], 0])
    assert found[1].tolist() == pytest.approx([*costs[:2], 0])
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
    assert found[0, :2].tolist() == pytest.approx(expected)


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
        measured = (costs < 0).all(1).nonzero()[:, 0] + 100
        assert pretended.seats == measured.tolist()
        assert source.measured == len(measured)
        estimated = (costs > 0).all(1).nonzero()[:, 0]
        assert len(measured) + len(estimated) == 300
        assert torch.equal(costs[estimated], game.cost_ms[estimated + 100])
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
    assert torch.equal(costs, game.cost_ms)


def test_games_at_a_dead_end_are_not_measured(small_deck: Deck) -> None:
    pretended = Pretended()
    env = ShardingVectorEnv(small_deck, 2, RandomDeals((3, 3), (3, 3)), source=pretended)
    env.reset(seed=0, options={"deals": DEALS})
    for devices in ([0, 0], [0, 0], [2, 0]):  # the first game has no third device
        _, _, ended, _, infos = env.step(np.array(devices))
    assert ended.all()
    assert infos["dead_end"].tolist() == [True, False]
    assert pretended.seats == [1]
