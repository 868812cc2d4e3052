"""What a rank does in a training step, and how long a step of all ranks takes together.

A trace is what a rank computes between its exchanges. All ranks exchange in the same order, so a
step of all ranks follows from their traces and from the network: nobody gets further than the
slowest whose data is needed. That holds for a plain loop and for pipelines alike, because a trace
keeps where a rank sends and where it waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autoshard.workload.arrays import Floats
from autoshard.workload.tasks.links import AnyLink, Collective

# What a rank computes, in the order of a step. Waiting for others is not part of it.
PHASES = ("input", "forward", "outputs", "dense", "gradients", "backward", "reduce")
INPUT, FORWARD, OUTPUTS, DENSE, GRADIENTS, BACKWARD, REDUCE = range(len(PHASES))
_MS = 1e3
_SAME_MS = 1e-6


class Event(NamedTuple):
    """A point of a step at which a rank sends, or waits for what others send.

    Args:
        collective: Number of the collective in the step; below 0 if it began in the step before.
        moved_bytes: What this rank sends to others or receives from them, the larger of both; None
            where it waits.
        phase: The phase, as an index into PHASES.
        over: What kind of collective it is, as links price it.
    """

    collective: int
    moved_bytes: int | None
    phase: int
    over: Collective = "all_to_all"


@dataclass(frozen=True)
class Trace:
    """A step of one rank.

    Args:
        events: In order. All ranks have the same, but for bytes and phases.
        compute_ms: Milliseconds of computing before each event and after the last,
            [events + 1, PHASES].
    """

    events: tuple[Event, ...]
    compute_ms: Floats

    @property
    def phases_ms(self) -> Floats:
        """Computing of each phase, [PHASES]."""
        return np.asarray(self.compute_ms.sum(0))

    @property
    def passes_ms(self) -> Floats:
        """Time of what depends on the rank's tables, and of what is the same on all ranks: [4].

        Forward: from the arrival of lookups until outputs can be sent. Backward: from the arrival
        of gradients until weights are updated. Input: until lookups are sent. The rest, without the
        dense part.
        """
        found, part = np.zeros(4), 2
        parts = {INPUT: 0, GRADIENTS: 1}
        for number, span in enumerate(self.compute_ms):
            found[part] += span.sum() - span[DENSE]
            if number < len(self.events) and self.events[number].moved_bytes is None:
                part = parts.get(self.events[number].phase, 3)
        return found

    def scaled(self, factor: float) -> "Trace":
        """Returns the step with all computing longer or shorter by a factor."""
        return Trace(self.events, self.compute_ms * factor)

    def to_json(self) -> dict[str, Any]:
        """Returns the trace as a JSON object."""
        compute = [[round(ms, 4) for ms in span] for span in self.compute_ms.tolist()]
        return {"events": [list(event) for event in self.events], "compute_ms": compute}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Trace":
        """Returns the trace that `to_json` wrote."""
        events = tuple(Event(*event) for event in document["events"])
        return Trace(events, np.array(document["compute_ms"]))


def typical(traces: Sequence[Trace]) -> Trace:
    """Returns the median of what a rank computes in several steps, and moves on average.

    A rank's disturbed moments are left out, each by itself: in the slowest rank of each step they
    would add up.
    """
    # In its first steps, DistributedDataParallel arranges gradients, and exchanges more.
    traces = [trace for trace in traces if len(trace.events) == len(traces[-1].events)]
    every = zip(*(trace.events for trace in traces), strict=True)
    events = (
        some[0]
        if some[0].moved_bytes is None
        else some[0]._replace(moved_bytes=round(np.mean([event.moved_bytes for event in some])))
        for some in every
    )
    return Trace(tuple(events), np.median([trace.compute_ms for trace in traces], axis=0))


def mean_of(traces: Sequence[Trace]) -> Trace:
    """Returns the mean of what a rank computes in several rounds; all have the same events."""
    return Trace(traces[0].events, np.mean([trace.compute_ms for trace in traces], axis=0))


@dataclass(frozen=True)
class TracedStep:
    """A step of one rank as it ran.

    Args:
        trace: What it computed.
        wall_ms: Until it was done, waiting included.
        exchange_ms: Its share of exchanging and waiting, by phase, [PHASES].
        disturbed: Share of the operators' time in which other processes had the core.
        launch_ms: Time that launching it took the host, where ranks take turns on a GPU; else 0.
    """

    trace: Trace
    wall_ms: float
    exchange_ms: tuple[float, ...]
    disturbed: float
    launch_ms: float = 0.0


@dataclass(frozen=True)
class ComposedStep:
    """A step of all ranks, put together from their traces.

    Args:
        step_ms: Until the last rank is done.
        waiting_ms: What each rank waits in each phase, [ranks, PHASES].
    """

    step_ms: float
    waiting_ms: Floats


def compose(
    traces: Sequence[Trace], link: AnyLink | None = None, dense_ms: float | None = None
) -> ComposedStep:
    """Returns a step of ranks that all compute at the same time.

    Args:
        traces: Trace of each rank.
        link: Network between ranks; without one, exchanges take no time.
        dense_ms: Replaces what the dense part of the model takes.
    """
    events = [trace.events for trace in traces]
    if any(len(some) != len(events[0]) for some in events):
        raise ValueError("ranks of one step do not exchange equally often")
    compute = np.stack([trace.compute_ms for trace in traces])  # [ranks, events + 1, PHASES]
    if dense_ms is not None:
        whole = compute[..., DENSE].sum(1, keepdims=True)
        compute = compute.copy()
        compute[..., DENSE] *= dense_ms / np.maximum(whole, np.finfo(float).tiny)
    spans = compute.sum(2)
    done: dict[int, float] = {}  # when collectives are done that began in the step before
    while True:
        now, free = np.zeros(len(traces)), 0.0  # the network has moved all that was sent before
        waiting = np.zeros((len(traces), len(PHASES)))
        before, done, issued = done, {}, 0
        for number, every in enumerate(zip(*events, strict=True)):
            now = now + spans[:, number]
            collective = every[0].collective
            if every[0].moved_bytes is not None:
                took = _ms_of(every, link)
                done[collective] = free = max(float(now.max()), free) + took
                issued += 1
            else:
                there = done[collective] if collective >= 0 else before.get(collective, 0.0)
                later = np.maximum(now, there)
                waiting[:, every[0].phase] += later - now
                now = later
        step_ms = float((now + spans[:, -1]).max())
        done = {number - issued: max(0.0, at - step_ms) for number, at in done.items()}
        if all(abs(at - before.get(number, 0.0)) < _SAME_MS for number, at in done.items()):
            return ComposedStep(step_ms, waiting)


def _ms_of(events: Sequence[Event], link: AnyLink | None) -> float:
    """Returns the milliseconds of a collective: the rank that moves most takes longest."""
    moved_bytes = max(event.moved_bytes or 0 for event in events)
    if link is None or not moved_bytes:
        return 0.0
    over = link.of(events[0].over, len(events))
    return _MS * (over.latency_s + moved_bytes / over.bytes_s)
