"""A metric, a group of metrics, and the result of measuring a group."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from autoshard.workload import documents


@dataclass(frozen=True)
class Metric:
    """A measured number with its target.

    Args:
        name: Documents quote the metric by it: unique, and the same on every machine.
        target: The intended range, in words; empty if there is none.
        value: The measured value; None if there was too little data.
        unit: Unit of the value; empty for ratios, shares and counts.
        interval: The 95 % interval of the value, where known.
    """

    name: str
    target: str
    value: float | None
    unit: str = ""
    interval: tuple[float, float] | None = None

    @property
    def measured(self) -> str:
        """Returns the formatted value: `0.885 (95 %: 0.871 to 0.899)`, `4.13 s`."""
        if self.value is None:
            return "not available"
        value = f"{_number(self.value)} {self.unit}".strip()
        if self.interval is None:
            return value
        return f"{value} (95 %: {' to '.join(_number(end) for end in self.interval)})"

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Metric":
        """Returns the metric of a group that `GroupResult.to_json` wrote."""
        interval = document["interval"]
        return Metric(**{**document, "interval": interval and tuple(interval)})


def mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Returns the mean and its 95 % interval by Student's distribution."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean, (mean - half, mean + half)


@dataclass(frozen=True)
class Group:
    """Metrics that are measured together.

    Args:
        title: Heading of their table.
        measure: Measures them; it may write to the folder that it receives.
        on_ray: Whether they need Ray. Groups that do not are measured before Ray starts.
    """

    title: str
    measure: Callable[[Path], Sequence[Metric]]
    on_ray: bool = True


@dataclass(frozen=True)
class GroupResult:
    """The metrics of a group, with machine, date, commit and duration."""

    title: str
    machine: str
    date: str
    commit: str
    seconds: float
    metrics: tuple[Metric, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the group as `docs/figures.json` holds it."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "GroupResult":
        """Reads what `to_json` wrote; raises UserError for anything else."""
        with documents.fields_of("a group of metrics"):
            metrics = tuple(Metric.from_json(each) for each in document["metrics"])
            return GroupResult(**{**document, "metrics": metrics})


def _number(value: float) -> str:
    """Formats three significant digits; below 2, three decimals."""
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    digits = 3 if abs(value) < 2 else 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"
