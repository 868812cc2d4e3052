"""Times the shards of a `MachineProbe` as a pool measures shards: eight by turns, cache cleared."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from autoshard.benchmark.backends.base import DeviceBackend, TimedOperator
from autoshard.benchmark.measurement import (
    MeasureSettings,
    ReferenceLevel,
    ShardFault,
    Timing,
    TimingOptions,
)
from autoshard.benchmark.operator.embedding_op import EmbeddingOp
from autoshard.benchmark.operator.timing import time_interleaved
from autoshard.benchmark.probe.report import Passes, ProbedShard, ProbeError
from autoshard.benchmark.probe.shards import PROBE_SHARDS

_GROUPS = 2
_MIN_ITERATIONS = 3
_OPTIONS = TimingOptions(precision=0.0, max_iterations=24)  # or until the time is up


@dataclass(frozen=True)
class TimeLimit:
    """The wall time after which a probe is given up."""

    started: float
    max_seconds: float

    def check(self) -> None:
        """Raises ProbeError if the time is over."""
        if time.monotonic() - self.started > self.max_seconds:
            raise ProbeError(
                f"this machine was not probed within {self.max_seconds:.0f} s, since other "
                "programs use it: run again when they have ended"
            )

    def limited(self, operator: EmbeddingOp) -> TimedOperator:
        """Returns the operator, which checks the time before each iteration."""

        def forward() -> Tensor:
            self.check()
            return operator.forward()

        return TimedOperator(forward, operator.gradient)


def probe_shards(
    backend: DeviceBackend,
    references: Sequence[TimedOperator],
    free_bytes: int,
    deadline: float,
    limit: TimeLimit,
) -> tuple[tuple[ProbedShard, ...], ReferenceLevel | None]:
    """Times `PROBE_SHARDS`; those for which there is no time or memory are left out.

    Half of them are timed even where it takes longer: a model adjusts to no fewer, and a probe
    without them would be run again for each plan.

    Args:
        backend: The device.
        references: The device's reference operators.
        free_bytes: Memory that the shards of a group may take together.
        deadline: End of the time, by `time.monotonic`.
        limit: Limit of the time that the probe may take even then.

    Returns:
        The shards, and the reference level of their costs.

    Raises:
        ProbeError: The limit is over.
    """
    watch = backend.stopwatch(references=references)
    names, timings = list(PROBE_SHARDS), dict[str, Timing]()
    for group in range(_GROUPS):
        started = time.monotonic()
        # Every other one, so that each group has heavy and light shards, as in a pool.
        chosen = _that_fit(names[group::_GROUPS], free_bytes)
        end = started + (deadline - started) / (_GROUPS - group)
        operators = []
        for name in chosen:
            limit.check()
            shard, batch_size = PROBE_SHARDS[name]
            operators.append(EmbeddingOp(shard, MeasureSettings(batch_size), backend))
        if not chosen or (group and time.monotonic() > end):
            break
        subjects = [limit.limited(each) for each in operators]
        options = [_OPTIONS] * len(chosen)
        try:
            found = time_interleaved(subjects, watch, options, end, _MIN_ITERATIONS)
        except ShardFault:
            limit.check()  # if it is the cause
            raise
        timings.update(zip(chosen, found, strict=True))
        del operators, subjects
        gc.collect()  # modules are cycles
    counted = {name: t for name, t in timings.items() if t.iterations >= _MIN_ITERATIONS}
    levels = [t.reference_level for t in counted.values() if t.reference_level is not None]
    level = ReferenceLevel.typical(levels) if levels else None
    shards = []
    for name, uncertain in counted.items():
        timing = uncertain.normalized_to(level)
        shards.append(ProbedShard(name, Passes(timing.forward_ms, timing.backward_ms)))
    return tuple(shards), level


def _that_fit(names: Sequence[str], free_bytes: int) -> list[str]:
    """Returns the first shards that fit into memory together."""
    chosen: list[str] = []
    for name in names:
        shard, batch_size = PROBE_SHARDS[name]
        free_bytes -= MeasureSettings(batch_size).needed_bytes(shard)
        if free_bytes < 0:
            break
        chosen.append(name)
    return chosen
