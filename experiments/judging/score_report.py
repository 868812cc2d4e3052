"""Scores for people: a table, a picture, and the one line that counts."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from autoshard.experiments.judging.scores import Score
from autoshard.sharders import HEURISTICS
from autoshard.workload import UserError

_NOTHING = "-"
_RARE = {
    "bal.": _NOTHING,
    "oom": "0",
    "promise": _NOTHING,
    "meas. s": _NOTHING,
}  # columns that may say nothing
_SURE = 0.975  # of a probability: what lies beyond a 95 % interval


class Subject(NamedTuple):
    """What is compared: as a column, a title, and the beginning of a sentence say it."""

    column: str
    title: str
    sentence: str


PRICED = Subject("step ms", "a step", "a step takes")
TRAINED = Subject("step ms", "a step of training", "a step of training takes")


def score_table(
    scores: Mapping[str, Score], best: str | None, what: str, subject: Subject = PRICED
) -> Table:
    """A row a sharder, for rich's console. `what`: the costs that count."""
    report = Table(
        title=f"{subject.title}, mean of tasks, {what}",
        title_justify="left",
        caption=f"ratio: to {best or 'the best heuristic (none is compared)'}, with the half width "
        "of its 95 % interval; better, next: probabilities to be better than it, and than the next "
        "row; bal.: mean over slowest device of all waits; promise: the cost model's ms over it; "
        "oom: tasks without a plan that fits, left out of the means; plan s, meas. s: seconds to "
        "make a plan, on one core, and that the sharder spent measuring for it",
        caption_justify="left",
        box=None,
        padding=(0, 0, 0, 1),
    )
    rows = [_row(name, score, best, subject) for name, score in scores.items()]
    told = [
        column
        for column in rows[0]
        if column not in _RARE or any(row[column] != _RARE[column] for row in rows)
    ]
    for column in told:
        report.add_column(column, justify="left" if column == "sharder" else "right", no_wrap=True)
    for row in rows:
        style = "bold" if row["sharder"] == best else ""
        report.add_row(*(row[column] for column in told), style=style)
    return report


def _row(name: str, score: Score, best: str | None, subject: Subject) -> dict[str, str]:
    return {
        "sharder": name,
        subject.column: _told(score.step_ms_mean, ".2f"),
        "bal.": _told(score.balance_mean, ".3f"),
        "oom": str(score.oom),
        "ratio": _told(score.ratio, ".3f") + ("" if name == best else _plus_minus(score)),
        "better": _told(score.better_than_heuristic, ".0%"),
        "next": _told(score.better_than_next, ".0%"),
        "promise": _told(score.promise, ".2f"),
        "plan s": _told(score.seconds_mean, ".3f"),
        "meas. s": _told(score.measuring_seconds_mean or None, ".1f"),
    }


def score_picture(
    scores: Mapping[str, Score], what: str, path: Path, subject: Subject = PRICED
) -> None:
    """A PNG or SVG: a bar a sharder, its mean step, and a dot for each task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 0.9 * max(4, len(scores)), 4.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(scores))
    axes.bar(
        places,
        [score.step_ms_mean or 0.0 for score in scores.values()],
        color=["lightgray" if name in HEURISTICS else "tab:blue" for name in scores],
    )
    for place, score in zip(places, scores.values(), strict=True):
        dots = [ms for ms in score.step_ms if ms is not None]
        axes.scatter([place] * len(dots), dots, s=10, color="black", zorder=2)
    axes.set_xticks(list(places), list(scores), rotation=30, ha="right")
    axes.set_ylabel(f"ms of {subject.title}")
    axes.set_title(f"{what} (dots: tasks, gray: heuristics)", fontsize="medium")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the picture cannot be written: {error}") from error


def best_sharder(scores: Mapping[str, Score]) -> str | None:
    """The one with the lowest ratio, else with the least mean step; None without any plan."""
    planned = [name for name, score in scores.items() if score.step_ms_mean is not None]
    return max(planned, key=lambda name: scores[name].improvement or 0.0, default=None)


def verdict(
    scores: Mapping[str, Score], best: str | None, what: str, subject: Subject = PRICED
) -> str:
    """By how much the best sharder's plans beat those of the best heuristic, if that is known."""
    first = best_sharder(scores)
    if first is None:
        return "no sharder found a plan that fits"
    score = scores[first]
    if best is None or score.improvement is None:
        return f"{first} is best with {score.step_ms_mean:.2f} ms, {what}; no heuristic to compare"
    if first == best:
        return f"nothing beats the best heuristic, {best}: {score.step_ms_mean:.2f} ms, {what}"
    if score.ratio_low is None or score.ratio_high is None:
        return (
            f"{first} cannot be told apart from {best}, the best heuristic, by one task ({what}; "
            f"ratio {score.ratio:.3f})"
        )
    if score.ratio_high >= 1:
        return (
            f"{first} cannot be told apart from {best}, the best heuristic ({what}; ratio "
            f"{score.ratio:.3f}, 95 % interval {score.ratio_low:.3f} to {score.ratio_high:.3f})"
        )
    return (
        f"{subject.sentence} {score.improvement:.1%} less by {first} than by {best}, the "
        f"best heuristic ({what}; 95 % interval {1 - score.ratio_high:.1%} to "
        f"{1 - score.ratio_low:.1%}){_tied(scores, first)}"
    )


def _tied(scores: Mapping[str, Score], first: str) -> str:
    """Said of the next in the ranking, where it may be as good."""
    names = list(scores)
    after = names[names.index(first) + 1 :][:1]
    sure = scores[first].better_than_next
    if not after or sure is None or sure > _SURE:
        return ""
    return f"; {first} cannot be told apart from {after[0]}"


def _plus_minus(score: Score) -> str:
    return "" if score.half_width is None else f"±{score.half_width:.3f}"


def _told(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
