"""Learners of PPO: the leave-one-out baseline in place of a critic."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing

from autoshard.cost_model import CostModel
from autoshard.experiments.training.config import Hyperparameters, PPOShardConfig, TrainingSetup
from autoshard.experiments.training.group_baseline import GroupAdvantages
from autoshard.experiments.training.ppo import Trainer, make_environment
from autoshard.workload import EmbeddingTable

Tables = tuple[EmbeddingTable, ...]


@pytest.fixture(scope="module")
def config() -> PPOShardConfig:
    """Few tables and little memory, so that halving is worth its while."""
    return PPOShardConfig(
        num_tables="5-8",
        num_devices="3",
        memory_fill="0.5-0.9",
        reward="estimated",
        learner="group_baseline",
        num_envs=8,
        hyper=Hyperparameters(group_size=4, minibatch=64),
    )


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


def test_an_advantage_is_over_the_other_games_mean_and_waiting_is_left_out() -> None:
    games = [Episode(7, -1.0, 2, 3), Episode(7, -1.4, 3, 3), Episode(9, -5.0, 1, 1)]
    games += [Episode(8, -1.0, 1, 2), Episode(8, -1.004, 1, 1)]
    batch: dict[str, Any] = {"default_policy": {Columns.ACTIONS: torch.arange(10)}}
    GroupAdvantages()(batch=batch, episodes=games)  # type: ignore[arg-type]
    found = batch["default_policy"]
    assert found[Columns.ACTIONS].tolist() == [0, 1, 3, 4, 5, 6, 7, 9]
    # How much there is to be won in a task does not matter, nor what others are worth.
    expected = [1, 1, -1, -1, -1, 0, 1, -1]
    assert found[Postprocessing.ADVANTAGES].tolist() == pytest.approx(expected, rel=1e-5)


def test_games_that_are_as_good_teach_nothing() -> None:
    games = [Episode(7, -1.0, 1, 1), Episode(7, -1.00001, 1, 1)]
    batch: dict[str, Any] = {"default_policy": {}}
    GroupAdvantages()(batch=batch, episodes=games)  # type: ignore[arg-type]
    assert batch["default_policy"][Postprocessing.ADVANTAGES].abs().max() < 0.02


def setup_of(
    config: PPOShardConfig, model: CostModel, tables: Tables, store: Path
) -> TrainingSetup:
    return TrainingSetup(config, {"train": tables[:60]}, model, store)


def test_games_of_a_group_play_the_same_task_and_end_together(
    config: PPOShardConfig, model: CostModel, many_tables: Tables, tmp_path: Path
) -> None:
    config = replace(config, hyper=Hyperparameters(group_size=3))
    env = make_environment(setup_of(config, model, many_tables, tmp_path), 0, num_envs=6)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(2):  # rounds
        dealt = [
            instance.units.tolist() for instance in env.episodes.instances if instance is not None
        ]
        assert dealt[0] == dealt[1] == dealt[2] != dealt[3]
        assert dealt[3] == dealt[4] == dealt[5]
        ended, steps = np.zeros(6, bool), 0
        while not ended.any():
            mask = env.episodes.action_masks.numpy()
            chosen = [int(rng.choice(np.flatnonzero(row))) if row.any() else 0 for row in mask]
            _, _, ended, _, info = env.step(np.array(chosen))
            steps += 1
        assert ended.all()
        assert info["actions"].max() == steps
        assert len(set(info["task"][:3].tolist())) == len(set(info["task"][3:].tolist())) == 1
        assert info["task"][0] != info["task"][3]
        env.step(np.zeros(6, np.int64))  # deals anew


def test_it_learns_on_rllib(
    cluster: object, config: PPOShardConfig, model: CostModel, many_tables: Tables, tmp_path: Path
) -> None:
    trainer = Trainer(setup_of(config, model, many_tables, tmp_path), seed=0)
    before = {name: w.clone() for name, w in trainer.network.state_dict().items()}
    figures, tasks = [], []
    for _ in range(2):
        figures.append(trainer.iterate())
        tasks.append(last_tasks(trainer))
    after = trainer.network.state_dict()
    trainer.stop()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(w).all() for w in after.values())
    assert figures[-1]["episodes"] >= 8
    assert figures[-1]["steps"] > figures[0]["steps"]
    assert tasks[0] != tasks[1]


def last_tasks(trainer: Trainer) -> list[list[int]]:
    """The tables of the tasks that were played last."""
    group = trainer.algorithm.env_runner_group
    assert group is not None
    (tasks,) = group.foreach_env_runner(
        lambda runner: [task.units.tolist() for task in runner.env.unwrapped.episodes.instances]
    )
    return tasks
