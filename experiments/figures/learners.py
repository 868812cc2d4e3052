"""What each learner learns of all families in the same seconds, from the same start: three seeds.

One greedy pass of the policy alone is told, not side by side with what it began as, which would
hide what is learned wrong. By the cost model: nothing is measured.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import ray
from scipy import stats

from autoshard.cost_model import EstimatedCosts, OutsideTraining, load_model
from autoshard.cost_model.training import one_thread
from autoshard.envs.task_families import ALL, Choice, read_choices
from autoshard.experiments.figures.figure import Figure
from autoshard.experiments.figures.headroom import (
    BAR,
    YARDSTICK,
    Headroom,
    Tried,
    family_tasks,
    tried_by,
)
from autoshard.experiments.figures.workbench import say
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.experiments.training.hyperparameters import LearnerName
from autoshard.experiments.training.ppo import Trainer
from autoshard.experiments.training.training import setting_of
from autoshard.sharders import Means, Policy, make_sharder
from autoshard.sharders.player import Player
from autoshard.sharders.policy_network import PolicyNetwork
from autoshard.workload import ShardingTask
from autoshard.workload.parts import tables_by_part

_LEARNERS: tuple[LearnerName, ...] = ("critic", "rivals", "imitation", "both")
_SECONDS, _SEEDS = 150.0, 3  # of training
_ANNEALING_SECONDS, _TASKS = 20.0, 4  # for a task, and tasks of each family, loose or tight
_START, _LEVEL = "before training", 0.95


@dataclass(frozen=True)
class _Family:
    """Its tasks, and what the bar and the yardstick make of them."""

    choice: Choice
    tasks: Sequence[ShardingTask]
    tried: Mapping[str, Tried]

    def of(self, network: PolicyNetwork) -> tuple[float | None, float | None, int]:
        """One pass of this policy: its share of the headroom, the mean of what its plans cost over
        the yardstick's, and tasks without a plan.
        """
        oracle = EstimatedCosts(load_model("cpu"), self.tasks[0].batch_size)
        played = [Player(network, oracle).play(task) for task in self.tasks]
        ours = [games[0].plan_ms if games else None for games in played]
        seen = Headroom(self.choice, {**self.tried, _START: Tried(ours, [])})
        over = np.array(ours, float) / np.array(self.tried[YARDSTICK].plan_ms, float)
        told = over[~np.isnan(over)]
        return seen.share(_START), float(told.mean()) if len(told) else None, ours.count(None)


def learner_figures(
    seconds: float = _SECONDS,
    seeds: int = _SEEDS,
    annealing_seconds: float = _ANNEALING_SECONDS,
    tasks: int = _TASKS,
    families: str = ALL,
    learners: Sequence[LearnerName] = _LEARNERS,
) -> list[Figure]:
    """Of each learner, the mean of all families. `seconds`: of iterations, for each training."""
    choices = read_choices(families, "families")
    say(f"plans of annealing for {len(choices)} families")
    remote = ray.remote(num_cpus=1)(_family)
    asked = [remote.remote(choice, annealing_seconds, tasks) for choice in choices]
    known: list[_Family] = ray.get(asked)
    figures = list(_figures(_START, [_told(Policy.untrained().network, known)]))
    for learner in learners:
        told = []
        for seed in range(seeds):
            say(f"what {learner} learns in {seconds:g} s, seed {seed}")
            told.append(_told(_trained(families, learner, seed, seconds), known))
        figures += _figures(learner, told)
    return figures


def _family(choice: Choice, seconds: float, count: int) -> _Family:
    oracle, tasks = family_tasks(choice, count)
    annealing = make_sharder(YARDSTICK, Means(oracle, seconds=seconds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideTraining)
        sharders = {BAR: make_sharder(BAR, Means(oracle)), YARDSTICK: annealing}
        return _Family(choice, tasks, tried_by(sharders, oracle, tasks))


def _trained(families: str, learner: LearnerName, seed: int, seconds: float) -> PolicyNetwork:
    """As `ppo_shard.py --families` trains, without checks."""
    config = PPOShardConfig(families=families, learner=learner, reward="estimated", seed=seed)
    model, tables = load_model(config.cost_model), tables_by_part(config.all_tables())["train"]
    trainer = Trainer(
        setting_of(config, model, tables, config.out, seed),
        learner,
        config.hyper,
        config.games,
        num_env_runners=0,
        seed=seed,
    )
    try:
        began = time.monotonic()
        while (spent := time.monotonic() - began) < seconds:
            trainer.iterate(1 - spent / seconds)
        return deepcopy(trainer.network).eval()
    finally:
        trainer.stop()


Told = Mapping[str, tuple[float | None, float | None, int]]


@one_thread()
def _told(network: PolicyNetwork, known: Sequence[_Family]) -> Told:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideTraining)
        return {f"{f.choice.name}, {f.choice.memory}": f.of(network) for f in known}


def _figures(learner: str, told: Sequence[Told]) -> Iterator[Figure]:
    """Means over families; intervals by the seeds."""
    for memory in ("loose", "tight"):
        some = [[row for name, row in seed.items() if name.endswith(memory)] for seed in told]
        if not some[0]:
            continue
        shares = [_mean_of(row[0] for row in rows) for rows in some]
        overs = [_mean_of(row[1] for row in rows) for rows in some]
        if memory == "loose":
            yield _mean(f"{learner}: share of the headroom, memory loose", shares)
        yield _mean(f"{learner}: plans over annealing's, memory {memory}", overs)
        lost = [sum(row[2] for row in rows) for rows in some]
        yield _mean(f"{learner}: tasks without a plan in one pass, memory {memory}", lost)


def _mean_of(values: Iterable[float | None]) -> float:
    return float(np.mean([value for value in values if value is not None]))


def _mean(name: str, values: Sequence[float]) -> Figure:
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Figure(name, "", mean)
    half = stats.t.ppf((1 + _LEVEL) / 2, count - 1) * np.std(values, ddof=1) / count**0.5
    return Figure(name, "", mean, interval=(mean - half, mean + half))
