"""Scores for people: a table, a picture, and the one line that counts."""

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from experiments.scoring import Score
from sharders import HEURISTICS
from workload import UserError

_COLUMNS = ("sharder", "max ms", "balance", "oom", "won", "saved", "95 %", "gap", "s")
_NOTHING = "-"


def score_table(scores: Mapping[str, Score], best: str | None, what: str) -> Table:
    """A row a sharder, for rich's console. `what`: the costs that count."""
    report = Table(
        title=f"the slowest device's computation, mean of tasks, {what}",
        title_justify="left",
        caption=f"saved: of the max ms of {best or 'a heuristic (none is compared)'}; won: share "
        "of tasks (ties count for all); gap: over what the model estimates for the least that "
        "whole tables allow; oom: tasks without a plan that fits, left out of the means; s: "
        "seconds to plan, on one core",
        caption_justify="left",
        box=None,
        padding=(0, 0, 0, 1),
    )
    for column in _COLUMNS:
        report.add_column(column, justify="left" if column == "sharder" else "right", no_wrap=True)
    for name, score in scores.items():
        low, high = score.improvement_low, score.improvement_high
        interval = _NOTHING if low is None or name == best else f"{100 * low:.1f} to {high:.1%}"
        report.add_row(
            name,
            _told(score.max_ms_mean, ".2f"),
            _told(score.balance_mean, ".3f"),
            str(score.oom),
            f"{score.win_rate:.0%}",
            _told(score.improvement, "+.1%"),
            interval,
            _told(score.gap, "+.1%"),
            _told(score.seconds_mean, ".3f"),
            style="bold" if name == best else "",
        )
    return report


def score_picture(scores: Mapping[str, Score], what: str, path: Path) -> None:
    """A PNG or SVG: a bar a sharder, its mean maximum, and a dot for each task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 0.9 * max(4, len(scores)), 4.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(scores))
    axes.bar(
        places,
        [score.max_ms_mean or 0.0 for score in scores.values()],
        color=["lightgray" if name in HEURISTICS else "tab:blue" for name in scores],
    )
    for place, score in zip(places, scores.values(), strict=True):
        dots = [ms for ms in score.max_ms if ms is not None]
        axes.scatter([place] * len(dots), dots, s=10, color="black", zorder=2)
    axes.set_xticks(list(places), list(scores), rotation=30, ha="right")
    axes.set_ylabel("ms of the slowest device")
    axes.set_title(f"{what} (dots: tasks, gray: heuristics)", fontsize="medium")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the picture cannot be written: {error}") from error


def best_sharder(scores: Mapping[str, Score]) -> str | None:
    """The one that saves most, else the one with the least mean maximum; None without any plan."""
    planned = [name for name, score in scores.items() if score.max_ms_mean is not None]
    return max(planned, key=lambda name: scores[name].improvement or 0.0, default=None)


def verdict(scores: Mapping[str, Score], best: str | None, what: str) -> str:
    """By how much the best sharder's plans beat those of the best heuristic."""
    first = best_sharder(scores)
    if first is None:
        return "no sharder found a plan that fits"
    score = scores[first]
    if best is None or score.improvement is None:
        return f"{first} is best with {score.max_ms_mean:.2f} ms, {what}; no heuristic to compare"
    if round(score.improvement, 3) <= 0:
        return f"nothing beats the best heuristic, {best}: {score.max_ms_mean:.2f} ms, {what}"
    return (
        f"the slowest device computes {score.improvement:.1%} less by {first} than by {best}, the "
        f"best heuristic ({what}; 95 % interval {score.improvement_low:.1%} to "
        f"{score.improvement_high:.1%})"
    )


def _told(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
