"""Compares sharders by training: TorchRec trains a small model by each plan, alternating."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.backends import RequestedKind
from autoshard.benchmark.rehearsals.times import MUCH, Loop, Rehearsal
from autoshard.benchmark.statistics import pooled_variance
from autoshard.experiments.console.machine import check_measured_hardware
from autoshard.experiments.console.progress import following
from autoshard.experiments.evaluation.evaluator import Limits
from autoshard.experiments.evaluation.planners import Outcome, PlannedTask, Planners
from autoshard.experiments.evaluation.posterior import SAMPLES
from autoshard.experiments.evaluation.report import Evaluation
from autoshard.experiments.evaluation.task_sets import TORCHREC_DEFAULT, TaskSet
from autoshard.integration.rehearsal.rank_group import MIN_ROUNDS, Effort, RankGroup
from autoshard.workload import ShardingPlan
from autoshard.workload.arrays import Floats


def evaluate_trained(
    task_set: TaskSet,
    planners: Planners,
    limits: Limits,
    store_path: Path,
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
        devices: Kind of devices of the ranks.
        torchrec_default: Whether plans that TorchRec's planner makes by default take part.
    """
    began = time.monotonic()
    made = planners.planned(task_set)
    loop: Loop = "pipelined" if made[0].task.objective.name == "pipelined" else "plain"
    names = [*made[0].outcomes, *([TORCHREC_DEFAULT] if torchrec_default else [])]
    steps = {name: np.full((SAMPLES, len(made)), np.nan) for name in names}
    rng, rounds, disturbed = np.random.default_rng(0), 0, list[float]()
    in_turns, hardware, training = list[bool](), "", time.monotonic()
    host_bound = list[bool]()
    numbers = dict[int, list[int]]()  # of tasks, by their number of devices
    for number, entry in enumerate(made):
        numbers.setdefault(len(entry.task.devices), []).append(number)
    rest = _Rest(made, torchrec_default, began + limits.seconds)
    with (
        MeasurementStore(store_path) as store,
        following(len(made), "tasks trained", rest.left_s) as step,
    ):
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

                    def follow(done: int, missing: int, number: int = number) -> None:
                        rest.at(number, done, missing)
                        what = f"{done} of at least {done + missing} rounds"
                        step(0, f"task {task_set.name(number)}: {what}")

                    rehearsed = group.train_interleaved(
                        task,
                        {name: plan for plan, name in trainer.items()},
                        Effort(
                            seconds=(limits.seconds - (time.monotonic() - began)) / left,
                            precision=limits.precision,
                        ),
                        store if group.in_turns else None,
                        planners.oracle.model.levels_ms,
                        follow,
                    )
                    disturbed += [each.disturbed for each in rehearsed.values()]
                    host_bound += [each.launch_ms > each.step_ms for each in rehearsed.values()]
                    rounds += sum(len(each.rounds) for each in rehearsed.values())
                    drawn = _drawn_ms(rehearsed, rng)
                    for name, plan in plans.items():
                        steps[name][:, number] = drawn[trainer[plan]]
                    left -= 1
                    rest.end()
                    step()
    ended = "all tasks were trained"
    if any(in_turns):
        which = "" if all(in_turns) else f" of {sum(in_turns)} tasks"
        ended += f"; ranks{which} took turns, and steps are composed of what each computed"
    elif disturbed and (share := float(np.mean(disturbed))) > MUCH:
        ended += f"; other processes took {share:.0%} of the ranks' cores, so steps took longer"
    if any(host_bound):
        ended += (
            f"; the host launches steps by {sum(host_bound)} of {len(host_bound)} plans slower "
            "than the GPU computes them, and training takes as long as it does"
        )
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


class _Rest:
    """How long training takes: for rounds that are made in any case, or until the time is over.

    Args:
        entries: Tasks with plans, none of which is trained yet.
        further: Number of further plans of each task.
        deadline: When the time for more rounds is over, by the monotonic clock.
    """

    def __init__(self, entries: Sequence[PlannedTask], further: int, deadline: float) -> None:
        self._ranks = [len(entry.task.devices) for entry in entries]  # a round is as long as many
        plans = [{o.plan for o in entry.outcomes.values()} - {None} for entry in entries]
        self._missing = [MIN_ROUNDS * (len(some) + further) for some in plans]  # rounds of a task
        self._made = [0] * len(entries)
        self._began, self._deadline, self._open = time.monotonic(), deadline, len(entries)

    def at(self, number: int, made: int, missing: int) -> None:
        """Notes how many rounds of a task are made, and how many are missing in any case."""
        if not made and not any(self._made):  # ranks have started, which takes as long as rounds
            self._began = time.monotonic()
        self._made[number], self._missing[number] = made, missing

    def end(self) -> None:
        """Notes that a task is trained."""
        self._open -= 1

    def left_s(self) -> float | None:
        """Returns the seconds until all tasks are trained; None before the first round."""
        now, made = time.monotonic(), self._of_ranks(self._made)
        if not self._open or not made:
            return None if self._open else 0.0
        return max(self._of_ranks(self._missing) * (now - self._began) / made, self._deadline - now)

    def _of_ranks(self, rounds: Sequence[int]) -> int:
        return sum(ranks * count for ranks, count in zip(self._ranks, rounds, strict=True))


def _drawn_ms(rehearsed: Mapping[str, Rehearsal], rng: np.random.Generator) -> dict[str, Floats]:
    """Returns samples of a task's mean step by each plan, as uncertain as rounds leave it.

    Rounds of all its plans are taken to be equally noisy, relative to the step: three rounds alone
    say so little of their noise that samples would be of any size, even below zero.
    """
    if not rehearsed:
        return {}
    rounds = {name: np.array(each.round_ms) for name, each in rehearsed.items()}
    deviation = math.sqrt(pooled_variance([ms / ms.mean() for ms in rounds.values()], 0.0, 0.0))
    freedom, found = sum(len(ms) - 1 for ms in rounds.values()), {}
    for name, ms in rounds.items():
        drawn = rng.standard_t(freedom, SAMPLES)
        error = deviation / math.sqrt(len(ms))
        found[name] = np.asarray(ms.mean() * (1 + error * (drawn - drawn.mean())))
    return found
