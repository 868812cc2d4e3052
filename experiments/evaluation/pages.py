"""Pages about the best plans of a comparison by estimated costs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.experiments.evaluation.report import Evaluation
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
