"""Times operators on a GPU by events in its stream.

Launching an operator takes the host some 300 us, more than many operators take the GPU. Were the
queue empty, events would read the host's launches. So each iteration begins with a kernel that only
waits, and everything else is launched meanwhile; if the wait ends too early, the iteration is
repeated with a longer one.
"""

import itertools
import os
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from autoshard.benchmark.backends.base import Iteration, Stopwatch, TimedOperator
from autoshard.benchmark.statistics import uncontended_level

if TYPE_CHECKING:
    from autoshard.benchmark.backends.cuda import CudaRuntime

_SLOW_FLUSH = 1.3  # times the uncontended time of a flush
_FLUSHES = 300  # latest ones, for the uncontended time
_FIRST_WAIT = 2**20  # clock cycles: about half a millisecond
_MAX_WAIT = 2**28  # about 0.15 s
_TRIES = 8  # of an iteration: launches differ, and waits double


class CudaStopwatch(Stopwatch):
    """Times with CUDA events, so that launches and queues are excluded.

    The L2 cache is flushed before the forward and before the backward pass: in training, other
    kernels run in between. A flush is always the same work, so where it takes longer than usual,
    another process is on the GPU.

    Args:
        runtime: The GPU, whose current stream is timed.
        flush_bytes: Bytes to write to flush its cache; 0 to leave it alone.
        references: Operators to run beside iterations, in turn.
        own: What NVML calls this process: in a container it has another number there.
    """

    def __init__(
        self,
        runtime: "CudaRuntime",
        flush_bytes: int,
        references: Sequence[TimedOperator] = (),
        own: Collection[int] = (),
    ) -> None:
        super().__init__()
        self._runtime = runtime
        self._flush = runtime.buffer(flush_bytes) if flush_bytes else None
        self._flushes_ms: deque[float] = deque(maxlen=_FLUSHES)
        self._references = itertools.cycle(references)
        self._wait_cycles = _FIRST_WAIT
        self._own = {os.getpid(), *own}

    def iteration(self, subject: TimedOperator) -> Iteration:
        """Times one forward and backward pass.

        It is disturbed if a flush was slow, or if the GPU had to wait for the host, which happens
        where an operator waits for the GPU itself.
        """
        for _ in range(_TRIES):
            found, is_ahead = self._iteration(subject)
            if is_ahead:
                return found
            self._wait_cycles = min(2 * self._wait_cycles, _MAX_WAIT)
        return replace(found, disturbed=True)

    def _iteration(self, subject: TimedOperator) -> tuple[Iteration, bool]:
        """Times one iteration; returns also whether its launches were ahead of the GPU."""
        self.hold()
        marks = [self.mark()]
        self._clear()
        marks.append(self.mark())
        output = subject.forward()
        marks.append(self.mark())
        self._clear()
        marks.append(self.mark())
        output.backward(subject.gradient)
        marks.append(self.mark())
        is_ahead = self.is_ahead(marks[0])
        (before_ms, _), (forward_ms, _), (between_ms, _), (backward_ms, _) = self.between(marks)
        slow = [self._is_slow(flush_ms) for flush_ms in (before_ms, between_ms)]
        found = Iteration(forward_ms, backward_ms, forward_ms + backward_ms, any(slow))
        return found, is_ahead

    def reference(self) -> Iteration | None:
        """Times the next reference, which shows clocks and throttling."""
        following = next(self._references, None)
        return None if following is None else self.iteration(following)

    def foreign_load(self) -> float:
        """Returns 1.0 if another process is on the GPU (NVML does not say how much), else 0.0."""
        return 1.0 if self._runtime.nvml.processes() - self._own else 0.0

    def clear_cache(self, max_ms: float) -> bool:  # noqa: ARG002 - it takes no time that counts
        """Flushes the L2 cache for what is no iteration."""
        self._clear()
        return True

    def hold(self, times: int = 1) -> None:
        """Launches a kernel that waits, while what follows is launched."""
        self._runtime.wait(min(times * self._wait_cycles, _MAX_WAIT))

    def is_ahead(self, mark: Any) -> bool:
        """Returns whether the GPU has yet to reach a mark."""
        return not mark.query()

    def mark(self) -> Any:
        """Returns an event in the current stream."""
        event = self._runtime.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks: Sequence[Any]) -> list[tuple[float, float]]:
        """Returns ms from each mark to the next, all of them ours; waits for the last."""
        marks[-1].synchronize()
        found = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return [(milliseconds, milliseconds) for milliseconds in found]

    def _clear(self) -> None:
        if self._flush is not None:
            self._flush.zero_()

    def _is_slow(self, flush_ms: float) -> bool:
        if self._flush is None:
            return False
        self._flushes_ms.append(flush_ms)
        return flush_ms > _SLOW_FLUSH * uncontended_level(self._flushes_ms)
