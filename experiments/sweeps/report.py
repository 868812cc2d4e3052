"""What comes out of a sweep: a table, a picture of all trials, the winner."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from autoshard.experiments.console import cli
from autoshard.experiments.sweeps.search_space import Choice, Dimension, Range
from autoshard.experiments.sweeps.sweep import TrialOutcome

_SHOWN = 4  # of the best trials, in the table


def finished(outcomes: Sequence[TrialOutcome]) -> list[TrialOutcome]:
    """The trials that came to an end, the best first; of equals that which trained least."""
    ended = [o for o in outcomes if o.status == "finished" and o.score is not None]
    return sorted(ended, key=lambda o: (o.score, o.train_seconds))


def print_best(outcomes: Sequence[TrialOutcome], space: Sequence[Dimension]) -> None:
    """The best trials beside each other."""
    shown = finished(outcomes)[:_SHOWN]
    report = Table(title="the best trials", title_justify="left")
    report.add_column("")
    for found in shown:
        report.add_column(found.trial_id, justify="right")
    report.add_row("score", *(f"{found.score:.4f}" for found in shown))
    report.add_row("iterations", *(str(found.iterations) for found in shown))
    report.add_row("s of training", *(f"{found.train_seconds:.0f}" for found in shown))
    for dimension in space:
        values = (found.values.get(dimension.name, math.nan) for found in shown)
        report.add_row(dimension.name, *(f"{value:.4g}" for value in values))
    cli.console.print(report)


def draw_trials(
    outcomes: Sequence[TrialOutcome], space: Sequence[Dimension], score: str, path: Path
) -> None:
    """Parallel coordinates: a line a trial, an axis a hyperparameter, the colour is the score."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import Normalize

    told = [(o, o.score) for o in outcomes if o.score is not None]
    scores = [value for _, value in told]
    low, high = min(scores), max(scores)
    color = Normalize(low, high if high > low else low + 1e-9)
    axes = [d for d in space if all(d.name in o.values for o, _ in told)]
    figure, plot = plt.subplots(figsize=(1.5 * (len(axes) + 1) + 1, 4.5), layout="constrained")
    best = next(iter(finished(outcomes)), None)
    for outcome, value in sorted(told, key=lambda pair: -pair[1]):
        heights = [_height(d, float(outcome.values[d.name])) for d in axes]
        heights.append((value - low) / (high - low) if high > low else 0.5)
        mine = best is not None and outcome.trial_id == best.trial_id
        plot.plot(
            range(len(heights)),
            heights,
            color=plt.get_cmap("viridis_r")(color(value)),
            linewidth=3.0 if mine else 1.2,
            alpha=1.0 if mine else 0.7,
        )
    for place, dimension in enumerate(axes):
        for value, text in _marks(dimension):
            plot.annotate(
                text, (place, _height(dimension, value)), fontsize=7, ha="right", va="center",
                xytext=(-3, 0), textcoords="offset points",
            )  # fmt: skip
    for value in dict.fromkeys((low, high)):
        height = (value - low) / (high - low) if high > low else 0.5
        plot.annotate(f"{value:.4f}", (len(axes), height), fontsize=7, xytext=(4, 0),
                      va="center", textcoords="offset points")  # fmt: skip
    plot.set_xticks(range(len(axes) + 1), [*(d.name for d in axes), score], rotation=20, fontsize=8)
    plot.set_yticks([])
    plot.set_xlim(-0.5, len(axes) + 0.6)
    for place in range(len(axes) + 1):
        plot.axvline(place, color="0.7", linewidth=0.8, zorder=0)
    for side in plot.spines.values():
        side.set_visible(False)
    plot.set_title(f"{len(told)} trials; the thick line is the best", fontsize=10, loc="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _height(dimension: Dimension, value: float) -> float:
    """Where a value lies on its axis, 0 to 1."""
    if isinstance(dimension, Choice):
        options = [float(option) for option in dimension.options]
        nearest = min(range(len(options)), key=lambda n: abs(options[n] - value))
        return nearest / max(1, len(options) - 1)
    low, high = dimension.low, dimension.high
    if dimension.log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    return (value - low) / (high - low)


def _marks(dimension: Dimension) -> list[tuple[float, str]]:
    if isinstance(dimension, Range):
        return [(value, f"{value:g}") for value in (dimension.low, dimension.high)]
    return [(float(option), f"{option:g}") for option in dimension.options]
