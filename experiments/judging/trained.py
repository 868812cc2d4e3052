"""The judge that trains: what a step takes by the plans of each sharder, all in turns."""

import time
from itertools import islice
from pathlib import Path

import numpy as np

from autoshard.benchmark.rehearsal.rehearsal import stage
from autoshard.benchmark.rehearsal.times import MUCH
from autoshard.benchmark.rehearsal.turns import in_turns
from autoshard.experiments.console.progress import following
from autoshard.experiments.judging.contest import Contest
from autoshard.experiments.judging.contestants import Contestants
from autoshard.experiments.judging.judge import Judgement
from autoshard.experiments.judging.statistics import SCENARIOS, Floats
from autoshard.workload import UserError


def judge_trained(
    contest: Contest, contestants: Contestants, seconds: float, save_tasks: Path | None = None
) -> Judgement:
    """Milliseconds of a training step by each plan, on ranks of the Ray cluster.

    `seconds` are shared by all tasks. Like plans of several sharders are trained once.
    """
    began = time.monotonic()
    entries = contest.entries(contestants.warmed_up(contest.first), save_tasks)
    made = list(islice(entries, contest.begin))
    ranks = {len(entry.task.devices) for entry in made}
    if len(ranks) > 1:
        raise UserError(
            f"tasks are for {min(ranks)} to {max(ranks)} devices: ranks that train are as many for "
            "all, so compare tasks of one number of devices at a time"
        )
    steps: dict[str, list[Floats]] = {name: [] for name in made[0].outcomes}
    rng, rounds, taken = np.random.default_rng(0), 0, list[float]()
    training = time.monotonic()
    with stage(ranks.pop()) as found, following(len(made), "tasks trained") as step:
        for number, entry in enumerate(made):
            left = seconds - (time.monotonic() - began)
            plans = {n: o.plan for n, o in entry.outcomes.items() if o.plan is not None}
            different = {plan: name for name, plan in plans.items()}
            names = {name: different[plan] for name, plan in plans.items()}
            trained = {name: plan for plan, name in different.items()}
            rehearsed = in_turns(found, entry.task, trained, left / (len(made) - number))
            times = {n: np.array([each.median_ms for each in r]) for n, r in rehearsed.items()}
            taken += [each.disturbed for some in rehearsed.values() for each in some]
            count = len(next(iter(times.values()), ()))
            rounds += count * len(times)
            # The same rounds for all plans: what slows a round tells nothing of a plan.
            drawn = rng.integers(max(1, count), size=(SCENARIOS, count))
            for name, tasks in steps.items():
                known = name in names
                tasks.append(
                    np.median(times[names[name]][drawn], axis=1)
                    if known
                    else np.full(SCENARIOS, np.nan)
                )
            step()
    ended = "all tasks were trained"
    if found.ranks_per_core > 1:
        ended += f"; {found.ranks_per_core:g} ranks shared a core, so steps took longer"
    elif taken and (share := float(np.mean(taken))) > MUCH:
        ended += f"; others took {share:.0%} of the ranks' cores, so steps took longer"
    return Judgement(
        [entry.task for entry in made],
        {name: [entry.outcomes[name] for entry in made] for name in steps},
        {name: np.stack(tasks, axis=1) for name, tasks in steps.items()},
        time.monotonic() - began,
        time.monotonic() - training,
        rounds,
        ended,
    )
