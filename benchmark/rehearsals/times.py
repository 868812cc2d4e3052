"""Times of training steps on ranks, and the report of a rehearsal."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

import numpy as np
from rich.table import Table

from autoshard.benchmark.rehearsals.trace import (
    PHASES,
    ComposedStep,
    Trace,
    TracedStep,
    compose,
    mean_of,
    typical,
)
from autoshard.benchmark.statistics import mean_interval, median_interval
from autoshard.workload import documents
from autoshard.workload.arrays import Floats
from autoshard.workload.tasks.links import AnyLink

_COLUMNS = ("input", "fwd", "outputs", "dense", "grads", "bwd", "reduce")
MUCH = 0.05  # share of cores taken by other processes, above which it is reported
Loop = Literal["plain", "pipelined"]  # of training
REHEARSAL_SCHEMA = documents.Schema("autoshard.rehearsal", 2)


@dataclass(frozen=True)
class Step:
    """A step on one rank.

    Args:
        traced: What it computed, and its times.
        loss: Mean loss of the rank's samples, before the step.
        reference_ms: Time of the reference operator, forward and backward, just before, or beside
            all steps that are launched together; None without one.
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
        traces: A typical step of each rank: medians of what it computed.
        reference_ms: Median time of the reference operator beside the steps; None without one.
        wall_ms: Time of each step until the last rank is done, as it ran.
        exchange_ms: Median exchanging and waiting as it ran, [ranks][PHASES].
        losses: Mean loss of all samples in each step.
        disturbed: Mean share of the operators' time in which other processes had the core.
        made_at: When it ended, in seconds since the epoch; 0 where that is not known.
        launch_ms: Median time in which the host launches a step, of the rank for which that takes
            longest, where ranks take turns on a GPU; else 0.
    """

    traces: tuple[Trace, ...]
    reference_ms: float | None
    wall_ms: tuple[float, ...]
    exchange_ms: tuple[tuple[float, ...], ...]
    losses: tuple[float, ...]
    disturbed: float
    made_at: float = 0.0
    launch_ms: float = 0.0

    @staticmethod
    def of(ranks: Sequence[Sequence[Step]]) -> "Round":
        """Summarises the steps of each rank."""
        every = list(zip(*ranks, strict=True))
        steps = [step for rank in ranks for step in rank]
        beside = [step.reference_ms for step in steps if step.reference_ms is not None]
        exchanges = [np.median([s.traced.exchange_ms for s in rank], axis=0) for rank in ranks]
        return Round(
            tuple(typical([step.traced.trace for step in rank]) for rank in ranks),
            statistics.median(beside) if beside else None,
            tuple(max(step.traced.wall_ms for step in at_once) for at_once in every),
            tuple(tuple(exchange.tolist()) for exchange in exchanges),
            tuple(fmean(step.loss for step in at_once) for at_once in every),
            fmean(step.traced.disturbed for step in steps),
            time.time(),
            max(statistics.median(step.traced.launch_ms for step in rank) for rank in ranks),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the round as a JSON object."""
        return vars(self) | {"traces": [trace.to_json() for trace in self.traces]}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Round":
        """Returns the round that `to_json` wrote."""
        fields = dict(document)
        fields["traces"] = tuple(Trace.from_json(trace) for trace in document["traces"])
        fields["exchange_ms"] = tuple(map(tuple, document["exchange_ms"]))
        return Round(**(fields | {name: tuple(fields[name]) for name in ("wall_ms", "losses")}))


@dataclass(frozen=True)
class RankReport:
    """What a rank holds.

    Args:
        name: Name of its core or GPU.
        tables: Number of tables with columns on it; None if TorchRec's planner decided.
        planned_bytes: Memory by the plan; None if TorchRec's planner decided.
        peak_bytes: Peak memory of its process with all libraries; on a GPU that of tensors; None if
            it has not trained.
    """

    name: str
    tables: int | None
    planned_bytes: int | None
    peak_bytes: int | None = None


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
        dense_ms: Time of the dense part in a composed step; by default that of the small model.
    """

    ranks: tuple[RankReport, ...]
    rounds: tuple[Round, ...]
    in_turns: bool = False
    link: AnyLink | None = None
    level_ms: float | None = None
    dense_ms: float | None = None

    @property
    def reference_ms(self) -> float | None:
        """Time of the reference operator to which composed steps are normalised."""
        known = [each.reference_ms for each in self.rounds if each.reference_ms is not None]
        return self.level_ms or (statistics.median(known) if known else None)

    @cached_property
    def traces(self) -> list[list[Trace]]:
        """A typical step of each rank in each round: [rounds][ranks].

        Where there is a reference, they are as they would be with it at the common level: other
        tenants of a host slow ranks like the reference.
        """
        beside = [each.reference_ms for each in self.rounds]
        level = self.reference_ms
        factors = [1.0 if ms is None or level is None else level / ms for ms in beside]
        return [
            [trace.scaled(factor) for trace in each.traces]
            for each, factor in zip(self.rounds, factors, strict=True)
        ]

    @cached_property
    def composed(self) -> list[ComposedStep]:
        """A step of each round, put together from what ranks computed."""
        return [compose(traces, self.link, self.dense_ms) for traces in self.traces]

    @cached_property
    def round_ms(self) -> list[float]:
        """Step time of each round: composed, or the median of steps as they ran.

        The slowest of ranks that all seem a little slower or faster than they are is slower than
        the slowest rank is: noise would be held against plans that are well balanced. So composed
        steps are the jackknife's pseudo-values of the step that mean ranks of all rounds take.
        """
        if not self.in_turns:
            return [statistics.median(each.wall_ms) for each in self.rounds]
        every, count = self._composed_ms(self.traces), len(self.traces)
        if count == 1:
            return [every]
        without = (self._composed_ms(self.traces[:n] + self.traces[n + 1 :]) for n in range(count))
        return [count * every - (count - 1) * ms for ms in without]

    def _composed_ms(self, traces: Sequence[Sequence[Trace]]) -> float:
        """Returns the step of ranks that take the mean of these rounds, [rounds][ranks]."""
        means = [mean_of(of_rank) for of_rank in zip(*traces, strict=True)]
        return compose(means, self.link, self.dense_ms).step_ms

    @property
    def step_ms(self) -> float:
        """Step time: the mean of rounds, or the median of steps that ran in a single one."""
        return statistics.median(self.rounds[0].wall_ms) if self._ran else fmean(self.round_ms)

    @property
    def interval_ms(self) -> tuple[float, float]:
        """The 95 % interval of the step time: between rounds, or between steps of the only one."""
        ran = self.rounds[0].wall_ms
        return median_interval(ran) if self._ran else mean_interval(self.round_ms)

    @property
    def half_width(self) -> float:
        """Half of the interval over the step time."""
        low, high = self.interval_ms
        return (high - low) / 2 / self.step_ms

    @property
    def _ran(self) -> bool:
        return not self.in_turns and len(self.rounds) == 1

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
        return np.asarray(np.median([each.exchange_ms for each in self.rounds], axis=0))

    @property
    def launch_ms(self) -> float:
        """Median time in which the host launches a step, which takes at least as long in training;
        0 where nothing is launched ahead of the device, or where steps include it as they ran.
        """
        return statistics.median(each.launch_ms for each in self.rounds)

    @property
    def losses(self) -> Sequence[float]:
        """Mean loss of all samples in each step of the last round."""
        return self.rounds[-1].losses

    @property
    def disturbed(self) -> float:
        """Mean share of cores' time that other processes took."""
        return fmean(each.disturbed for each in self.rounds)

    @property
    def slowest(self) -> int:
        """The rank that computes longest, for which the others wait."""
        return int(self.phases_ms.sum(1).argmax())

    def table(self, title: str) -> Table:
        """Returns the report with a row for each rank, for rich's console."""
        low, high = self.interval_ms
        how = f"median of {len(self.losses)}" if self._ran else f"mean of {len(self.rounds)} rounds"
        how += ", composed of ranks that took turns" if self.in_turns else ""
        report = Table(
            title=f"{title}: {self.step_ms:.2f} ms a step ({how}; 95 % interval {low:.2f} to "
            f"{high:.2f})",
            title_justify="left",
            caption="medians in ms of what a rank computes; waits: for others and for what they "
            "send; bold: the rank that computes longest; MB: of tables and a batch, by the plan; "
            "peak MB: of the process"
            + (f"; the host launches a step in {self.launch_ms:.2f} ms" * bool(self.launch_ms)),
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
            report.add_row(
                f"{number} {name}",
                "-" if rank.tables is None else str(rank.tables),
                _megabytes(rank.planned_bytes),
                _megabytes(rank.peak_bytes),
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
                "step_ms": self.step_ms,
                "interval_ms": list(self.interval_ms),
                "in_turns": self.in_turns,
                "launch_ms": self.launch_ms,
                "rounds_ms": self.round_ms,
                "slowest_rank": self.slowest,
                "losses": list(self.losses),
                "disturbed": self.disturbed,
                "phases": list(PHASES),
                "ranks": [
                    asdict(rank) | {"phases_ms": phases.tolist(), "waits_ms": waits.tolist()}
                    for rank, phases, waits in times
                ],
            }
        )


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.0f}"
