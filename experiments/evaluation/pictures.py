"""Pictures of a comparison."""

from collections.abc import Mapping
from pathlib import Path

from autoshard.experiments.console.outputs import save_picture
from autoshard.experiments.evaluation.report import Evaluation, Score, best_sharder
from autoshard.sharders import HEURISTICS


def draw_pictures(
    folder: Path, found: Evaluation, scores: Mapping[str, Score], what: str, subject: str
) -> list[Path]:
    """Draws the step times of all sharders and a plan of the best one; returns the files.

    Args:
        folder: Where they are written.
        found: Outcomes of the sharders.
        scores: Scores of the sharders.
        what: Objective and source of the times, a title.
        subject: What is timed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "step_ms.png"]
    _draw_scores(scores, what, files[0], subject)
    best = best_sharder(scores)
    cost = next((o.cost for o in found.outcomes.get(best or "", ()) if o.cost is not None), None)
    if cost is not None:
        files.append(folder / "best_plan.png")
        cost.picture(files[-1], f"{best}, {what}")
    return files


def _draw_scores(scores: Mapping[str, Score], what: str, path: Path, subject: str) -> None:
    """Writes a PNG or SVG: a bar for each sharder's mean step, a dot for each task."""
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
    axes.set_ylabel(f"{subject} time in ms")
    axes.set_title(f"{what} (dots: tasks, gray: heuristics)", fontsize="medium")
    save_picture(figure, path)
