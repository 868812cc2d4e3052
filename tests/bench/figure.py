"""A figure, and a group of them with what they were taken with."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scipy import stats

from autoshard.workload import documents


@dataclass(frozen=True)
class Figure:
    """What we tell of ourselves in one number.

    Args:
        name: by which documents quote it. So it is clear by itself, of no other figure, and the
            same on every machine.
        goal: what it should be, in words; empty where there is no goal.
        value: what was measured; None where there was too little to tell it.
        unit: of the value; empty for ratios, shares and counts.
        interval: in which the value lies with 95 %, where that is known.
    """

    name: str
    goal: str
    value: float | None
    unit: str = ""
    interval: tuple[float, float] | None = None

    @property
    def measured(self) -> str:
        """The value as documents say it: `0.885 (95 %: 0.871 to 0.899)`, `4.13 s`."""
        if self.value is None:
            return "not told"
        told = f"{_number(self.value)} {self.unit}".strip()
        if self.interval is None:
            return told
        return f"{told} (95 %: {' to '.join(_number(end) for end in self.interval)})"


def mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The mean of several, and where it lies with 95 % by Student's distribution."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean, (mean - half, mean + half)


@dataclass(frozen=True)
class Group:
    """Figures that are taken together.

    Args:
        title: of their table.
        take: takes them; it may fill the folder that it is handed.
        on_ray: whether they need Ray. Those that do not are taken before it starts.
    """

    title: str
    take: Callable[[Path], Sequence[Figure]]
    on_ray: bool = True


@dataclass(frozen=True)
class Taken:
    """A group of figures as it was taken: where, when, with which code."""

    title: str
    machine: str
    date: str
    commit: str
    seconds: float
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """As `docs/figures.json` holds it."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Taken":
        """What `to_json` made; UserError where it cannot have."""
        with documents.fields_of("a group of figures"):
            figures = tuple(
                Figure(**{**each, "interval": each["interval"] and tuple(each["interval"])})
                for each in document["figures"]
            )
            known = {field.name: document[field.name] for field in fields(Taken)}
            return Taken(**{**known, "figures": figures})


def _number(value: float) -> str:
    """Three significant digits; below 2, where ratios to 1 are read, three decimals."""
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    digits = 3 if abs(value) < 2 else 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"
