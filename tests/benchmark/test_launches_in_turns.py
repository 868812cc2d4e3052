"""Phase times of ranks that take turns on a simulated GPU, beside the times of its kernels."""

import pytest
from simulated_stream import SimulatedStream

from autoshard.benchmark.backends.cuda_stopwatch import CudaStopwatch
from autoshard.benchmark.rehearsals.trace import BACKWARD, FORWARD, TracedStep
from autoshard.integration.rehearsal.phases import Phases


class Rank:
    """A rank whose steps have a forward pass, an exchange, and a backward pass.

    Args:
        python_ms: What the host takes beside launches in a pass.
        waits: Whether the host waits for the GPU at the end of the forward pass.
    """

    def __init__(self, python_ms: float, holds: bool = True, waits: bool = False) -> None:
        self.stream = SimulatedStream()
        self.phases = Phases(CudaStopwatch(self.stream, 0), holds)
        self._python_ms, self._waits = python_ms, waits

    def step(self) -> TracedStep:
        self.phases.start()
        self._compute(FORWARD, 1.0, self._waits)
        self.phases.leave()
        number = self.phases.issue(1, "all_to_all")
        self._wait()  # what is sent goes to the host
        self.phases.resume()
        self.phases.leave()
        self._wait()
        self.stream.host_ms += 20.0  # turns of others
        self.phases.resume(number)
        self._compute(BACKWARD, 2.0)
        return self.phases.stop()()

    def _compute(self, phase: int, kernels_ms: float, waits: bool = False) -> None:
        self.phases.begin(phase)
        for _ in range(4):
            self.stream.host_ms += self._python_ms / 4
            self.stream.launch(kernels_ms / 4)
        if waits:
            self._wait()
            self.stream.launch(0.1)

    def _wait(self) -> None:
        self.stream.host_ms = max(self.stream.host_ms, self.stream.free_at_ms)


@pytest.fixture(autouse=True)
def host_clock(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """The host's clock is that of the one rank in the list."""
    ranks = list[Rank]()
    clock = "autoshard.integration.rehearsal.phases.time.perf_counter"
    monkeypatch.setattr(clock, lambda: ranks[0].stream.host_ms / 1e3)
    return ranks


@pytest.mark.parametrize("python_ms", [0.1, 1.0, 6.0])
def test_phases_are_kernel_time_whatever_launches_take(
    python_ms: float, host_clock: list[Rank]
) -> None:
    rank = Rank(python_ms)
    host_clock.append(rank)
    *_, step = [rank.step() for _ in range(4)]
    found = step.trace.phases_ms
    assert (found[FORWARD], found[BACKWARD]) == pytest.approx((1.0, 2.0), rel=0.02)
    assert step.launch_ms == pytest.approx(2 * python_ms, rel=0.05, abs=0.1)
    bare = Rank(python_ms, holds=False).step()
    assert bare.launch_ms == 0
    assert bare.trace.phases_ms[FORWARD] >= python_ms


def test_where_the_host_waits_for_the_gpu_the_rest_counts_with_its_launches(
    host_clock: list[Rank],
) -> None:
    """No wait of the GPU is long enough, so none is longer than some."""
    rank = Rank(0.5, waits=True)
    host_clock.append(rank)
    *_, before, step = [rank.step() for _ in range(8)]
    found = step.trace.phases_ms
    assert found[FORWARD] == pytest.approx(1.0 + 0.1, rel=0.05)
    assert step.launch_ms == pytest.approx(found[FORWARD] + 0.5, rel=0.1)
    assert step.wall_ms == pytest.approx(before.wall_ms)
    assert step.wall_ms < 60
