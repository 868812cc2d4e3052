"""Pictures of how good a model is, as PNG or SVG files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.cost_model.evaluation import Evaluation
from autoshard.cost_model.training import Curves
from autoshard.workload import UserError


def predicted_against_measured(found: Evaluation, path: Path) -> None:
    """A point a test shard, and the band that the noise of measuring alone would fill."""

    def draw(axes: Any) -> None:
        span = np.array([found.measured_ms.min(), found.measured_ms.max()])
        axes.plot(span, span, color="black", linewidth=0.8)
        if found.noise_floor is not None:
            low, high = span * (1 - found.noise_floor), span * (1 + found.noise_floor)
            label = f"measured twice: {found.noise_floor:.1%} apart (median)"
            axes.fill_between(span, low, high, alpha=0.25, color="gray", label=label)
        error = f"model: {found.score.median_error:.1%} off (median)"
        axes.scatter(found.measured_ms, found.predicted_ms, s=8, label=error)
        axes.scatter(
            found.measured_ms, found.additive_ms, s=4, alpha=0.4, label="sum of tables alone"
        )
        axes.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
        axes.legend(frameon=False)

    _picture(path, f"test shards, Kendall tau {found.score.kendall_tau:.3f}", draw)


def error_by_number_of_tables(found: Evaluation, path: Path) -> None:
    """Median error of the model and of the sum of single tables, by the size of shards."""

    def draw(axes: Any) -> None:
        groups = found.by_size()
        places = np.arange(len(groups))
        for offset, column, name in ((-0.2, 2, "model"), (0.2, 3, "sum of tables alone")):
            axes.bar(places + offset, [group[column] for group in groups], 0.4, label=name)
        if found.noise_floor is not None:
            axes.axhline(found.noise_floor, color="black", linewidth=0.8, label="noise floor")
        axes.set_xticks(places, [f"{name}\n{count} shards" for name, count, *_ in groups])
        axes.set(yscale="log", xlabel="tables", ylabel="median relative error")
        axes.legend(frameon=False)

    _picture(path, "error by number of tables", draw)


def calibration(found: Evaluation, path: Path) -> None:
    """Share of test shards within intervals of growing width, in units of the 90 % interval."""

    def draw(axes: Any) -> None:
        ordered = np.sort(found.widths)
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        axes.step(ordered, shares, where="post")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.axhline(0.9, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlim=(0, 3), ylim=(0, 1), ylabel="share of test shards within")
        axes.set_xlabel("width, as a multiple of the 90 % interval")

    _picture(path, f"the 90 % interval holds {found.coverage_90:.1%}", draw)


def learning_curves(curves: Curves, path: Path) -> None:
    """Loss in training and error on validation tables, by step."""

    def draw(axes: Any) -> None:
        axes.plot(curves.steps, curves.losses, label="training loss")
        axes.plot(curves.steps, curves.errors, label="validation error (mean)")
        axes.set(yscale="log", xlabel="step")
        axes.legend(frameon=False)

    _picture(path, "learning", draw)


def draw_all(found: Evaluation, curves: Curves, folder: Path) -> Sequence[Path]:
    """All pictures as PNG files in a folder."""
    paths = {
        name: folder / f"{name}.png" for name in ("predicted", "by_size", "calibration", "curves")
    }
    predicted_against_measured(found, paths["predicted"])
    error_by_number_of_tables(found, paths["by_size"])
    calibration(found, paths["calibration"])
    learning_curves(curves, paths["curves"])
    return list(paths.values())


def _picture(path: Path, title: str, draw: Callable[[Any], None]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.4), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.set_title(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the picture cannot be written: {error}") from error
