"""Learners beside PPO with a critic: baselines of rivals, lessons, imitation."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import (
    Deck,
    EstimatedRewards,
    Layout,
    NegativeStep,
    RandomDeals,
    ShardingVectorEnv,
)
from autoshard.experiments.training.hyperparameters import Hyperparameters, LearnerName
from autoshard.experiments.training.ppo import Trainer
from autoshard.experiments.training.rivals import BEST, RivalAdvantages
from autoshard.experiments.training.setting import Setting
from autoshard.experiments.training.teacher import Teacher, replayed
from autoshard.sharders import LocalSearch
from autoshard.sharders.player import Player
from autoshard.sharders.policy_network import PolicyNetwork, PolicyShape
from autoshard.workload import EmbeddingTable

Tables = tuple[EmbeddingTable, ...]


@pytest.fixture(scope="module")
def setting(model: CostModel, many_tables: Tables) -> Setting:
    """Few tables and little memory, so that halving is worth its while."""
    deals = RandomDeals((5, 8), (3, 3), (0.5, 0.9))
    return Setting(model, many_tables[:60], 1024, deals, NegativeStep(), EstimatedRewards)


class Episode:
    """As much of RLlib's as the connector looks at."""

    def __init__(self, task: int, worth: float, actions: int, length: int) -> None:
        self._told, self._worth, self._length = {"task": task, "actions": actions}, worth, length

    def get_infos(self, _place: int) -> dict[str, int]:
        return self._told

    def get_return(self) -> float:
        return self._worth

    def __len__(self) -> int:
        return self._length


def test_a_games_advantage_is_over_its_rivals_mean_and_waiting_is_left_out() -> None:
    games = [Episode(7, -1.0, 2, 3), Episode(7, -1.4, 3, 3), Episode(9, -5.0, 1, 1)]
    games += [Episode(8, -1.0, 1, 2), Episode(8, -1.004, 1, 1)]
    batch: dict[str, Any] = {"default_policy": {Columns.ACTIONS: torch.arange(10)}}
    RivalAdvantages()(batch=batch, episodes=games)  # type: ignore[arg-type]
    found = batch["default_policy"]
    assert found[Columns.ACTIONS].tolist() == [0, 1, 3, 4, 5, 6, 7, 9]
    # How much there is to be won in a task does not matter, nor what others are worth.
    expected = [1, 1, -1, -1, -1, 0, 1, -1]
    assert found[Postprocessing.ADVANTAGES].tolist() == pytest.approx(expected, rel=1e-5)
    assert found[BEST].tolist() == [True, True, False, False, False, False, True, False]


def test_rivals_that_are_as_good_teach_nothing() -> None:
    games = [Episode(7, -1.0, 1, 1), Episode(7, -1.00001, 1, 1)]
    batch: dict[str, Any] = {"default_policy": {}}
    RivalAdvantages()(batch=batch, episodes=games)  # type: ignore[arg-type]
    assert batch["default_policy"][Postprocessing.ADVANTAGES].abs().max() < 0.02


def test_rivals_play_the_same_task_and_end_together(setting: Setting) -> None:
    env = setting.make(6, rivals=3)
    assert isinstance(env, ShardingVectorEnv)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(2):  # rounds
        dealt = [deal.pieces.tolist() for deal in env.game.deals if deal is not None]
        assert dealt[0] == dealt[1] == dealt[2] != dealt[3]
        assert dealt[3] == dealt[4] == dealt[5]
        ended, steps = np.zeros(6, bool), 0
        while not ended.any():
            mask = torch.cat([env.game.allowed, env.game.halvable[:, None]], 1).numpy()
            chosen = [int(rng.choice(np.flatnonzero(row))) if row.any() else 0 for row in mask]
            _, _, ended, _, info = env.step(np.array(chosen))
            steps += 1
        assert ended.all()
        assert info["actions"].max() == steps
        assert len(set(info["task"][:3].tolist())) == len(set(info["task"][3:].tolist())) == 1
        assert info["task"][0] != info["task"][3]
        env.step(np.zeros(6, np.int64))  # deals anew


def test_what_was_right_leads_to_the_plan(model: CostModel, many_tables: Tables) -> None:
    """Few tables on more devices: a searched plan halves what holds a device up."""
    oracle = EstimatedCosts(model, 1024)
    deck = Deck(oracle, [table.whole() for table in many_tables[:60]], split=True)
    deals = RandomDeals((4, 6), (4, 4), (0.1, 0.2)).many(deck, np.random.default_rng(3), 6)
    network = PolicyNetwork(PolicyShape()).as_greedy()
    halved = 0
    for deal in deals:
        (own, *_) = Player(network, oracle).play(deck.task(deal))
        (plan, _) = LocalSearch(oracle, kicks=2).improve(deck.task(deal), [own.placed])
        lessons = replayed(deck, [(deal, plan)], Layout(4))
        assert lessons.right.any(1).all()
        only_halving = lessons.right[:, -1] & ~lessons.right[:, :-1].any(1)
        halvings = len(plan) - len(deal.pieces)
        slices = Counter(piece.table.name for piece, _ in plan)
        if max(slices.values()) > 4:  # in a game no table has more slices than there are devices
            assert int(only_halving.sum()) < halvings
            continue
        assert int(only_halving.sum()) == halvings
        assert len(lessons.right) == len(plan) + halvings
        assert lessons.right[0, :-1].all() or lessons.right[0, -1]  # all devices are alike
        halved += halvings
    assert halved


def test_a_teacher_prepares_the_same_for_a_seed(setting: Setting) -> None:
    shape = PolicyShape()
    weights = PolicyNetwork(shape).as_greedy().state_dict()
    first, again, other = (Teacher(setting, shape).lessons(weights, 2, seed) for seed in (1, 1, 2))
    assert torch.equal(first.seen, again.seen)
    assert torch.equal(first.right, again.right)
    assert first.seen.shape != other.seen.shape or not torch.equal(first.seen, other.seen)


@pytest.mark.parametrize("learner", ["rivals", "imitation", "both"])
def test_each_learner_learns_on_rllib(
    cluster: object, setting: Setting, learner: LearnerName
) -> None:
    hyper = Hyperparameters(rivals=4, lessons=2, minibatch=64)
    trainer = Trainer(setting, learner, hyper, games=8, num_env_runners=0, seed=0)
    before = {name: w.clone() for name, w in trainer.network.state_dict().items()}
    figures = [trainer.iterate(left) for left in (1.0, 0.5)]
    after = trainer.network.state_dict()
    trainer.stop()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(w).all() for w in after.values())
    assert figures[-1]["games"] >= 8
    assert figures[-1]["steps"] > figures[0]["steps"]


def test_imitation_makes_what_was_right_likelier(cluster: object, setting: Setting) -> None:
    hyper = Hyperparameters(rivals=4, lessons=8, minibatch=64, epochs=8, learning_rate=3e-3)
    trainer = Trainer(setting, "imitation", hyper, games=8, num_env_runners=0, seed=0)
    exam = Teacher(setting, hyper.shape).lessons(trainer.network.state_dict(), 24, seed=10**6)
    layout = Layout(setting.generator.most_devices)

    def surprise() -> float:
        with torch.no_grad():
            logits, _ = trainer.network(layout.split(exam.seen))
        right = logits.log_softmax(1).masked_fill(~exam.right, -torch.inf).logsumexp(1)
        return float(-right.clamp_min(-20.0).mean())

    before = surprise()
    for _ in range(5):
        trainer.iterate()
    after = surprise()
    trainer.stop()
    assert after < 0.9 * before
