"""What each learner learns of all families in the same seconds, from the same start: three seeds.

One greedy pass of the policy alone is told, not side by side with what it began as, which would
hide what is learned wrong. By the cost model: nothing is measured.
"""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

from autoshard.cost_model import OutsideTraining, load_model
from autoshard.cost_model.training import one_thread
from autoshard.envs.task_families import ALL, FILLS, Choice
from autoshard.experiments.training.config import LearnerName, PPOShardConfig
from autoshard.experiments.training.ppo import Trainer
from autoshard.sharders import Policy
from autoshard.sharders.player import Player
from autoshard.sharders.policy_network import PolicyNetwork
from autoshard.workload.parts import tables_by_part
from bench.figure import Figure, mean_and_interval
from bench.headroom import (
    Headroom,
    Tried,
    annealed,
    mean_of,
    shipped_oracle,
)
from bench.workbench import say

_LEARNERS: tuple[LearnerName, ...] = ("critic", "group_baseline")
_SECONDS, _SEEDS = 120.0, 3  # of training
_ANNEALING_SECONDS, _TASKS = 20.0, 3  # for a task, and tasks of each family, loose or tight
_START, _PASS = "before training", "one pass"

# Of each family: share of the headroom, plans over annealing's, tasks without a plan.
Told = Mapping[Choice, tuple[float | None, float | None, int]]


def learner_figures(
    seconds: float = _SECONDS,
    seeds: int = _SEEDS,
    annealing_seconds: float = _ANNEALING_SECONDS,
    tasks: int = _TASKS,
    families: str = ALL,
    learners: Sequence[LearnerName] = _LEARNERS,
) -> list[Figure]:
    """Of each learner, the mean of all families. `seconds`: of iterations, for each training."""
    known = annealed(families, annealing_seconds, tasks)
    figures = list(_figures(_START, [_told(Policy.untrained().network, known)]))
    for learner in learners:
        told = []
        for seed in range(seeds):
            say(f"what {learner} learns in {seconds:g} s, seed {seed}")
            told.append(_told(_trained(families, learner, seed, seconds), known))
        figures += _figures(learner, told)
    return figures


def _trained(families: str, learner: LearnerName, seed: int, seconds: float) -> PolicyNetwork:
    """As `ppo_shard.py --families` trains, without checks."""
    config = PPOShardConfig(families=families, learner=learner, reward="estimated", seed=seed)
    model, tables = load_model(config.cost_model), tables_by_part(config.all_tables())["train"]
    trainer = Trainer(config, model, tables, config.out, seed)
    try:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            trainer.iterate()
        return deepcopy(trainer.network).eval()
    finally:
        trainer.stop()


@one_thread()
def _told(network: PolicyNetwork, known: Sequence[Headroom]) -> Told:
    """One pass of this policy, alone."""
    player = Player(network, shipped_oracle())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideTraining)
        return {each.choice: _of_family(player, each) for each in known}


def _of_family(player: Player, known: Headroom) -> tuple[float | None, float | None, int]:
    played = [player.play(task) for task in known.tasks]
    ours = [games[0].plan_ms if games else None for games in played]
    seen = Headroom(known.choice, known.tasks, {**known.tried, _PASS: Tried(ours, [])})
    return seen.share(_PASS), seen.over(_PASS), ours.count(None)


def _figures(learner: str, told: Sequence[Told]) -> Iterator[Figure]:
    """Means over families; intervals by the seeds."""
    for memory in FILLS:
        some = [[row for choice, row in seed.items() if choice.memory == memory] for seed in told]
        if not some[0]:
            continue
        shares = [mean_of(row[0] for row in rows) for rows in some]
        overs = [mean_of(row[1] for row in rows) for rows in some]
        if memory == "loose":
            yield _mean(f"{learner}: share of the headroom, memory loose", shares)
        yield _mean(f"{learner}: plans over annealing's, memory {memory}", overs)
        lost = [sum(row[2] for row in rows) for rows in some]
        yield _mean(f"{learner}: tasks without a plan in one pass, memory {memory}", lost)


def _mean(name: str, values: Sequence[float]) -> Figure:
    if len(values) < 2:
        return Figure(name, "", mean_of(values))
    mean, interval = mean_and_interval(values)
    return Figure(name, "", mean, interval=interval)
