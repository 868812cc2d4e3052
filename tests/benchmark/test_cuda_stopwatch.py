"""What the stopwatch of a GPU reads, against what kernels of a simulated stream took."""

import math

import pytest
from simulated_stream import L2_BYTES, SimulatedOperator, SimulatedStream

from autoshard.benchmark import TimingOptions
from autoshard.benchmark.backends.cuda_stopwatch import CudaStopwatch
from autoshard.benchmark.operator.timing import time_interleaved

FLUSH_BYTES = 2 * L2_BYTES
OPTIONS = TimingOptions(precision=0.01, max_iterations=30)


@pytest.mark.parametrize("launch_ms", [0.002, 0.01, 0.05, 0.3])
@pytest.mark.parametrize("python_ms", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("forward_ms", [0.004, 0.05, 0.4, 5.0])
def test_what_is_read_is_kernel_time_at_any_cost_of_launches(
    launch_ms: float, python_ms: float, forward_ms: float
) -> None:
    stream = SimulatedStream(launch_ms)
    watch = CudaStopwatch(stream, FLUSH_BYTES)
    operator = SimulatedOperator(stream, forward_ms, python_ms=python_ms)
    (found,) = time_interleaved([operator.timed], watch, [OPTIONS])
    assert found.forward_ms == pytest.approx(operator.forward_ms, rel=0.02)
    assert found.backward_ms == pytest.approx(operator.backward_ms, rel=0.02)
    assert found.disturbed == 0


def test_without_a_flush_the_cache_is_left_as_it_is() -> None:
    stream = SimulatedStream()
    watch = CudaStopwatch(stream, 0)
    operator = SimulatedOperator(stream, 0.5)
    (found,) = time_interleaved([operator.timed], watch, [OPTIONS])
    assert found.forward_ms == pytest.approx(0.6 * 0.5, rel=0.02)


def test_clocks_that_ramp_and_throttle_are_seen_and_taken_out() -> None:
    """The reference is slowed like the operator: a cost is that of the full clock."""

    def clock(ms: float) -> float:
        ramp = 0.5 + 0.5 * min(1.0, ms / 5)
        return ramp * (0.7 if ms % 40 > 15 else 1.0)

    stream = SimulatedStream(clock=clock)
    reference = SimulatedOperator(stream, 0.3)
    watch = CudaStopwatch(stream, FLUSH_BYTES, [reference.timed])
    operator = SimulatedOperator(stream, 2.0)
    (found,) = time_interleaved([operator.timed], watch, [OPTIONS])
    assert found.reference_level is not None
    assert found.reference_level.forward_ms == pytest.approx(0.3, rel=0.03)
    assert found.forward_ms == pytest.approx(2.0, rel=0.03)
    assert found.disturbed > 0  # flushes are slow, too

    bare = CudaStopwatch(SimulatedStream(clock=lambda _: 0.7), FLUSH_BYTES)
    slow = SimulatedOperator(bare._runtime, 2.0)
    assert bare.iteration(slow.timed).forward_ms == pytest.approx(2.0 / 0.7, rel=0.02)


def test_another_process_on_the_gpu_is_a_disturbance() -> None:
    stream = SimulatedStream(contended=60.0)
    watch = CudaStopwatch(stream, FLUSH_BYTES)
    operator = SimulatedOperator(stream, 1.0)
    found = [watch.iteration(operator.timed).disturbed for _ in range(25)]
    assert not any(found[:10])
    assert all(found[-5:])


def test_no_memory_is_asked_for_in_a_counted_iteration() -> None:
    stream = SimulatedStream()
    watch = CudaStopwatch(stream, FLUSH_BYTES)
    operators = [SimulatedOperator(stream, 0.5, output_bytes=2**n) for n in (20, 24, 22)]
    found = time_interleaved([each.timed for each in operators], watch, [OPTIONS] * 3)
    assert stream.mallocs > 0
    assert {run for each in operators for run in each.mallocs_in} == {0}  # which warms up
    assert [each.forward_ms for each in found] == pytest.approx([0.5] * 3, rel=0.02)


def test_an_operator_that_waits_for_the_gpu_is_reported() -> None:
    """Its launches cannot be ahead of the GPU, so what is read is not kernel time alone."""
    stream = SimulatedStream(launch_ms=0.05)
    watch = CudaStopwatch(stream, FLUSH_BYTES)
    operator = SimulatedOperator(stream, 0.1, waits=True)
    assert watch.iteration(operator.timed).disturbed
    assert math.isfinite(stream.host_ms)
