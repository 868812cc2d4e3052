"""What ranks tell of their steps, and what a step takes."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from autoshard.benchmark.statistics import median_interval
from autoshard.workload import documents

# In the order in which they are told. A rank that is done earlier than others waits for them in the
# next exchange, so exchanges hold what ranks wait for each other.
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
MUCH = 0.05  # of ranks' cores, that others take: more than that is told
REHEARSAL_SCHEMA = documents.Schema("autoshard.rehearsal", 1)


@dataclass(frozen=True)
class Step:
    """A step on one rank.

    Args:
        phases_ms: milliseconds of each of PHASES.
        loss: mean of the rank's samples, before the step.
        disturbed: share of its operators' time in which others had the core.
    """

    phases_ms: tuple[float, ...]
    loss: float
    disturbed: float = 0.0

    @property
    def total_ms(self) -> float:
        """All phases together."""
        return sum(self.phases_ms)


@dataclass(frozen=True)
class RankTimes:
    """One rank's steps.

    Args:
        name: of the core or GPU that it ran on.
        tables: that it holds columns of; None where TorchRec's plan splits them by rows, or copies.
        planned_bytes: of memory, by the plan; None as well.
        peak_bytes: the most that its process has taken, libraries and all; of a GPU what tensors
            took.
        steps: in order.
    """

    name: str
    tables: int | None
    planned_bytes: int | None
    peak_bytes: int
    steps: tuple[Step, ...]

    @property
    def phases_ms(self) -> tuple[float, ...]:
        """The median of each phase."""
        every = zip(*(step.phases_ms for step in self.steps), strict=True)
        return tuple(map(statistics.median, every))

    @property
    def total_ms(self) -> float:
        """The median step."""
        return statistics.median(step.total_ms for step in self.steps)

    @property
    def compute_ms(self) -> float:
        """The median of what its fused operators take, forward and backward."""
        return statistics.median(
            sum(step.phases_ms[phase] for phase in _COMPUTE) for step in self.steps
        )


@dataclass(frozen=True)
class Rehearsal:
    """Steps of all ranks, each of which all began at the same time."""

    ranks: tuple[RankTimes, ...]

    @property
    def step_ms(self) -> list[float]:
        """Of each step, until the last rank is through."""
        every = zip(*(rank.steps for rank in self.ranks), strict=True)
        return [max(step.total_ms for step in some) for some in every]

    @property
    def median_ms(self) -> float:
        """What a step takes."""
        return statistics.median(self.step_ms)

    @property
    def interval_ms(self) -> tuple[float, float]:
        """In which the median lies with 95 %."""
        return median_interval(self.step_ms)

    @property
    def losses(self) -> list[float]:
        """Of each step, the mean of all samples."""
        every = zip(*(rank.steps for rank in self.ranks), strict=True)
        return [statistics.fmean(step.loss for step in some) for some in every]

    @property
    def disturbed(self) -> float:
        """The share of their cores that others took of ranks, mean of all steps."""
        return statistics.fmean(step.disturbed for rank in self.ranks for step in rank.steps)

    @property
    def slowest(self) -> int:
        """The rank whose operators take longest: what all others wait for."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].compute_ms)

    def table(self, title: str) -> Table:
        """The report: a row a rank, ready for rich's console."""
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
        """A JSON document with its schema version."""
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
