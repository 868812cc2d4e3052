"""Figures of `make bench`: what they are, what they should be, what they are here."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.table import Table

from autoshard.benchmark.hardware import cpu_fingerprint
from autoshard.experiments.console.cli import console


@dataclass(frozen=True)
class Figure:
    """One line of the report."""

    name: str
    goal: str
    value: float
    unit: str = ""


def print_figures(figures: Sequence[Figure]) -> None:
    """A row a figure, with the day and the machine."""
    today = datetime.now(tz=UTC).date().isoformat()
    report = Table("figure", "goal", "measured", title=f"{today}, {cpu_fingerprint()}")
    for figure in figures:
        report.add_row(figure.name, figure.goal, f"{figure.value:,.3f} {figure.unit}".strip())
    console.print(report)
