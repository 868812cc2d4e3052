"""A GPU's stream in numbers: launches, a queue, kernels, an L2 cache, clocks and an allocator.

It stands in for `CudaRuntime`. The host and the GPU have clocks of their own, which only launches,
kernels and waiting advance, so what a stopwatch reads can be held against what kernels took.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from autoshard.benchmark.backends.base import TimedOperator

L2_BYTES = 50 * 2**20
_HZ = 1.7e9  # at full clock
_BYTES_MS = 3e9  # of HBM
_EVENT_MS = 0.002  # what recording one takes the host
_MALLOC_MS = 1.0  # cudaMalloc: host and GPU wait for each other


class SimulatedStream:
    """An H100's stream.

    Args:
        launch_ms: What a launch takes the host.
        clock: Share of the full clock at a time of the GPU in ms; 1.0 if it never changes.
        contended: Time of the GPU in ms after which another process takes half of it.
    """

    def __init__(
        self,
        launch_ms: float = 0.005,
        clock: Callable[[float], float] = lambda _: 1.0,
        contended: float = float("inf"),
    ) -> None:
        self.launch_ms, self.clock, self.contended = launch_ms, clock, contended
        self.host_ms = 0.0
        self.free_at_ms = 0.0  # when the last kernel ends
        self.cached: object = None  # whose rows are in the L2 cache
        self.pool_bytes = 0  # that the allocator holds and nobody uses
        self.mallocs = 0  # how often it asked the driver
        self.cuda = SimpleNamespace(Event=lambda enable_timing: _Event(self))

    def launch(self, kernel_ms: float) -> None:
        """Queues a kernel that takes so long at full clock."""
        self.host_ms += self.launch_ms
        start = max(self.host_ms, self.free_at_ms)
        share = self.clock(start) / (2 if start >= self.contended else 1)
        self.free_at_ms = start + kernel_ms / share

    def allocate(self, size: int) -> None:
        """Takes memory from the allocator, which asks the driver if it has too little."""
        if size > self.pool_bytes:
            self.host_ms = self.free_at_ms = max(self.host_ms, self.free_at_ms) + _MALLOC_MS
            self.mallocs += 1
            self.pool_bytes = size
        self.pool_bytes -= size

    def release(self, size: int) -> None:
        """Gives memory back to the allocator."""
        self.pool_bytes += size

    # What `CudaRuntime` has.

    @property
    def nvml(self) -> "SimulatedStream":
        return self

    def buffer(self, size: int) -> Any:
        return SimpleNamespace(zero_=lambda: self._overwrite(size))

    def wait(self, cycles: int) -> None:
        self.launch(1e3 * cycles / _HZ)

    def processes(self) -> set[int]:
        return {os.getpid()}

    def _overwrite(self, size: int) -> None:
        self.launch(size / _BYTES_MS)
        if size >= L2_BYTES:
            self.cached = None


class _Event:
    def __init__(self, stream: SimulatedStream) -> None:
        self._stream = stream
        self.at_ms = float("nan")

    def record(self) -> None:
        self._stream.host_ms += _EVENT_MS
        self.at_ms = max(self._stream.host_ms, self._stream.free_at_ms)

    def query(self) -> bool:
        return self.at_ms <= self._stream.host_ms

    def synchronize(self) -> None:
        self._stream.host_ms = max(self._stream.host_ms, self.at_ms)

    def elapsed_time(self, after: "_Event") -> float:
        assert after.query()  # else it would be asked before the GPU is there
        return after.at_ms - self.at_ms


class SimulatedOperator:
    """An operator of several kernels a pass, which is faster if its rows are cached.

    Args:
        stream: The GPU.
        forward_ms: Its forward pass with an empty cache, at full clock.
        kernels: Kernels of a pass.
        python_ms: What the host takes beside launches in a pass.
        output_bytes: Of its output.
        waits: Whether the forward pass waits for the GPU, as an operator that reads a result does.
    """

    def __init__(
        self,
        stream: SimulatedStream,
        forward_ms: float,
        kernels: int = 4,
        python_ms: float = 0.15,
        output_bytes: int = 2**24,
        waits: bool = False,
    ) -> None:
        self.forward_ms, self.backward_ms = forward_ms, 2 * forward_ms
        self._stream, self._kernels, self._python_ms = stream, kernels, python_ms
        self._output_bytes, self._waits = output_bytes, waits
        self.runs = 0
        self.mallocs_in: list[int] = []  # runs in which the driver was asked for memory

    @property
    def timed(self) -> TimedOperator:
        """What a stopwatch runs."""
        return TimedOperator(self._forward, None)  # type: ignore[arg-type]

    def _forward(self) -> Any:
        mallocs = self._stream.mallocs
        self._stream.allocate(self._output_bytes)
        if self._stream.mallocs > mallocs:
            self.mallocs_in.append(self.runs)
        self.runs += 1
        if self._waits:
            self._stream.host_ms = max(self._stream.host_ms, self._stream.free_at_ms)
        self._run(self.forward_ms)
        return SimpleNamespace(backward=lambda gradient: self._backward())

    def _backward(self) -> None:
        self._run(self.backward_ms)
        self._stream.release(self._output_bytes)

    def _run(self, kernel_ms: float) -> None:
        stream = self._stream
        share = 0.6 if stream.cached is self else 1.0
        stream.host_ms += self._python_ms
        for _ in range(self._kernels):
            stream.launch(share * kernel_ms / self._kernels)
        stream.cached = self
