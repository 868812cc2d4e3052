"""Counts of the chaos run, for docs/figures.md."""

import os
from collections import Counter
from collections.abc import Sequence

from bench.metric import Metric

from autoshard.experiments.console import cli
from chaos.faults import FAULTS
from chaos.run import Outcome, chaos

_SECONDS = 45 * 60.0


def chaos_metrics() -> list[Metric]:
    """Makes faults at random, and counts what came of them.

    AUTOSHARD_KILLS is their number, and AUTOSHARD_SEED chooses other ones.
    """
    kills = int(os.environ.get("AUTOSHARD_KILLS", "50"))
    seed = int(os.environ.get("AUTOSHARD_SEED", "0"))
    outcomes = []
    for outcome in chaos(FAULTS, kills, seed, _SECONDS):
        outcomes.append(outcome)
        cli.say(line(outcome))
    return counts(outcomes)


def counts(outcomes: Sequence[Outcome]) -> list[Metric]:
    """Returns for each fault how often it was made and recovered from, and what went wrong."""
    made = [outcome for outcome in outcomes if not outcome.skipped]
    recovered = Counter(outcome.fault for outcome in made if outcome.recovered)
    metrics = []
    for name, number in Counter(outcome.fault for outcome in made).items():
        metrics.append(Metric(f"recoveries, {name}", f"{number} of {number}", recovered[name]))
    resumed = sum(outcome.ended is not None for outcome in made)
    return [
        *sorted(metrics, key=lambda metric: metric.name),
        Metric("faults that could not be made here", "", len(outcomes) - len(made)),
        Metric("commands that a fault ended, and that were resumed", "", resumed),
        Metric("confirmed measurements lost or changed", "0", sum(o.lost for o in outcomes)),
    ]


def line(outcome: Outcome) -> str:
    """Returns an outcome in words."""
    if outcome.skipped:
        verdict = f"skipped: {outcome.skipped}"
    elif outcome.recovered:
        verdict = "went on"
        if outcome.ended is not None:
            verdict = f"resumed after exit code {outcome.ended} {outcome.said}".strip()
    else:
        verdict = "; ".join((*outcome.problems, f"{outcome.lost} measurements lost or changed"))
    return f"{outcome.workload}, {outcome.fault}: {verdict}"
