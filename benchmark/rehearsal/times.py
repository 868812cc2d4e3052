"""Times of training steps on ranks, and the report of a rehearsal."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from autoshard.benchmark.statistics import median_interval
from autoshard.workload import documents

# In the order of reports. A rank that is done early waits for others in the next exchange, so
# exchanges include waiting.
PHASES = (
    "input",
    "forward",
    "forward all-to-all",
    "dense",
    "backward all-to-all",
    "backward",
    "all-reduce",
)
_COLUMNS = ("input", "fwd", "a2a fwd", "dense", "a2a bwd", "bwd", "all-red.")
_COMPUTE = tuple(PHASES.index(phase) for phase in ("forward", "backward"))
MUCH = 0.05  # share of cores taken by other processes, above which it is reported
REHEARSAL_SCHEMA = documents.Schema("autoshard.rehearsal", 1)


@dataclass(frozen=True)
class Step:
    """A step on one rank.

    Args:
        phases_ms: Milliseconds of each of PHASES.
        loss: Mean loss of the rank's samples, before the step.
        disturbed: Share of its operators' time in which other processes had the core.
    """

    phases_ms: tuple[float, ...]
    loss: float
    disturbed: float = 0.0

    @property
    def total_ms(self) -> float:
        """Sum of all phases."""
        return sum(self.phases_ms)


@dataclass(frozen=True)
class RankTimes:
    """One rank's steps.

    Args:
        name: Name of its core or GPU.
        tables: Number of tables with columns on it; None if TorchRec's planner decided.
        planned_bytes: Memory by the plan; None if TorchRec's planner decided.
        peak_bytes: Peak memory of its process with all libraries; on a GPU that of tensors.
        steps: Steps in order.
    """

    name: str
    tables: int | None
    planned_bytes: int | None
    peak_bytes: int
    steps: tuple[Step, ...]

    @property
    def phases_ms(self) -> tuple[float, ...]:
        """Median of each phase."""
        every = zip(*(step.phases_ms for step in self.steps), strict=True)
        return tuple(map(statistics.median, every))

    @property
    def total_ms(self) -> float:
        """Median step."""
        return statistics.median(step.total_ms for step in self.steps)

    @property
    def compute_ms(self) -> float:
        """Median time of its fused operators, forward and backward."""
        return statistics.median(
            sum(step.phases_ms[phase] for phase in _COMPUTE) for step in self.steps
        )


@dataclass(frozen=True)
class Rehearsal:
    """Steps of all ranks, each of which began at the same time on all."""

    ranks: tuple[RankTimes, ...]

    @property
    def step_ms(self) -> list[float]:
        """Time of each step until the last rank is done."""
        every = zip(*(rank.steps for rank in self.ranks), strict=True)
        return [max(step.total_ms for step in steps) for steps in every]

    @property
    def median_ms(self) -> float:
        """Median step time."""
        return statistics.median(self.step_ms)

    @property
    def interval_ms(self) -> tuple[float, float]:
        """The 95 % interval of the median step time."""
        return median_interval(self.step_ms)

    @property
    def losses(self) -> list[float]:
        """Mean loss of all samples in each step."""
        every = zip(*(rank.steps for rank in self.ranks), strict=True)
        return [statistics.fmean(step.loss for step in steps) for steps in every]

    @property
    def disturbed(self) -> float:
        """Mean share of cores' time that other processes took."""
        return statistics.fmean(step.disturbed for rank in self.ranks for step in rank.steps)

    @property
    def slowest(self) -> int:
        """The rank whose operators take longest, for which the others wait."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].compute_ms)

    def table(self, title: str) -> Table:
        """Returns the report with a row for each rank, for rich's console."""
        low, high = self.interval_ms
        report = Table(
            title=f"{title}: {self.median_ms:.2f} ms a step (median of {len(self.step_ms)}; "
            f"95 % interval {low:.2f} to {high:.2f})",
            title_justify="left",
            caption="medians in ms; bold: the rank whose operators take longest, for which others "
            "wait in the all-to-alls and the all-reduce of what is dense; MB: of tables and a "
            "batch, by the plan; peak MB: of the process",
            caption_justify="left",
            box=None,
            padding=(0, 0, 0, 1),
        )
        report.add_column("rank", no_wrap=True)
        for column in ("tables", "MB", "peak MB", *_COLUMNS, "step"):
            report.add_column(column, justify="right", no_wrap=True)
        hosts = {rank.name.partition("@")[2] for rank in self.ranks}
        for number, rank in enumerate(self.ranks):
            name = rank.name if len(hosts) > 1 else rank.name.partition("@")[0]
            planned = None if rank.planned_bytes is None else rank.planned_bytes / 1e6
            report.add_row(
                f"{number} {name}",
                "-" if rank.tables is None else str(rank.tables),
                "-" if planned is None else f"{planned:,.0f}",
                f"{rank.peak_bytes / 1e6:,.0f}",
                *(f"{value:.1f}" for value in rank.phases_ms),
                f"{rank.total_ms:.1f}",
                style="bold" if number == self.slowest else "",
            )
        return report

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document with its schema version."""
        return REHEARSAL_SCHEMA.stamp(
            {
                "step_ms": self.median_ms,
                "interval_ms": list(self.interval_ms),
                "slowest_rank": self.slowest,
                "losses": self.losses,
                "disturbed": self.disturbed,
                "phases": list(PHASES),
                "ranks": [asdict(rank) for rank in self.ranks],
            }
        )
