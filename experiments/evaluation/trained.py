"""Compares sharders by training: TorchRec trains a small model by each plan, alternating."""

import time
from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.rehearsal.rehearsal import Effort, RankGroup
from autoshard.benchmark.rehearsal.times import MUCH, Loop, Rehearsal
from autoshard.experiments.console.progress import following
from autoshard.experiments.evaluation.evaluator import Limits
from autoshard.experiments.evaluation.planners import Planners
from autoshard.experiments.evaluation.posterior import SAMPLES
from autoshard.experiments.evaluation.report import Evaluation
from autoshard.experiments.evaluation.task_sets import TaskSet
from autoshard.workload import UserError
from autoshard.workload.arrays import Floats

_LOOPS: Mapping[str, Loop] = {"pipelined": "pipelined"}  # by the name of the objective


def evaluate_trained(
    task_set: TaskSet,
    planners: Planners,
    limits: Limits,
    store_path: Path,
    save_tasks: Path | None = None,
) -> tuple[Evaluation, str]:
    """Compares sharders by training steps on ranks of the Ray cluster; returns their hardware, too.

    Equal plans of several sharders are trained once. Plans that the store knows are not trained
    again if their steps are known precisely enough.
    """
    began = time.monotonic()
    made = list(islice(planners.entries(task_set, save_tasks), task_set.begin))
    kinds = {(len(entry.task.devices), entry.task.objective.name) for entry in made}
    if len(kinds) > 1:
        counts = sorted({ranks for ranks, _ in kinds})
        raise UserError(
            "--judge training needs tasks with one objective and one number of devices, these have "
            f"{counts[0]} to {counts[-1]} devices: compare them one number at a time"
        )
    ((ranks, objective),) = kinds
    steps: dict[str, list[Floats]] = {name: [] for name in made[0].outcomes}
    rng, rounds, disturbed = np.random.default_rng(0), 0, list[float]()
    training, loop = time.monotonic(), _LOOPS.get(objective, "plain")
    with (
        MeasurementStore(store_path) as store,
        closing(RankGroup(ranks, loop=loop)) as found,
        following(len(made), "tasks trained") as step,
    ):
        for number, entry in enumerate(made):
            left = (limits.seconds - (time.monotonic() - began)) / (len(made) - number)
            plans = {n: o.plan for n, o in entry.outcomes.items() if o.plan is not None}
            trainer = {plan: name for name, plan in plans.items()}
            trained = {name: plan for plan, name in trainer.items()}
            effort = Effort(seconds=left, precision=limits.precision)
            kept = store if found.in_turns else None
            rehearsed = found.train_interleaved(
                entry.task, trained, effort, kept, planners.oracle.model.levels_ms
            )
            disturbed += [each.disturbed for each in rehearsed.values()]
            rounds += sum(len(each.rounds) for each in rehearsed.values())
            drawn = {name: _drawn_ms(each, rng) for name, each in rehearsed.items()}
            for name, tasks in steps.items():
                plan = plans.get(name)
                tasks.append(np.full(SAMPLES, np.nan) if plan is None else drawn[trainer[plan]])
            step()
    ended = "all tasks were trained"
    if found.in_turns:
        ended += "; ranks took turns, and steps are composed of what each computed"
    elif disturbed and (share := float(np.mean(disturbed))) > MUCH:
        ended += f"; other processes took {share:.0%} of the ranks' cores, so steps took longer"
    evaluation = Evaluation(
        [entry.task for entry in made],
        {name: [entry.outcomes[name] for entry in made] for name in steps},
        {name: np.stack(tasks, axis=1) for name, tasks in steps.items()},
        time.monotonic() - began,
        time.monotonic() - training,
        rounds,
        ended,
    )
    return evaluation, found.hardware


def _drawn_ms(rehearsal: Rehearsal, rng: np.random.Generator) -> Floats:
    """Returns samples of a mean step time, as uncertain as its rounds leave it: [SAMPLES]."""
    every = np.array(rehearsal.round_ms)
    error = every.std(ddof=1) / np.sqrt(len(every))
    return np.asarray(every.mean() + error * rng.standard_t(len(every) - 1, SAMPLES))
