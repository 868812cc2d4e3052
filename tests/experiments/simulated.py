"""A simulated pool: a formula gives costs; repeats and index batches add noise."""

from collections.abc import Iterator, Sequence

import numpy as np
from formula import HARDWARE, VERSIONS, formula_ms

from autoshard.benchmark import Measurement, MeasureSettings, Timing, TimingOptions
from autoshard.benchmark.measurement import Directions
from autoshard.workload import Shard


class SimulatedPool:
    """Keeps every measurement, as a store does, and has its own clock.

    Args:
        repeats: relative deviation of a measurement.
        batches: deviation of an index batch.
        seconds: that a visit takes.
        fails: digests of shards that cannot be measured.
    """

    def __init__(
        self,
        repeats: float = 0.03,
        batches: float = 0.0,
        seconds: float = 1.0,
        fails: frozenset[str] = frozenset(),
        seed: int = 0,
    ) -> None:
        self.noise, self.batches, self.seconds, self.fails = repeats, batches, seconds, fails
        self.now = 0.0
        self.kept: dict[tuple[str, int], list[float]] = {}
        self.order: list[tuple[str, int]] = []  # digest and seed of each measurement, in order
        self._rng = np.random.default_rng(seed)

    def clock(self) -> float:
        return self.now

    def count(self, digest: str) -> int:
        return sum(len(some) for (kept, _), some in self.kept.items() if kept == digest)

    def stream(
        self,
        shards: Sequence[Shard],
        settings: MeasureSettings,
        timing: TimingOptions | None = None,
        retry_failed: bool = False,
        repeats: int = 1,
    ) -> Iterator[tuple[int, Measurement]]:
        for number, shard in enumerate(shards):
            if shard.digest in self.fails:
                yield number, self._answer(shard, settings, None, "it does not fit")
                continue
            some = self.kept.setdefault((shard.digest, settings.seed), [])
            missing = max(0, repeats - len(some))
            for _ in range(missing):
                some.append(self._visit(shard, settings))
                self.order.append((shard.digest, settings.seed))
                self.now += self.seconds
            error = Directions.of(max(self.noise, 1e-6) / len(some) ** 0.5)
            mean, spread = float(np.mean(some)), Directions.of(0.02)
            known = Timing(0.4 * mean, 0.6 * mean, spread, 20, 0, 0.0, 0.1, None, len(some), error)
            yield number, self._answer(shard, settings, known, "", reused=not missing)

    def _visit(self, shard: Shard, settings: MeasureSettings) -> float:
        batch = np.random.default_rng([int(shard.digest[:8], 16), settings.seed])
        residual = 1 + self.batches * batch.standard_normal()
        return true_ms(shard) * residual * (1 + self.noise * self._rng.standard_normal())

    def _answer(
        self,
        shard: Shard,
        settings: MeasureSettings,
        timing: Timing | None,
        reason: str,
        reused: bool = False,
    ) -> Measurement:
        status = "failed" if timing is None else "ok"
        return Measurement(
            shard, settings, HARDWARE, VERSIONS, status, "d", "n", self.now, timing, reason, reused
        )  # fmt: skip


def true_ms(shard: Shard) -> float:
    """What a shard costs in truth."""
    return sum(formula_ms(shard, 1024))
