"""Times of training steps on ranks, and the report of a rehearsal."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.table import Table

from autoshard.benchmark.rehearsal.trace import (
    PHASES,
    ComposedStep,
    Trace,
    TracedStep,
    compose,
    typical,
)
from autoshard.benchmark.statistics import median_interval
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
        reference_ms: Time of the reference operator just before, forward and backward; None without
            one.
    """

    traced: TracedStep
    loss: float
    reference_ms: float | None = None


@dataclass(frozen=True)
class Round:
    """Steps of all ranks with models that were built once.

    What varies from one build to the next, such as where weights are in memory, is alike for all
    steps of a round, so an interval needs several rounds.

    Args:
        steps: Steps of each rank, in order.
    """

    steps: tuple[tuple[Step, ...], ...]

    @property
    def reference_ms(self) -> float | None:
        """Median time of the reference beside all steps; None without one."""
        beside = [s.reference_ms for rank in self.steps for s in rank if s.reference_ms is not None]
        return statistics.median(beside) if beside else None

    @property
    def traces(self) -> list[Trace]:
        """A typical step of each rank: medians of what it computed."""
        return [typical([step.traced.trace for step in rank]) for rank in self.steps]

    @property
    def wall_ms(self) -> list[float]:
        """Time of each step until the last rank is done, as it ran."""
        every = zip(*self.steps, strict=True)
        return [max(step.traced.wall_ms for step in steps) for steps in every]


@dataclass(frozen=True)
class RankReport:
    """What a rank holds.

    Args:
        name: Name of its core or GPU.
        tables: Number of tables with columns on it; None if TorchRec's planner decided.
        planned_bytes: Memory by the plan; None if TorchRec's planner decided.
        peak_bytes: Peak memory of its process with all libraries; on a GPU that of tensors.
    """

    name: str
    tables: int | None
    planned_bytes: int | None
    peak_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """Steps of all ranks, in one or several rounds.

    Args:
        ranks: What each rank holds.
        rounds: Rounds, each with models built anew.
        in_turns: Whether ranks computed in turns; then a step is composed of what they computed.
        link: Network by which exchanges are priced in a composed step.
        level_ms: Time of the reference operator to which composed steps are normalised; by default
            its median over all rounds.
    """

    ranks: tuple[RankReport, ...]
    rounds: tuple[Round, ...]
    in_turns: bool = False
    link: Link | None = None
    level_ms: float | None = None

    @staticmethod
    def joined(rehearsals: Sequence["Rehearsal"], level_ms: float | None) -> "Rehearsal":
        """Returns one rehearsal with the rounds of several."""
        rounds = tuple(each for rehearsal in rehearsals for each in rehearsal.rounds)
        return replace(rehearsals[-1], rounds=rounds, level_ms=level_ms)

    @cached_property
    def traces(self) -> list[list[Trace]]:
        """A typical step of each rank in each round: [rounds][ranks].

        Where there is a reference, they are as they would be with it at the common level: other
        tenants of a host slow ranks like the reference.
        """
        beside = [each.reference_ms for each in self.rounds]
        known = [ms for ms in beside if ms is not None]
        level = self.level_ms or (statistics.median(known) if known else None)
        factors = [1.0 if ms is None or level is None else level / ms for ms in beside]
        return [
            [trace.scaled(factor) for trace in each.traces]
            for each, factor in zip(self.rounds, factors, strict=True)
        ]

    @cached_property
    def composed(self) -> list[ComposedStep]:
        """A step of each round, put together from what ranks computed."""
        return [compose(traces, self.link) for traces in self.traces]

    @property
    def round_ms(self) -> list[float]:
        """Step time of each round: composed, or the median of what was measured."""
        if self.in_turns:
            return [step.step_ms for step in self.composed]
        return [statistics.median(each.wall_ms) for each in self.rounds]

    @property
    def _samples_ms(self) -> list[float]:
        if self.in_turns or len(self.rounds) > 1:
            return self.round_ms
        return self.rounds[0].wall_ms

    @property
    def median_ms(self) -> float:
        """Median step time."""
        return statistics.median(self._samples_ms)

    @property
    def interval_ms(self) -> tuple[float, float]:
        """The 95 % interval of the median step time: of rounds, or of steps of the only one."""
        return median_interval(self._samples_ms)

    @property
    def phases_ms(self) -> Floats:
        """Median computing of each rank in each phase, [ranks, PHASES]."""
        every = [[trace.phases_ms for trace in traces] for traces in self.traces]
        return np.asarray(np.median(every, axis=0))

    @property
    def waiting_ms(self) -> Floats:
        """Median exchanging and waiting of each rank in each phase, [ranks, PHASES]."""
        if self.in_turns:
            return np.asarray(np.median([step.waiting_ms for step in self.composed], axis=0))
        every = [[[s.traced.exchange_ms for s in rank] for rank in e.steps] for e in self.rounds]
        return np.asarray(np.median(np.concatenate(every, axis=1), axis=1))

    @property
    def losses(self) -> list[float]:
        """Mean loss of all samples in each step of the last round."""
        every = zip(*self.rounds[-1].steps, strict=True)
        return [statistics.fmean(step.loss for step in steps) for steps in every]

    @property
    def disturbed(self) -> float:
        """Mean share of cores' time that other processes took."""
        steps = [step for each in self.rounds for rank in each.steps for step in rank]
        return statistics.fmean(step.traced.disturbed for step in steps)

    @property
    def slowest(self) -> int:
        """The rank that computes longest, for which the others wait."""
        return int(self.phases_ms.sum(1).argmax())

    def table(self, title: str) -> Table:
        """Returns the report with a row for each rank, for rich's console."""
        low, high = self.interval_ms
        count, of = (
            len(self._samples_ms),
            "steps" if self._samples_ms != self.round_ms else "rounds",
        )
        how = "composed of ranks that took turns, " if self.in_turns else ""
        report = Table(
            title=f"{title}: {self.median_ms:.2f} ms a step ({how}median of {count} {of}; "
            f"95 % interval {low:.2f} to {high:.2f})",
            title_justify="left",
            caption="medians in ms of what a rank computes; waits: for others and for what they "
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
        times = zip(self.ranks, self.phases_ms, self.waiting_ms.sum(1), strict=True)
        for number, (rank, phases, waits) in enumerate(times):
            name = rank.name if len(hosts) > 1 else rank.name.partition("@")[0]
            planned = None if rank.planned_bytes is None else rank.planned_bytes / 1e6
            report.add_row(
                f"{number} {name}",
                "-" if rank.tables is None else str(rank.tables),
                "-" if planned is None else f"{planned:,.0f}",
                f"{rank.peak_bytes / 1e6:,.0f}",
                *(f"{value:.1f}" for value in phases),
                f"{waits:.1f}",
                style="bold" if number == self.slowest else "",
            )
        return report

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document with its schema version."""
        times = zip(self.ranks, self.phases_ms, self.waiting_ms, strict=True)
        return REHEARSAL_SCHEMA.stamp(
            {
                "step_ms": self.median_ms,
                "interval_ms": list(self.interval_ms),
                "in_turns": self.in_turns,
                "rounds_ms": self.round_ms,
                "slowest_rank": self.slowest,
                "losses": self.losses,
                "disturbed": self.disturbed,
                "phases": list(PHASES),
                "ranks": [
                    asdict(rank) | {"phases_ms": phases.tolist(), "waits_ms": waits.tolist()}
                    for rank, phases, waits in times
                ],
            }
        )
