"""Pictures of a comparison, and pages about the best plans by estimated costs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from autoshard.benchmark.plan_cost import save_picture
from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.experiments.evaluation.report import Evaluation, Score, best_sharder
from autoshard.sharders import HEURISTICS
from autoshard.sharders.explaining.report import plan_document, write_page
from autoshard.sharders.explaining.summary import Baseline, training_notes
from autoshard.workload import ShardingPlan

_MAX_PAGES = 16  # of the first tasks: others would take as long again
_TORCHREC = "torchrec"  # begins the names of TorchRec's planner


def write_pages(
    folder: Path, found: Evaluation, oracle: EstimatedCosts, names: Sequence[str]
) -> Iterator[Path]:
    """Writes a page about the fastest plan of each of the first tasks; yields the files.

    It is compared with the best heuristic's plan and TorchRec's, as far as these took part. What
    needs further plans, as what would help next, is left out.

    Args:
        folder: Where they are written.
        found: Plans of all sharders with their estimated costs.
        oracle: Predicts costs.
        names: Names of the tasks.
    """
    for number, (task, name) in enumerate(zip(found.tasks, names, strict=True)):
        plans = _plans_by_step(found, number)
        if number >= _MAX_PAGES or not plans:
            continue
        (best, plan), *others = plans.items()
        chosen = (
            next((each for each in others if each[0].startswith(_TORCHREC)), None),
            next((each for each in others if each[0] in HEURISTICS), None),
        )
        predictor = StepPredictor(oracle, task)
        compared = [Baseline(n, p, predictor.of(p)) for n, p in filter(None, chosen)]
        path = folder / f"{name}.html"
        notes = training_notes(plan, task)
        document = plan_document(plan, task, oracle, compared, notes)
        write_page(path, document, f"Task {name}, sharded by {best}")
        yield path


def _plans_by_step(found: Evaluation, number: int) -> dict[str, ShardingPlan]:
    """Returns the plans of a task by sharder, the fastest first."""
    of_task = ((name, outcomes[number]) for name, outcomes in found.outcomes.items())
    known = [(o.step_ms, name, o.plan) for name, o in of_task if o.plan and o.step_ms is not None]
    return {name: plan for _, name, plan in sorted(known, key=lambda each: each[0])}


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
