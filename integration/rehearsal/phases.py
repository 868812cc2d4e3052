"""Traces the steps of a rank, by hooks on the sharded model and by its process group.

Each phase lasts until the next begins. Tracing adds only reads of the clock.

In training, the host launches what a GPU computes long before. Where ranks take turns on one, each
exchange finds it idle, and what follows would be timed with its launches. So the GPU waits after
each exchange while the host launches the span up to the next one. Where it did not wait long
enough, it waits longer in the steps that follow; where the host itself waits for the GPU in a span,
no wait is long enough, and the launches after it count, as they do in training. How long the host
takes is kept beside: a step takes no less, and where it takes longer than the GPU, it decides.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from autoshard.benchmark.backends.base import Stopwatch
from autoshard.benchmark.operator import fbgemm
from autoshard.benchmark.rehearsals import trace
from autoshard.benchmark.rehearsals.trace import PHASES, Event, Trace, TracedStep
from autoshard.integration import HotCold
from autoshard.workload.tasks.links import Collective

_OUTSIDE = -1  # exchanging, or waiting for it
_LONGER, _LONGEST = 4, 16  # waits of the GPU over the usual one: found in two steps, and 9 ms


class Phases:
    """Traces steps. It is the recorder of the rank's process group (`RecordedGroup`).

    Args:
        watch: Stopwatch of the rank's device.
        holds: Whether the device waits after exchanges until what follows is launched.
    """

    def __init__(self, watch: Stopwatch, holds: bool = False) -> None:
        self._watch, self.holds = watch, holds
        self._times: dict[int, int] = {}  # how much longer it waits, by events before
        self._span = (0, 0.0)  # mark that begins what is being launched, and when that was
        self._launches: list[_Launch] = []
        self._running = False
        self._phase = trace.DENSE
        self._issued = self._issued_before = 0  # collectives in all steps, and before this one
        self._marks: list[Any] = []
        self._begun: list[tuple[int, int, int]] = []  # at each mark: part, events so far, phase
        self._events: list[Event] = []

    def observe(self, model: nn.Module) -> None:
        """Hooks into a sharded model with layers `bottom` and `in_order` as `RehearsedModel`."""
        self._times = {}
        ops = fbgemm.training_ops()
        operators = (
            ops.SplitTableBatchedEmbeddingBagsCodegen,
            ops.DenseTableBatchedEmbeddingBagsCodegen,
        )
        for module in model.modules():
            if isinstance(module, HotCold):  # tells hot from cold rows before
                module.register_forward_pre_hook(self._beginning(trace.INPUT))
            if isinstance(module, ShardedEmbeddingBagCollection):
                module.register_forward_pre_hook(self._beginning(trace.INPUT))
                for lookup in module._lookups:
                    lookup.register_forward_pre_hook(self._beginning(trace.FORWARD))
                    lookup.register_forward_hook(self._beginning(trace.OUTPUTS))
                    for part in lookup.modules():
                        if isinstance(part, operators):
                            part.register_forward_hook(self._watch_operator)
        model.get_submodule("in_order").register_forward_hook(self._watch_outputs)
        model.get_submodule("bottom").register_forward_hook(self._watch_bottom)

    def start(self) -> None:
        """Begins a step."""
        self._marks, self._begun, self._events, self._launches = [], [], [], []
        self._issued_before = self._issued
        self._running = True
        self._hold()
        self.begin(trace.DENSE)

    def stop(self) -> Callable[[], TracedStep]:
        """Ends a step; what is returned reads it, for which it waits until the device is done."""
        self._note_launches()
        self.begin(trace.DENSE)
        self._running = False
        return partial(_read, self._watch, self._marks, self._begun, self._events, self._launches)

    def begin(self, phase: int) -> None:
        """Notes that a phase begins."""
        self._phase = phase
        self._mark(phase)

    def leave(self) -> None:
        """Notes that the rank stops computing."""
        self._note_launches()
        self._mark(_OUTSIDE)

    def issue(self, moved_bytes: int, over: Collective) -> int:
        """Notes that a collective begins; returns its number. Those between steps do not count."""
        if not self._running:
            return -1
        number, self._issued = self._issued, self._issued + 1
        event = Event(number - self._issued_before, moved_bytes, self._phase, over)
        self._events.append(event)
        return number

    def resume(self, waited: int | None = None) -> None:
        """Notes that the rank goes on computing, after it waited for a collective."""
        if waited is not None and waited >= 0 and self._running:
            self._events.append(Event(waited - self._issued_before, None, self._phase))
        self._hold()
        self._mark(self._phase)

    def _hold(self) -> None:
        """Has the device wait for launches, which begin now."""
        if self.holds and self._running:
            self._watch.hold(self._times.get(len(self._events), 1))
            self._span = len(self._marks), time.perf_counter()

    def _note_launches(self) -> None:
        """Notes how long launches since `_hold` took the host, and whether the device waited."""
        if not (self.holds and self._running):
            return
        first, began = self._span
        host_ms: float | None = 1e3 * (time.perf_counter() - began)
        if not self._watch.is_ahead(self._marks[first]):
            host_ms, gap = None, len(self._events)
            self._times[gap] = min(_LONGER * self._times.get(gap, 1), _LONGEST)
        self._launches.append(_Launch(first, len(self._marks), host_ms))

    def _mark(self, part: int) -> None:
        if self._running:
            self._marks.append(self._watch.mark())
            self._begun.append((part, len(self._events), self._phase))

    def _beginning(self, phase: int) -> Callable[..., None]:
        return lambda *_: self.begin(phase)

    def _watch_operator(self, _: nn.Module, __: Any, output: Tensor) -> None:
        """Hooks into the backward pass of a fused operator, which updates its weights."""
        node = output.grad_fn
        if node is not None:
            node.register_prehook(self._beginning(trace.BACKWARD))
            node.register_hook(self._beginning(trace.GRADIENTS))

    def _watch_outputs(self, _: nn.Module, __: Any, output: Tensor) -> None:
        """Notes that embeddings are in order, and hooks into their gradient."""
        self.begin(trace.DENSE)
        output.register_hook(self._beginning(trace.GRADIENTS))  # type: ignore[no-untyped-call]

    def _watch_bottom(self, _: nn.Module, __: Any, output: Any) -> None:
        """Hooks into the gradient of the first layer, with which the backward pass ends."""
        output.register_hook(self._beginning(trace.REDUCE))


class _Launch(NamedTuple):
    """A span between exchanges: its first and last mark, and the host's ms if they were ahead."""

    first: int
    last: int
    host_ms: float | None


def _read(
    watch: Stopwatch,
    marks: Sequence[Any],
    begun: Sequence[tuple[int, int, int]],
    events: Sequence[Event],
    launches: Sequence[_Launch],
) -> TracedStep:
    """Returns a step from its marks, and what began at each: part, events so far, phase."""
    compute = np.zeros((len(events) + 1, len(PHASES)))
    exchange, ran, had = [0.0] * len(PHASES), 0.0, 0.0
    passed = watch.between(marks)
    for (part, gap, phase), (wall_ms, own_ms) in zip(begun, passed, strict=False):
        if part == _OUTSIDE:
            exchange[phase] += wall_ms
            continue
        compute[gap, part] += own_ms
        if part in (trace.FORWARD, trace.BACKWARD):
            ran, had = ran + wall_ms, had + own_ms
    return TracedStep(
        Trace(tuple(events), compute),
        sum(wall_ms for wall_ms, _ in passed),
        tuple(exchange),
        max(0.0, 1 - had / ran) if ran else 0.0,
        # Where launches were not ahead, they are in the time of the device.
        sum(
            sum(ms for ms, _ in passed[first:last]) if host_ms is None else host_ms
            for first, last, host_ms in launches
        ),
    )
