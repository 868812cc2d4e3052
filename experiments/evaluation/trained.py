"""Compares sharders by training: TorchRec trains a small model by each plan, alternating."""

import time
from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.backends import RequestedKind
from autoshard.benchmark.rehearsal.rehearsal import Effort, RankGroup
from autoshard.benchmark.rehearsal.times import MUCH, Loop, Rehearsal
from autoshard.experiments.console.machine import check_measured_hardware
from autoshard.experiments.console.progress import following
from autoshard.experiments.evaluation.evaluator import Limits
from autoshard.experiments.evaluation.planners import Outcome, Planners
from autoshard.experiments.evaluation.posterior import SAMPLES
from autoshard.experiments.evaluation.report import Evaluation
from autoshard.experiments.evaluation.task_sets import TORCHREC_DEFAULT, TaskSet
from autoshard.workload import ShardingPlan
from autoshard.workload.arrays import Floats

_LOOPS: Mapping[str, Loop] = {"pipelined": "pipelined"}  # by the name of the objective


def evaluate_trained(
    task_set: TaskSet,
    planners: Planners,
    limits: Limits,
    store_path: Path,
    save_tasks: Path | None = None,
    devices: RequestedKind = "auto",
    torchrec_default: bool = False,
) -> tuple[Evaluation, str]:
    """Compares sharders by training steps on ranks of the Ray cluster; returns their hardware, too.

    Equal plans of several sharders are trained once. Plans that the store knows are not trained
    again if their steps are known precisely enough.

    Args:
        task_set: Tasks, and plans of other planners for them.
        planners: Sharders.
        limits: When training ends.
        store_path: File that keeps rehearsals.
        save_tasks: Folder into which each task is written.
        devices: Kind of devices of the ranks.
        torchrec_default: Whether plans that TorchRec's planner makes by default take part.
    """
    began = time.monotonic()
    made = list(islice(planners.entries(task_set, save_tasks), task_set.begin))
    loop = _LOOPS.get(made[0].task.objective.name, "plain")
    names = [*made[0].outcomes, *([TORCHREC_DEFAULT] if torchrec_default else [])]
    steps = {name: np.full((SAMPLES, len(made)), np.nan) for name in names}
    rng, rounds, disturbed = np.random.default_rng(0), 0, list[float]()
    in_turns, hardware, training = list[bool](), "", time.monotonic()
    numbers = dict[int, list[int]]()  # of tasks, by their number of devices
    for number, entry in enumerate(made):
        numbers.setdefault(len(entry.task.devices), []).append(number)
    with MeasurementStore(store_path) as store, following(len(made), "tasks trained") as step:
        left = len(made)
        for ranks, chosen in numbers.items():
            with closing(RankGroup(ranks, devices, loop=loop)) as group:
                check_measured_hardware(planners.oracle.model, group.hardware)
                hardware = group.hardware
                in_turns += [group.in_turns] * len(chosen)
                for number in chosen:
                    task, outcomes = made[number].task, made[number].outcomes
                    plans: dict[str, ShardingPlan | None]
                    plans = {n: o.plan for n, o in outcomes.items() if o.plan is not None}
                    if torchrec_default and group.is_planned_by_torchrec(task):
                        plans[TORCHREC_DEFAULT] = None
                    trainer = {plan: name for name, plan in plans.items()}
                    rehearsed = group.train_interleaved(
                        task,
                        {name: plan for plan, name in trainer.items()},
                        Effort(
                            seconds=(limits.seconds - (time.monotonic() - began)) / left,
                            precision=limits.precision,
                        ),
                        store if group.in_turns else None,
                        planners.oracle.model.levels_ms,
                    )
                    disturbed += [each.disturbed for each in rehearsed.values()]
                    rounds += sum(len(each.rounds) for each in rehearsed.values())
                    drawn = {name: _drawn_ms(each, rng) for name, each in rehearsed.items()}
                    for name, plan in plans.items():
                        steps[name][:, number] = drawn[trainer[plan]]
                    left -= 1
                    step()
    ended = "all tasks were trained"
    if any(in_turns):
        which = "" if all(in_turns) else f" of {sum(in_turns)} tasks"
        ended += f"; ranks{which} took turns, and steps are composed of what each computed"
    elif disturbed and (share := float(np.mean(disturbed))) > MUCH:
        ended += f"; other processes took {share:.0%} of the ranks' cores, so steps took longer"
    evaluation = Evaluation(
        [entry.task for entry in made],
        {name: [entry.outcomes.get(name, Outcome()) for entry in made] for name in names},
        steps,
        time.monotonic() - began,
        time.monotonic() - training,
        rounds,
        ended,
    )
    return evaluation, hardware


def _drawn_ms(rehearsal: Rehearsal, rng: np.random.Generator) -> Floats:
    """Returns samples of a mean step time, as uncertain as its rounds leave it: [SAMPLES]."""
    every = np.array(rehearsal.round_ms)
    error = every.std(ddof=1) / np.sqrt(len(every))
    return np.asarray(every.mean() + error * rng.standard_t(len(every) - 1, SAMPLES))
