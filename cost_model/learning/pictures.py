"""Pictures of a model's accuracy, as PNG files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.benchmark.plan_cost import save_picture
from autoshard.cost_model.learning.evaluation import Evaluation
from autoshard.cost_model.learning.training import Curves


def draw_all(found: Evaluation, curves: Curves, folder: Path) -> Sequence[Path]:
    """Draws predictions, errors by number of tables, interval coverage and learning curves."""
    names = ("predicted", "by_size", "calibration", "curves")
    predicted, by_size, calibration, learning = (folder / f"{name}.png" for name in names)
    _draw_predictions(found, predicted)
    _draw_errors_by_size(found, by_size)
    with _picture(calibration, f"the 90 % interval holds {found.coverage_90:.1%}") as axes:
        shares = np.arange(1, len(found.widths) + 1) / len(found.widths)
        axes.step(np.sort(found.widths), shares, where="post")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.axhline(0.9, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlim=(0, 3), ylim=(0, 1), ylabel="share of test shards within")
        axes.set_xlabel("width, as a multiple of the 90 % interval")
    with _picture(learning, "learning") as axes:
        axes.plot(curves.steps, curves.losses, label="training loss")
        axes.plot(curves.steps, curves.errors, label="validation error (mean)")
        axes.set(yscale="log", xlabel="step")
        axes.legend(frameon=False)
    return [predicted, by_size, calibration, learning]


def _draw_predictions(found: Evaluation, path: Path) -> None:
    with _picture(path, f"test shards, Kendall tau {found.score.kendall_tau:.3f}") as axes:
        span = np.array([found.measured_ms.min(), found.measured_ms.max()])
        axes.plot(span, span, color="black", linewidth=0.8)
        if found.noise_floor is not None:
            low, high = span * (1 - found.noise_floor), span * (1 + found.noise_floor)
            label = f"measured twice: {found.noise_floor:.1%} apart (median)"
            axes.fill_between(span, low, high, alpha=0.25, color="gray", label=label)
        error = f"model: {found.score.median_error:.1%} off (median)"
        axes.scatter(found.measured_ms, found.predicted_ms, s=8, label=error)
        additive = "sum of tables alone"
        axes.scatter(found.measured_ms, found.additive_ms, s=4, alpha=0.4, label=additive)
        axes.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
        axes.legend(frameon=False)


def _draw_errors_by_size(found: Evaluation, path: Path) -> None:
    with _picture(path, "error by number of tables") as axes:
        groups = found.by_size()
        places = np.arange(len(groups))
        for offset, column, name in ((-0.2, 2, "model"), (0.2, 3, "sum of tables alone")):
            axes.bar(places + offset, [group[column] for group in groups], 0.4, label=name)
        if found.noise_floor is not None:
            axes.axhline(found.noise_floor, color="black", linewidth=0.8, label="noise floor")
        axes.set_xticks(places, [f"{name}\n{count} shards" for name, count, *_ in groups])
        axes.set(yscale="log", xlabel="tables", ylabel="median relative error")
        axes.legend(frameon=False)


@contextmanager
def _picture(path: Path, title: str) -> Iterator[Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set_title(title)
    save_picture(figure, path)
