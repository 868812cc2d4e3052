"""Times of training steps on ranks, and the report of a rehearsal."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.table import Table

from autoshard.benchmark.rehearsal.trace import (
    BACKWARD,
    FORWARD,
    PHASES,
    ComposedStep,
    Trace,
    TracedStep,
    compose,
)
from autoshard.benchmark.statistics import median_interval, uncontended_level
from autoshard.workload import Link, documents
from autoshard.workload.arrays import Floats

_COLUMNS = ("input", "fwd", "outputs", "dense", "grads", "bwd", "reduce")
MUCH = 0.05  # share of cores taken by other processes, above which it is reported
REHEARSAL_SCHEMA = documents.Schema("autoshard.rehearsal", 2)


@dataclass(frozen=True)
class Step:
    """A step on one rank.

    Args:
        traced: What it computed, and its times.
        loss: Mean loss of the rank's samples, before the step.
        reference_ms: Forward and backward of the reference operator just before; None without one.
    """

    traced: TracedStep
    loss: float
    reference_ms: tuple[float, float] | None = None


Level = tuple[float, float]  # uncontended times of the reference, forward and backward


def reference_level(steps: Iterable[Step]) -> Level | None:
    """Returns the uncontended times of the reference beside these steps; None without one."""
    found = [step.reference_ms for step in steps if step.reference_ms is not None]
    if not found:
        return None
    forward, backward = zip(*found, strict=True)
    return uncontended_level(forward), uncontended_level(backward)


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
        """Median computing in each phase."""
        every = np.stack([step.traced.trace.phases_ms for step in self.steps])
        return tuple(np.median(every, axis=0).tolist())

    def normalised(self, level: Level | None) -> list[Trace]:
        """Returns the traces as they would be with the reference at this level.

        Forward passes are slowed like the reference's, backward passes like its backward, and all
        the rest like both together.
        """
        traces = [step.traced.trace for step in self.steps]
        beside = [step.reference_ms for step in self.steps]
        if level is None or None in beside:
            return traces
        # The median of steps nearby: single runs of the reference vary more than the host does.
        forward, backward = _smoothed(np.array(beside)).T
        factors = np.tile(sum(level) / (forward + backward), (len(PHASES), 1))
        factors[FORWARD], factors[BACKWARD] = level[0] / forward, level[1] / backward
        every = zip(traces, factors.T, strict=True)
        return [replace(trace, compute_ms=trace.compute_ms * factor) for trace, factor in every]


def _smoothed(values: Floats, reach: int = 2) -> Floats:
    """Returns the median of each row and its neighbours."""
    count = len(values)
    around = [values[max(0, n - reach) : min(count, n + reach + 1)] for n in range(count)]
    return np.stack([np.median(some, axis=0) for some in around])


@dataclass(frozen=True)
class Rehearsal:
    """Steps of all ranks.

    Args:
        ranks: Times of each rank.
        in_turns: Whether ranks computed in turns; then a step is composed of what they computed.
        link: Network by which exchanges are priced in a composed step.
        level: Reference level to which composed steps are normalised; by default that of these
            steps.
    """

    ranks: tuple[RankTimes, ...]
    in_turns: bool = False
    link: Link | None = None
    level: Level | None = None

    @cached_property
    def composed(self) -> list[ComposedStep]:
        """Each step, put together from what ranks computed."""
        level = self.level or reference_level(s for rank in self.ranks for s in rank.steps)
        every = [rank.normalised(level) for rank in self.ranks]
        return [compose(traces, self.link) for traces in zip(*every, strict=True)]

    @property
    def step_ms(self) -> list[float]:
        """Time of each step until the last rank is done."""
        if self.in_turns:
            return [step.step_ms for step in self.composed]
        every = zip(*(rank.steps for rank in self.ranks), strict=True)
        return [max(step.traced.wall_ms for step in steps) for steps in every]

    @property
    def waiting_ms(self) -> Floats:
        """Median exchanging and waiting of each rank in each phase, [ranks, PHASES]."""
        if self.in_turns:
            return np.median([step.waiting_ms for step in self.composed], axis=0)
        every = [[step.traced.exchange_ms for step in rank.steps] for rank in self.ranks]
        return np.asarray(np.median(every, axis=1))

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
        every = [step.traced.disturbed for rank in self.ranks for step in rank.steps]
        return statistics.fmean(every)

    @property
    def slowest(self) -> int:
        """The rank that computes longest, for which the others wait."""
        return max(range(len(self.ranks)), key=lambda rank: sum(self.ranks[rank].phases_ms))

    def table(self, title: str) -> Table:
        """Returns the report with a row for each rank, for rich's console."""
        low, high = self.interval_ms
        how = "composed of ranks that took turns; " if self.in_turns else ""
        report = Table(
            title=f"{title}: {self.median_ms:.2f} ms a step ({how}median of {len(self.step_ms)}; "
            f"95 % interval {low:.2f} to {high:.2f})",
            title_justify="left",
            caption="medians in ms of what a rank computes; waits: for the others and for what they "
            "send; bold: the rank that computes longest; MB: of tables and a batch, by the plan; "
            "peak MB: of the process",
            caption_justify="left",
            box=None,
            padding=(0, 0, 0, 1),
        )
        report.add_column("rank", no_wrap=True)
        for column in ("tables", "MB", "peak MB", *_COLUMNS, "waits"):
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
                f"{self.waiting_ms[number].sum():.1f}",
                style="bold" if number == self.slowest else "",
            )
        return report

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document with its schema version."""
        return REHEARSAL_SCHEMA.stamp(
            {
                "step_ms": self.median_ms,
                "interval_ms": list(self.interval_ms),
                "in_turns": self.in_turns,
                "slowest_rank": self.slowest,
                "losses": self.losses,
                "disturbed": self.disturbed,
                "phases": list(PHASES),
                "ranks": [
                    {
                        "name": rank.name,
                        "tables": rank.tables,
                        "planned_bytes": rank.planned_bytes,
                        "peak_bytes": rank.peak_bytes,
                        "phases_ms": list(rank.phases_ms),
                        "waits_ms": waits.tolist(),
                    }
                    for rank, waits in zip(self.ranks, self.waiting_ms, strict=True)
                ],
                "steps_ms": self.step_ms,
            }
        )
