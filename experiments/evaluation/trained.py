"""Compares sharders by training: TorchRec trains a small model by each plan, alternating."""

import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np

from autoshard.benchmark.rehearsal.rehearsal import RankGroup
from autoshard.benchmark.rehearsal.times import MUCH
from autoshard.experiments.console.progress import following
from autoshard.experiments.evaluation.planners import Planners
from autoshard.experiments.evaluation.posterior import SAMPLES
from autoshard.experiments.evaluation.report import Evaluation
from autoshard.experiments.evaluation.task_sets import TaskSet
from autoshard.workload import UserError
from autoshard.workload.arrays import Floats


def evaluate_trained(
    task_set: TaskSet, planners: Planners, seconds: float, save_tasks: Path | None = None
) -> Evaluation:
    """Compares sharders by training steps on ranks of the Ray cluster, within a time limit.

    Equal plans of several sharders are trained once.
    """
    began = time.monotonic()
    made = list(islice(planners.entries(task_set, save_tasks), task_set.begin))
    ranks = {len(entry.task.devices) for entry in made}
    if len(ranks) > 1:
        raise UserError(
            f"--judge training needs tasks with one number of devices, these have {min(ranks)} to "
            f"{max(ranks)}: compare them one number at a time"
        )
    steps: dict[str, list[Floats]] = {name: [] for name in made[0].outcomes}
    rng, rounds, disturbed = np.random.default_rng(0), 0, list[float]()
    training = time.monotonic()
    with closing(RankGroup(ranks.pop())) as found, following(len(made), "tasks trained") as step:
        for number, entry in enumerate(made):
            left = seconds - (time.monotonic() - began)
            plans = {n: o.plan for n, o in entry.outcomes.items() if o.plan is not None}
            trainer = {plan: name for name, plan in plans.items()}
            trained = {name: plan for plan, name in trainer.items()}
            rehearsed = found.train_interleaved(entry.task, trained, left / (len(made) - number))
            times = {name: np.array(each.round_ms) for name, each in rehearsed.items()}
            disturbed += [each.disturbed for each in rehearsed.values()]
            count = len(next(iter(times.values()), ()))
            rounds += count * len(times)
            # All plans use the same rounds, so that a slow round affects all of them alike.
            drawn = rng.integers(max(1, count), size=(SAMPLES, count))
            for name, tasks in steps.items():
                plan = plans.get(name)
                ms = None if plan is None else np.median(times[trainer[plan]][drawn], axis=1)
                tasks.append(np.full(SAMPLES, np.nan) if ms is None else ms)
            step()
    ended = "all tasks were trained"
    if found.in_turns:
        ended += "; ranks took turns, and steps are composed of what each computed"
    elif disturbed and (share := float(np.mean(disturbed))) > MUCH:
        ended += f"; other processes took {share:.0%} of the ranks' cores, so steps took longer"
    return Evaluation(
        [entry.task for entry in made],
        {name: [entry.outcomes[name] for entry in made] for name in steps},
        {name: np.stack(tasks, axis=1) for name, tasks in steps.items()},
        time.monotonic() - began,
        time.monotonic() - training,
        rounds,
        ended,
    )
