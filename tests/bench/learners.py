"""Learners compared after equal training time from the same start, with three seeds.

The policy plays one greedy episode per task. The untrained variants, which always play in `policy`,
would hide regressions. All step times are predicted by the cost model.
"""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

from autoshard.cost_model import OutsideTraining, load_model
from autoshard.cost_model.threads import one_thread
from autoshard.envs.task_families import ALL, FILLS, Choice
from autoshard.experiments.training.config import LearnerName, PPOShardConfig, TrainingSetup
from autoshard.experiments.training.ppo import Trainer
from autoshard.sharders import Policy
from autoshard.sharders.policy.network import PolicyNetwork
from autoshard.sharders.policy.rollouts import PolicyRollouts
from autoshard.workload.tables.parts import tables_by_part
from bench.headroom import Headroom, Tried, annealed, mean_of, oracle_of, ratio_of
from bench.metric import Metric, mean_and_interval
from bench.workbench import say

_LEARNERS: tuple[LearnerName, ...] = ("critic", "group_baseline")
_SECONDS, _SEEDS = 120.0, 3  # training time, number of seeds
_ANNEALING_SECONDS, _TASKS = 20.0, 3  # per task; tasks per family and memory fill
_START, _PASS = "before training", "one pass"

# For each family: share of headroom, step time over annealing, tasks without a plan.
Results = Mapping[Choice, tuple[float | None, float | None, int]]


def learner_metrics(
    seconds: float = _SECONDS,
    seeds: int = _SEEDS,
    annealing_seconds: float = _ANNEALING_SECONDS,
    tasks: int = _TASKS,
    families: str = ALL,
    learners: Sequence[LearnerName] = _LEARNERS,
) -> list[Metric]:
    """Returns means over all families for each learner. `seconds`: of iterations per training."""
    known = annealed(families, annealing_seconds, tasks)
    metrics = list(_metrics(_START, [_results(Policy.untrained().network, known)]))
    for learner in learners:
        results = []
        for seed in range(seeds):
            say(f"training {learner} for {seconds:g} s, seed {seed}")
            results.append(_results(_trained(families, learner, seed, seconds), known))
        metrics += _metrics(learner, results)
    return metrics


def _trained(families: str, learner: LearnerName, seed: int, seconds: float) -> PolicyNetwork:
    """Trains as `ppo_shard.py --families` does, without checks."""
    config = PPOShardConfig(families=families, learner=learner, reward="estimated", seed=seed)
    parts = tables_by_part(config.all_tables())
    trainer = Trainer(TrainingSetup(config, parts, load_model(config.cost_model), config.out), seed)
    try:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            trainer.iterate()
        return deepcopy(trainer.network).eval()
    finally:
        trainer.stop()


@one_thread()
def _results(network: PolicyNetwork, known: Sequence[Headroom]) -> Results:
    """Returns the results of one episode per task."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideTraining)
        return {family.choice: _of_family(network, family) for family in known}


def _of_family(network: PolicyNetwork, known: Headroom) -> tuple[float | None, float | None, int]:
    player = PolicyRollouts(network, oracle_of(known.choice))
    played = [player.run(task) for task in known.tasks]
    ours = [episodes[0].plan_ms if episodes else None for episodes in played]
    seen = Headroom(known.choice, known.tasks, {**known.tried, _PASS: Tried(ours, [])})
    return seen.share(_PASS), seen.over(_PASS), ours.count(None)


def _metrics(learner: str, results: Sequence[Results]) -> Iterator[Metric]:
    """Yields means over families, with intervals over seeds."""
    for memory in FILLS:
        runs = [
            [row for choice, row in seed.items() if choice.memory == memory] for seed in results
        ]
        if not runs[0]:
            continue
        shares = [mean_of(row[0] for row in rows) for rows in runs]
        overs = [ratio_of(row[1] for row in rows) for rows in runs]
        if memory == "loose":
            yield _mean(f"{learner}: share of headroom, memory loose", shares)
        yield _mean(f"{learner}: step time over annealing, memory {memory}", overs)
        lost = [sum(row[2] for row in rows) for rows in runs]
        yield _mean(f"{learner}: tasks without a plan in one pass, memory {memory}", lost)


def _mean(name: str, values: Sequence[float]) -> Metric:
    if len(values) < 2:
        return Metric(name, "", mean_of(values))
    mean, interval = mean_and_interval(values)
    return Metric(name, "", mean, interval=interval)
