"""Repeat measurements of shards: their mean costs over several index batches, and the errors.

Sharders select plans by these costs, and the evaluator compares sharders by them. Both use index
batches of their own: the best of noisy costs was also lucky.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autoshard.benchmark import (
    Measurement,
    MeasureSettings,
    PlanCost,
    ReferenceLevel,
    Timing,
    TimingOptions,
    price_plan,
)
from autoshard.benchmark.measurement import Directions
from autoshard.benchmark.statistics import pooled_variance
from autoshard.cost_model.models.model import CostModel
from autoshard.cost_model.step.common_price import CommonPrices
from autoshard.cost_model.step.overhead import StepOverhead, loads_of
from autoshard.workload import Shard, ShardCost, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats

if TYPE_CHECKING:
    from autoshard.benchmark import BenchmarkPool


SEEDS = 3  # index batches that the repeat measurements of a shard are spread over
_BATCHES_PRIOR = 4.0  # number of costs that the first guess of their variance counts for
_WIDTH_95 = 1.96  # half width of a 95 % interval, in standard errors


def evaluation_seeds(count: int) -> tuple[int, ...]:
    """Returns the seeds of the index batches by which the evaluator compares plans: even ones."""
    return tuple(range(0, 2 * count, 2))


def selection_seeds(count: int) -> tuple[int, ...]:
    """Returns the seeds of the index batches by which sharders select plans: odd ones."""
    return tuple(range(1, 2 * count, 2))


@dataclass(frozen=True)
class KnownCost:
    """The measured cost of a shard: means and their standard errors."""

    mean_ms: Directions
    error_ms: Directions


@dataclass(frozen=True)
class BatchCosts:
    """The cost of a shard with each of several index batches.

    Args:
        means_ms: Mean of each batch, shape [batches, directions].
        errors: Relative standard error of each mean, same shape.
    """

    means_ms: Floats
    errors: Floats

    def known(self, spread: Floats) -> KnownCost:
        """Returns the mean over all possible batches, of relative standard deviation `spread`."""
        means, count = self.means_ms.mean(axis=0), len(self.errors)
        errors = means * np.sqrt(spread**2 * count + (self.errors**2).sum(axis=0)) / count
        return KnownCost(Directions(*means.tolist()), Directions(*errors.tolist()))


def spread_of_batches(shards: Sequence[BatchCosts]) -> Floats:
    """Returns the relative standard deviation of costs between index batches, shape [directions].

    Noise of measuring is excluded. It is the same for all shards, because a few batches of each
    say little. Until enough shards have several batches it is assumed to equal the noise of one.
    """
    noise = np.mean([np.mean(shard.errors**2, axis=0) for shard in shards], axis=0)
    groups = [shard.means_ms / shard.means_ms.mean(axis=0) for shard in shards]
    found = [
        pooled_variance([group[:, n].tolist() for group in groups], 2 * each, _BATCHES_PRIOR)
        for n, each in enumerate(noise.tolist())
    ]
    return np.asarray(np.sqrt(np.maximum(0.0, found - noise)))


class RepeatedMeasurements:
    """Measures shards repeatedly, spread over index batches, and averages.

    Only forward and backward of the fused operator are measured. All-to-alls are priced by the
    objective: CPU ranks share cores, so measured ones would depend on this machine more than on the
    plan.

    Args:
        pool: The cluster's pool, or a simulation.
        settings: Settings of all shards; their seed is replaced by `seeds`.
        seeds: Seeds of the index batches, which repeat measurements take in turn.
        timing: Effort of a measurement; by default the pool's.
        normalize: Converts each measurement, such as to the reference level of a cost model.
        notify: Receives one line for each reason why a shard cannot be measured.
        clock: Returns seconds.
        overhead: What training takes beside operators, if that counts: then all costs are those of
            passes in training.
    """

    def __init__(
        self,
        pool: "BenchmarkPool",
        settings: MeasureSettings,
        seeds: Sequence[int],
        timing: TimingOptions | None = None,
        normalize: Callable[[Measurement], Measurement] = lambda measurement: measurement,
        notify: Callable[[str], None] = warnings.warn,
        clock: Callable[[], float] = time.monotonic,
        overhead: StepOverhead | None = None,
    ) -> None:
        self._pool, self._overhead = pool, overhead
        self._common = CommonPrices(overhead)
        self._settings = [replace(settings, seed=seed) for seed in seeds]
        self._timing = timing
        self._normalize, self._notify = normalize, notify
        self._clock = clock
        self._answers: dict[str, dict[int, Measurement]] = {}  # by digest, and index of the seed
        self._exhausted: set[str] = set()  # one more was requested, and the pool had none
        self._reasons: set[str] = set()
        self._level: ReferenceLevel | None = None  # reference level of the latest measurement
        self._known: dict[str, KnownCost] | None = None  # until something new is measured
        self.repeats, self.seconds = 0, 0.0

    def measure(
        self, shards: Sequence[Shard], repeats: int = 1, deadline: float = math.inf
    ) -> bool:
        """Measures until each shard has `repeats` measurements over all batches.

        Returns:
            False if the deadline (by the clock) came first. Shards in progress are stored
            nevertheless.
        """
        started = self._clock()
        try:
            for place in range(min(repeats, len(self._settings))):
                of_batch = self._share(repeats, place)
                missing = {s.digest: s for s in shards if self._count(s.digest, place) < of_batch}
                missing = {d: s for d, s in missing.items() if not self._failed(d)}
                if not self._request(list(missing.values()), place, of_batch, deadline):
                    return False
        finally:
            self.seconds += self._clock() - started
        return True

    def wanted(self, shard: Shard) -> int | None:
        """Returns the `repeats` to request for one more; None if the pool has no more."""
        if self._failed(shard.digest) or shard.digest in self._exhausted:
            return None
        counts = [self._count(shard.digest, place) for place in range(len(self._settings))]
        repeats = 1
        while all(self._share(repeats, place) <= count for place, count in enumerate(counts)):
            repeats += 1
        return repeats

    def known(self) -> dict[str, KnownCost]:
        """Returns the cost of each shard that could be measured, by digest."""
        if self._known is None:
            batches = self._batches()
            # With one batch, results are for this batch alone.
            one = len(self._settings) == 1 or not batches
            spread = np.zeros(3) if one else spread_of_batches(list(batches.values()))
            self._known = {
                digest: self._in_training(digest, found.known(spread))
                for digest, found in batches.items()
            }
        return self._known

    def common_ms(self, task: ShardingTask, plan: ShardingPlan) -> float:
        """Returns what a step takes on all devices alike; 0 unless steps of training count."""
        return self._common.of(task).plan_ms(plan)

    def _in_training(self, digest: str, operators: KnownCost) -> KnownCost:
        if self._overhead is None:
            return operators
        shard = next(iter(self._answers[digest].values())).shard
        loads = loads_of(shard.pieces, self._settings[0].batch_size)
        both, errors = np.array([operators.mean_ms[:2], operators.error_ms[:2]])
        passes = self._overhead.in_training(both, loads)
        errors = errors * self._overhead.rates[:, 0]
        # Errors of both passes together grow as those of each.
        grown = float(self._overhead.rates[:, 0] @ both / both.sum())
        return KnownCost(
            Directions(float(passes[0]), float(passes[1]), float(passes.sum())),
            Directions(float(errors[0]), float(errors[1]), operators.error_ms.both * grown),
        )

    @property
    def now_s(self) -> float:
        """The time by the clock that deadlines refer to."""
        return self._clock()

    def answers(self) -> list[Measurement]:
        """Returns the mean measurement of each shard and batch that could be measured."""
        return [a for of_shard in self._answers.values() for a in of_shard.values() if a.ok]

    def costs(self, shards: Sequence[Shard], hardware: Sequence[str] = ()) -> list[ShardCost]:  # noqa: ARG002
        """Returns the mean cost of each shard, and its relative 95 % half width."""
        known = [self.known()[shard.digest] for shard in shards]
        return [
            ShardCost(*cost.mean_ms[:2], _WIDTH_95 * cost.error_ms.both / cost.mean_ms.both)
            for cost in known
        ]

    def plan_cost(self, task: ShardingTask, plan: ShardingPlan) -> PlanCost | None:
        """Returns the plan's measured cost; None if one of its shards could not be measured."""
        if any(shard and self._failed(shard.digest) for shard in plan.shards(task)):
            return None
        return price_plan(plan, task, self, common_ms=self.common_ms(task, plan))

    def _request(self, shards: Sequence[Shard], place: int, repeats: int, deadline: float) -> bool:
        """Measures shards with one batch up to `repeats`; returns False at the deadline."""
        if not shards:
            return True
        if self._clock() >= deadline:
            return False
        missing = len(shards)
        stream = self._pool.stream(shards, self._settings[place], self._timing, True, repeats)
        for number, answer in stream:
            self._take(shards[number].digest, place, self._normalize(answer))
            missing -= 1
            if missing and self._clock() >= deadline:
                return False  # the pool drops the rest when nobody reads on
        return True

    def _take(self, digest: str, place: int, answer: Measurement) -> None:
        before = self._count(digest, place)
        self._answers.setdefault(digest, {})[place] = answer
        if answer.timing is not None:
            self._level = answer.timing.reference_level
        self._known = None
        if not answer.ok and answer.reason not in self._reasons:
            self._reasons.add(answer.reason)
            self._notify(f"a shard cannot be measured: {answer.reason}")
        if not answer.reused:
            self.repeats += max(0, self._count(digest, place) - before)
        if self._count(digest, place) <= before:
            self._exhausted.add(digest)

    def _share(self, repeats: int, place: int) -> int:
        """Returns how many of `repeats` measurements use the batch at this place."""
        return -(-max(0, repeats - place) // len(self._settings))

    def _count(self, digest: str, place: int) -> int:
        answer = self._answers.get(digest, {}).get(place)
        return 0 if answer is None or answer.timing is None else answer.timing.repeats

    def _failed(self, digest: str) -> bool:
        return any(not answer.ok for answer in self._answers.get(digest, {}).values())

    def _batches(self) -> dict[str, BatchCosts]:
        found = {}
        for digest in self._answers:
            timings = self._timings(digest)
            if timings and not self._failed(digest):
                found[digest] = BatchCosts(
                    np.array([timing.ms for timing in timings]),
                    np.array([timing.error for timing in timings]),
                )
        return found

    def _timings(self, digest: str) -> list[Timing]:
        """Returns the timing with each batch, all at the latest reference level."""
        answers = self._answers[digest].values()
        return [a.timing.normalized_to(self._level) for a in answers if a.timing is not None]


def normalizer(model: CostModel, pool: "BenchmarkPool") -> Callable[[Measurement], Measurement]:
    """Returns a converter of measurements to the model's reference level.

    It does nothing if the pool measures other hardware than the model's.
    """
    same = pool.make() == (model.provenance.hardware, model.provenance.versions)
    level = model.provenance.reference_level if same else None
    return lambda measurement: measurement.normalized_to(level)
