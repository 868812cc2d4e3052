import dataclasses
import itertools
import math
import multiprocessing
import os
import random
import statistics
from collections.abc import Iterator, Sequence

import pytest
import torch

from autoshard.benchmark.backends import backend_of
from autoshard.benchmark.backends.base import (
    DeviceBackend,
    Iteration,
    Place,
    Stopwatch,
    TimedOperator,
)
from autoshard.benchmark.backends.cpu import CpuBackend, CpuStopwatch
from autoshard.benchmark.machine.clearing import Clearing
from autoshard.benchmark.machine.hardware import last_level_cache_bytes, physical_cores
from autoshard.benchmark.measurement import (
    MeasureSettings,
    ReferenceLevel,
    ShardFault,
    Timing,
    TimingOptions,
)
from autoshard.benchmark.operator.embedding_op import EmbeddingOp, build_module
from autoshard.benchmark.operator.reference import reference_operators
from autoshard.benchmark.operator.repeats import own_error
from autoshard.benchmark.operator.timing import time_interleaved
from autoshard.benchmark.statistics import UNKNOWN, median_spread, standard_error, uncontended_level
from autoshard.workload import EmbeddingTable, OperatorOptions, Piece, Shard

SETTINGS = MeasureSettings(256)


@pytest.fixture
def backend(device_kind: str) -> DeviceBackend:
    return backend_of(device_kind)


@pytest.fixture
def device(backend: DeviceBackend) -> torch.device:
    return backend.device


@pytest.fixture
def core() -> Iterator[int]:
    """This thread pinned to a core, as the actor on it would be."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    chosen = physical_cores()[-1]
    os.sched_setaffinity(0, {chosen})
    torch.set_num_threads(1)
    yield chosen
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)


@pytest.fixture
def bound(backend: DeviceBackend, core: int) -> DeviceBackend:
    """To a device of this machine."""
    backend.bind(Place(backend.kind, "here", core, "", "here", 2**30))
    return backend


@pytest.fixture
def watch(bound: DeviceBackend) -> Stopwatch:
    return bound.stopwatch()


def shard(tables: tuple[EmbeddingTable, ...], count: int = 4) -> Shard:
    return Shard.of_tables(tables[:count])


def subject_of(op: EmbeddingOp) -> TimedOperator:
    return TimedOperator(op.forward, op.gradient)


def time_operator(operator: TimedOperator, watch: Stopwatch, options: TimingOptions) -> Timing:
    (timing,) = time_interleaved([operator], watch, [options])
    return timing


def test_the_operator_pools_the_rows_of_its_batch(
    tables: tuple[EmbeddingTable, ...], backend: DeviceBackend
) -> None:
    """Against plain torch: forward sums the looked-up rows, backward updates exactly those."""
    pieces = (tables[0].whole(), Piece(tables[1], 0, 8), Piece(tables[1], 8, 8))
    op = EmbeddingOp(Shard(pieces), MeasureSettings(32, OperatorOptions("fp32", "sgd")), backend)
    (part,) = op.parts
    torch.manual_seed(0)
    weights = part.module.split_embedding_weights()
    for weight in weights:
        weight.data.normal_()
    before = [weight.clone() for weight in weights]
    output = op.forward()
    columns = 0
    for number, table in enumerate(before):
        first, last = (int(part.offsets[32 * place]) for place in (number, number + 1))
        own = part.indices[first:last]
        starts = part.offsets[32 * number : 32 * number + 32] - first
        expected = torch.nn.functional.embedding_bag(own, table, starts, mode="sum")
        found = output[:, columns : columns + table.shape[1]]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        columns += table.shape[1]
    output.backward(op.gradient)
    for number, (old, new) in enumerate(
        zip(before, part.module.split_embedding_weights(), strict=True)
    ):
        first, last = (int(part.offsets[32 * place]) for place in (number, number + 1))
        uses = torch.bincount(part.indices[first:last], minlength=len(old))
        torch.testing.assert_close(new, old - 0.01 * uses[:, None].float(), rtol=1e-4, atol=1e-4)


def test_each_feature_of_a_table_has_its_own_output(
    tables: tuple[EmbeddingTable, ...], backend: DeviceBackend
) -> None:
    """Against plain torch: three features look rows up in one table, with weights."""
    table = dataclasses.replace(tables[0], features=3, weighted=True)
    op = EmbeddingOp(Shard.of_tables([table]), MeasureSettings(32), backend)
    (part,) = op.parts
    (weights,) = part.module.split_embedding_weights()
    weights.data.normal_()
    indices, offsets = part.indices, part.offsets
    expected = torch.nn.functional.embedding_bag(indices, weights, offsets[:-1], mode="sum")
    assert len(offsets) == 3 * 32 + 1
    output = op.forward()
    for feature, found in enumerate(output.split(table.dim, dim=1)):
        own = expected[32 * feature : 32 * (feature + 1)]
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
    output.backward(op.gradient)


def test_tables_with_weights_run_in_an_operator_of_their_own(
    tables: tuple[EmbeddingTable, ...], backend: DeviceBackend
) -> None:
    """One with weights beside two without: each kind looks up and learns what it does alone."""
    plain = [dataclasses.replace(table, features=2) for table in tables[:2]]
    weighted = dataclasses.replace(tables[2], weighted=True)
    op = EmbeddingOp(Shard.of_tables([*plain, weighted]), SETTINGS, backend)
    assert op.forward().shape == op.gradient.shape
    alone = [EmbeddingOp(Shard.of_tables(some), SETTINGS, backend) for some in (plain, [weighted])]
    for part, other in zip(op.parts, alone, strict=True):
        (whole,) = other.parts
        assert part.indices.tolist() == whole.indices.tolist()
        assert part.offsets.tolist() == whole.offsets.tolist()
    before = [[w.clone() for w in part.module.split_embedding_weights()] for part in op.parts]
    op.forward().backward(op.gradient)
    for part, old in zip(op.parts, before, strict=True):
        for weight, was in zip(part.module.split_embedding_weights(), old, strict=True):
            assert not torch.equal(weight, was)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_every_operator_runs_and_keeps_the_bytes_it_says(
    tables: tuple[EmbeddingTable, ...], backend: DeviceBackend, weights: str, optimizer: str
) -> None:
    options = OperatorOptions(weights, optimizer)  # type: ignore[arg-type]
    op = EmbeddingOp(shard(tables), MeasureSettings(64, options), backend)
    op.forward().backward(op.gradient)
    (part,) = op.parts
    stored = sum(w.numel() * w.element_size() for w in part.module.split_embedding_weights())
    stored += sum(
        state.numel() * state.element_size()
        for states in part.module.split_optimizer_states()
        for state in states
    )
    parts = options.memory(shard(tables).pieces, SETTINGS.batch_size)
    assert stored == parts.weights + parts.optimizer


def test_a_table_that_is_never_looked_up_runs(backend: DeviceBackend, watch: Stopwatch) -> None:
    op = EmbeddingOp(Shard.of_tables([EmbeddingTable("t", 9, 8, 0.0)]), SETTINGS, backend)
    timing = time_operator(subject_of(op), watch, TimingOptions())
    assert timing.forward_ms > 0


def test_a_measurement_carries_how_well_it_is_known(
    tables: tuple[EmbeddingTable, ...], backend: DeviceBackend, watch: Stopwatch
) -> None:
    op = EmbeddingOp(shard(tables), SETTINGS, backend)
    timing = time_operator(subject_of(op), watch, TimingOptions(precision=0.05))
    assert timing.forward_ms > 0
    assert timing.backward_ms > 0
    assert timing.spread.both <= 0.05 or timing.iterations == 64  # known, or given up on
    assert 9 <= timing.iterations <= 64
    assert timing.error == own_error(timing)
    at_least = (timing.forward_ms + timing.backward_ms) * timing.iterations / 2 / 1e3
    assert timing.operator_seconds > at_least


class Script:
    """A stopwatch that reads out prepared iterations; a subject's `forward` is its name.

    Its clock goes by the wall time of what it reads out.
    """

    def __init__(
        self, iterations: dict[str, Sequence[Iteration]], references: Sequence[Iteration] = ()
    ) -> None:
        self.clearing = Clearing()
        self.order: list[str] = []
        self.seconds = 0.0
        self._left = {name: iter(script) for name, script in iterations.items()}
        self._references = itertools.cycle(references)

    def iteration(self, subject: TimedOperator) -> Iteration:
        self.order.append(str(subject.forward))
        return self._passed(next(self._left[str(subject.forward)]))

    def reference(self) -> Iteration | None:
        found = next(self._references, None)
        if found is not None:
            self.order.append("reference")
            self._passed(found)
        return found

    def clear_cache(self, max_ms: float) -> bool:
        self.order.append("clear")
        return True

    def foreign_load(self) -> float:
        return 0.25

    def now(self) -> float:
        return self.seconds

    def _passed(self, found: Iteration) -> Iteration:
        self.seconds += found.wall_ms / 1e3
        return found


def named(name: str) -> TimedOperator:
    return TimedOperator(name, None)  # type: ignore[arg-type]


def quarter(total: float, disturbed: bool = False) -> Iteration:
    """A quarter of it forward."""
    return Iteration(total / 4, total * 3 / 4, total, disturbed)


def alone(totals: Sequence[float]) -> Script:
    return Script({"s": [quarter(total) for total in totals]})


def test_warming_up_does_not_count() -> None:
    watch = alone([100.0] + [10.0] * 9)
    timing = time_operator(named("s"), watch, TimingOptions())
    assert (timing.forward_ms, timing.backward_ms) == (2.5, 7.5)
    assert (timing.iterations, timing.disturbed, timing.spread) == (9, 0, (0, 0, 0))
    assert timing.foreign_load == 0.25
    assert timing.operator_seconds == pytest.approx(0.19)


def test_disturbed_iterations_count_and_are_reported() -> None:
    """Their clock leaves out what others took."""
    script = [quarter(10.0, disturbed=n % 2 == 0) for n in range(10)]
    timing = time_operator(named("s"), Script({"s": script}), TimingOptions())
    assert (timing.iterations, timing.disturbed, timing.total_ms) == (9, 4, 10.0)


def test_noisy_iterations_are_repeated_until_the_cap() -> None:
    options = TimingOptions(precision=0.02, max_iterations=40)
    assert time_operator(named("s"), alone([10.0, 10.1] * 40), options).iterations == 9
    timing = time_operator(named("s"), alone([10.0, 14.0] * 40), options)
    assert timing.iterations == 40
    assert timing.spread.both > 0.02


def test_what_takes_seconds_is_known_from_a_few() -> None:
    watch = alone([2000.0, 2500.0] * 40)
    timing = time_operator(named("s"), watch, TimingOptions(max_seconds=6.0))
    assert timing.iterations == 2
    assert timing.operator_seconds == pytest.approx(6.5)


def test_iterations_are_interleaved_in_rotating_order() -> None:
    script = [quarter(10.0)] * 10
    names = ["a", "b", "c"]
    watch = Script(dict.fromkeys(names, script), [quarter(2.0)])
    timings = time_interleaved([named(n) for n in names], watch, [TimingOptions()] * 3)
    order = "".join({"reference": "r", "clear": "|"}.get(step, step) for step in watch.order)
    assert order.startswith("abcr|rarbrcr|rbrcrar|rcrarbr|rarbrcr")
    assert [timing.iterations for timing in timings] == [9, 9, 9]
    # What all share is shared out: nothing of the device's time is left.
    assert sum(timing.operator_seconds for timing in timings) == pytest.approx(watch.now())


def test_an_operator_whose_median_is_known_is_left_out() -> None:
    scripts = {"calm": [quarter(10.0)] * 10, "loud": [quarter(n) for n in [10.0, 14.0] * 20]}
    options = TimingOptions(max_iterations=30)
    watch = Script(scripts)
    calm, loud = time_interleaved([named("calm"), named("loud")], watch, [options] * 2)
    assert (calm.iterations, loud.iterations) == (9, 30)


def test_costs_are_normalized_by_the_reference() -> None:
    """A machine that is slow for both is not a costly shard; passes are distinguished."""
    slow_ms = (2.0 * 1.5, 6.0 * 1.8**0.1 * 1.25**0.9)  # 1.5: the geometric mean of 1.8 and 1.25
    uncontended, slow = Iteration(2.0, 6.0, 8.0), Iteration(*slow_ms, sum(slow_ms))
    beside_uncontended, beside_slow = Iteration(1.0, 2.0, 3.0), Iteration(1.8, 2.5, 4.3)
    calm = time_operator(
        named("s"), Script({"s": [uncontended] * 12}, [beside_uncontended]), TimingOptions()
    )
    loud = time_operator(named("s"), Script({"s": [slow] * 12}, [beside_slow]), TimingOptions())
    assert (calm.forward_ms, calm.backward_ms, calm.reference_level) == (
        2.0,
        6.0,
        ReferenceLevel(1.0, 2.0),
    )
    assert (loud.forward_ms, loud.backward_ms, loud.reference_level) == (
        *slow_ms,
        ReferenceLevel(1.8, 2.5),
    )
    normalized = loud.normalized_to(calm.reference_level)
    assert (normalized.forward_ms, normalized.backward_ms) == pytest.approx((2.0, 6.0))
    assert normalized.spread == loud.spread
    assert loud.normalized_to(None) == loud
    as_read = time_operator(named("s"), Script({"s": [uncontended] * 12}), TimingOptions())
    assert (as_read.total_ms, as_read.reference_level) == (8.0, None)
    assert as_read.normalized_to(ReferenceLevel(3.0, 3.0)) == as_read


def test_a_moment_that_slows_both_does_not_widen_the_interval() -> None:
    """The reference runs before and after, so it is slow where the iteration is."""
    pace = [1.0, 1.0] + [1.0, 1.4, 1.0, 1.2] * 3  # one factor for each round; the first warms up
    script = [quarter(10.0 * residual) for residual in pace]
    # one after warming up, then two a round
    references = [quarter(2 * pace[0])] + [quarter(2 * f) for f in pace[1:] for _ in range(2)]
    timing = time_operator(named("s"), Script({"s": script}, references), TimingOptions())
    assert timing.iterations == 9
    assert timing.spread == pytest.approx((0.0, 0.0, 0.0))


def test_a_long_iteration_is_compared_with_a_share_of_its_time() -> None:
    watch = Script({"s": [quarter(100.0)] * 12}, [quarter(3.0)])
    time_operator(named("s"), watch, TimingOptions())
    assert watch.order[-5:] == ["s"] + ["reference"] * 4  # at least a tenth
    short = Script({"s": [quarter(5.0)] * 12}, [quarter(3.0)])
    time_operator(named("s"), short, TimingOptions())
    assert short.order[-2:] == ["s", "reference"]


def test_the_operator_that_failed_is_named() -> None:
    def broken() -> None:
        raise RuntimeError("index 9 is out of range\nand a long stack")

    class Breaking(Script):
        def iteration(self, subject: TimedOperator) -> Iteration:
            if callable(subject.forward):
                subject.forward()
            return super().iteration(subject)

    subjects = [named("s"), TimedOperator(broken, torch.ones(1))]
    watch = Breaking({"s": [quarter(10.0)] * 12})
    with pytest.raises(ShardFault) as caught:
        time_interleaved(subjects, watch, [TimingOptions()] * 2)
    assert caught.value.number == 1
    assert caught.value.reason == "RuntimeError: index 9 is out of range"


def test_the_core_has_a_reference(core: int) -> None:
    watch = CpuStopwatch([core], references=reference_operators(CpuBackend()))
    runs = [watch.reference() for _ in range(5)]  # more than there are copies
    for run in runs:
        assert run is not None
        assert run.forward_ms > 0
        assert run.backward_ms > 0
        # What warms up keeps the core, too.
        assert run.wall_ms > run.forward_ms + run.backward_ms
    assert CpuStopwatch([core]).reference() is None


def test_the_cache_is_cleared_as_far_as_time_allows(core: int) -> None:
    watch = CpuStopwatch([core], cache_bytes=2**25)
    assert not watch.clear_cache(0.0)
    assert not watch.clear_cache(1e-3)
    assert watch.clear_cache(math.inf)
    assert watch.clear_cache(1e6)
    assert CpuStopwatch([core]).clear_cache(0.0)  # there is nothing to be cleared


def test_slow_is_distinguished_from_uncontended() -> None:
    times = [1.0] * 50
    assert uncontended_level([*times, 1.5]) == 1.0
    assert (
        uncontended_level([*times, *[2.0] * 20]) == 1.0
    )  # a slow spell does not pass for uncontended
    assert uncontended_level([*times, *[0.5] * 60]) == 0.5  # but a quieter one is learnt


@pytest.mark.parametrize("count", [9, 20, 64])
def test_the_interval_of_the_median_holds_it(count: int) -> None:
    steps = [1e6 + n for n in range(count)]
    width = 2 * median_spread(steps) * statistics.median(steps)
    cut = round((count - 1 - width) / 2)  # values left out on either side
    rng = random.Random(count)
    inside = 0
    for _ in range(4000):
        values = sorted(rng.random() for _ in range(count))
        inside += values[cut] <= 0.5 <= values[-1 - cut]
    assert 0.94 < inside / 4000 < 0.985  # and no wider than it must be


def test_a_few_values_have_their_whole_range() -> None:
    assert median_spread([5.0] * 9) == 0
    assert median_spread([4.0, 5.0, 6.0]) == pytest.approx(0.2)


@pytest.mark.parametrize("count", [9, 20, 64])
def test_the_standard_error_is_that_of_the_median(count: int) -> None:
    rng = random.Random(count)
    medians, errors = [], []
    for _ in range(1500):
        values = [rng.gauss(100, 5) for _ in range(count)]
        medians.append(statistics.median(values) / 100)
        errors.append(standard_error(median_spread(values), count))
    assert 0.95 < statistics.fmean(errors) / statistics.stdev(medians) < 1.2  # rather too large
    assert standard_error(0.0, 1) == UNKNOWN


def _spin(core: int, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    end = os.times().elapsed + seconds
    while os.times().elapsed < end:
        pass


def test_somebody_else_on_the_core_is_noticed(
    tables: tuple[EmbeddingTable, ...], core: int
) -> None:
    """The silent doubling of costs: a second process on the same core."""
    op = EmbeddingOp(shard(tables, 8), MeasureSettings(1024), CpuBackend())
    options = TimingOptions(precision=0.0, max_iterations=40)
    other = multiprocessing.get_context("spawn").Process(target=_spin, args=(core, 60))
    other.start()
    try:
        while other.is_alive() and not _is_spinning(other.pid or 0):
            pass
        timing = time_operator(subject_of(op), CpuStopwatch([core]), options)
    finally:
        other.terminate()
        other.join()
    assert timing.disturbed > 0
    assert timing.foreign_load > 0.2


def _is_spinning(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().split()[13]) > 20  # 0.2 s of its own in user mode: past its imports


def test_our_timing_agrees_with_fbgemm_on_its_own_requests(bound: DeviceBackend) -> None:
    """`make bench` prints the difference; here the bound is generous: machines are shared."""
    from bench.yardstick import compare_with_fbgemm

    ratios = compare_with_fbgemm(bound, bound.stopwatch(flush=False), rounds=3)
    assert ratios.step == pytest.approx(1, abs=0.45)
    assert ratios.backward == pytest.approx(1, abs=0.45)


def test_what_is_needed_counts_everything(tables: tuple[EmbeddingTable, ...]) -> None:
    options = OperatorOptions()
    needed = SETTINGS.needed_bytes(shard(tables))
    assert needed == options.memory(shard(tables).pieces, 256).total
    assert build_module(shard(tables), options, CpuBackend()).total_D == sum(
        table.dim for table in tables[:4]
    )
    assert last_level_cache_bytes() >= 2**19
