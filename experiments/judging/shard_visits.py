"""Plans measured on the cluster's pool: to judge them, and to choose the best of a few."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from autoshard.benchmark import (
    BenchmarkPool,
    Level,
    Measurement,
    MeasureSettings,
    PlanCost,
    Timing,
    TimingOptions,
    price_plan,
)
from autoshard.cost_model import CostModel
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.judging.statistics import Batches, Known, Pricing, spread_of_batches
from autoshard.workload import Shard, ShardCost, ShardingPlan, ShardingTask
from autoshard.workload.step_price import StepPrice

SEEDS = 3  # index batches that the visits of a shard are spread over


def judging_seeds(count: int) -> tuple[int, ...]:
    """Of the index batches by which plans are judged: even ones."""
    return tuple(range(0, 2 * count, 2))


def verifying_seeds(count: int) -> tuple[int, ...]:
    """Of those by which sharders choose: odd ones, for the best of noisy costs was lucky, too."""
    return tuple(range(1, 2 * count, 2))


@contextmanager
def plan_pool(store: Path) -> Iterator[BenchmarkPool]:
    """The cluster's pool, which keeps what it measures in the store. Tells what it has noticed."""
    with ray_cluster():
        pool = BenchmarkPool(store)
        try:
            yield pool
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"what was measured is in {store}; run again to go on"
            ) from None
        for notice in pool.notices():
            cli.console.print(f"note: {notice}", markup=False, soft_wrap=True)
        pool.close()


class Measuring(Protocol):
    """What measures: a `BenchmarkPool`, or one that pretends to be."""

    def stream(
        self,
        shards: Sequence[Shard],
        settings: MeasureSettings,
        timing: TimingOptions | None = None,
        retry_failed: bool = False,
        visits: int = 1,
    ) -> Iterator[tuple[int, Measurement]]:
        """Each shard's number and measurement, once it has so many visits."""
        ...


class ShardVisits:
    """What is known of shards: means over visits, which are spread over several index batches.

    Only forward and backward of the fused operator are measured. All-to-alls are those of the
    task's objective: on a CPU ranks share cores, so measured ones would say more about this machine
    than about a plan.

    Args:
        pool: what measures.
        settings: of all shards; its seed does not matter.
        seeds: of the index batches. The first visit is with the first, and so on in turns.
        timing: how hard to try in a visit; by default as the pool does.
        told: what measurements are told as, such as at the level of a cost model.
        clock: seconds.
    """

    def __init__(
        self,
        pool: Measuring,
        settings: MeasureSettings,
        seeds: Sequence[int],
        timing: TimingOptions | None = None,
        told: Callable[[Measurement], Measurement] = lambda measurement: measurement,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._settings = [replace(settings, seed=seed) for seed in seeds]
        self._timing = timing
        self._told = told
        self._clock = clock
        self._answers: dict[str, dict[int, Measurement]] = {}  # by digest, and place of the seed
        self._exhausted: set[str] = set()  # a visit more was asked for, and none was had
        self._reasons: set[str] = set()
        self._level: Level | None = None  # where the latest was told
        self._known: dict[str, Known] | None = None  # until something new is measured
        self.visits, self.seconds = 0, 0.0

    def measure(self, shards: Sequence[Shard], visits: int = 1, deadline: float = math.inf) -> bool:
        """Until each shard has so many visits over all batches; False if it ended at the deadline.

        What is being measured then goes into the store all the same.
        """
        started = self._clock()
        try:
            for place in range(min(visits, len(self._settings))):
                of_batch = self._share(visits, place)
                missing = {s.digest: s for s in shards if self._count(s.digest, place) < of_batch}
                missing = {d: s for d, s in missing.items() if not self._failed(d)}
                if not self._ask(list(missing.values()), place, of_batch, deadline):
                    return False
        finally:
            self.seconds += self._clock() - started
        return True

    def wanted(self, shard: Shard) -> int | None:
        """How many visits to ask for, to have one more; None if it cannot be measured further."""
        if self._failed(shard.digest) or shard.digest in self._exhausted:
            return None
        counts = [self._count(shard.digest, place) for place in range(len(self._settings))]
        visits = 1
        while all(self._share(visits, place) <= count for place, count in enumerate(counts)):
            visits += 1
        return visits

    def known(self) -> dict[str, Known]:
        """Of each shard that could be measured, by digest."""
        if self._known is None:
            batches = self._batches()
            spread = self._spread(batches)
            self._known = {digest: found.known(spread) for digest, found in batches.items()}
        return self._known

    def gains(self) -> dict[str, float]:
        """What one more visit of each shard would take off the variance of its mean, in ms^2."""
        batches = self._batches()
        spread, most = self._spread(batches), len(self._settings)
        return {digest: found.gain(spread, most) for digest, found in batches.items()}

    @property
    def now_s(self) -> float:
        """By the clock that deadlines are told by."""
        return self._clock()

    def answers(self) -> list[Measurement]:
        """Of each shard that could be measured and each index batch, the mean of its visits."""
        return [answer for some in self._answers.values() for answer in some.values() if answer.ok]

    def costs(self, shards: Sequence[Shard]) -> list[ShardCost]:
        """The mean cost of each shard, and 1.96 times its relative standard error."""
        known = self.known()
        found = []
        for shard in shards:
            timings = self._timings(shard.digest)
            forward = float(np.mean([timing.forward_ms for timing in timings]))
            backward = float(np.mean([timing.backward_ms for timing in timings]))
            told = known[shard.digest]
            found.append(ShardCost(forward, backward, 1.96 * told.error_ms / told.mean_ms))
        return found

    def plan_cost(self, task: ShardingTask, plan: ShardingPlan) -> PlanCost | None:
        """The plan's cost as it was measured; None where a shard could not be."""
        if any(self._failed(digest) for digest in digests_of(task, plan)):
            return None
        return price_plan(plan, task, self)

    def step_ms(
        self, task: ShardingTask, plans: Sequence[ShardingPlan], visits: int
    ) -> list[float]:
        """What a step takes by each plan: what sharders choose by. Infinite without a cost."""
        self.measure([s for plan in plans for s in plan.shards(task) if s is not None], visits)
        costs = [self.plan_cost(task, plan) for plan in plans]
        return [math.inf if cost is None else cost.step_ms for cost in costs]

    def _ask(self, shards: Sequence[Shard], place: int, visits: int, deadline: float) -> bool:
        """Until each shard has so many visits with one batch."""
        if not shards:
            return True
        if self._clock() >= deadline:
            return False
        missing = len(shards)
        stream = self._pool.stream(shards, self._settings[place], self._timing, True, visits)
        for number, answer in stream:
            self._take(shards[number].digest, place, self._told(answer))
            missing -= 1
            if missing and self._clock() >= deadline:
                return False  # the pool forgets what is missing when nobody reads on
        return True

    def _take(self, digest: str, place: int, answer: Measurement) -> None:
        before = self._count(digest, place)
        self._answers.setdefault(digest, {})[place] = answer
        if answer.timing is not None:
            self._level = answer.timing.quiet
        self._known = None
        if not answer.ok and answer.reason not in self._reasons:
            self._reasons.add(answer.reason)
            cli.console.print(f"note: a shard cannot be measured: {answer.reason}", soft_wrap=True)
        if not answer.reused:
            self.visits += max(0, self._count(digest, place) - before)
        if self._count(digest, place) <= before:
            self._exhausted.add(digest)

    def _share(self, visits: int, place: int) -> int:
        """Of so many visits, those with the batch at this place."""
        return -(-max(0, visits - place) // len(self._settings))

    def _count(self, digest: str, place: int) -> int:
        answer = self._answers.get(digest, {}).get(place)
        return 0 if answer is None or answer.timing is None else answer.timing.visits

    def _failed(self, digest: str) -> bool:
        return any(not answer.ok for answer in self._answers.get(digest, {}).values())

    def _batches(self) -> dict[str, Batches]:
        found = {}
        for digest in self._answers:
            timings = self._timings(digest)
            if timings and not self._failed(digest):
                totals = np.array([timing.total_ms for timing in timings])
                found[digest] = Batches(
                    totals,
                    np.array([timing.error for timing in timings]),
                    np.array([float(timing.visits) for timing in timings]),
                    sum(timing.forward_ms for timing in timings) / float(totals.sum()),
                )
        return found

    def _timings(self, digest: str) -> list[Timing]:
        """Of each batch, all told at the level that the store has come to."""
        answers = self._answers[digest].values()
        return [a.timing.told_at(self._level) for a in answers if a.timing is not None]

    def _spread(self, batches: Mapping[str, Batches]) -> float:
        """Between batches. Who asks for one alone wants to know nothing of others."""
        one = len(self._settings) == 1 or not batches
        return 0.0 if one else spread_of_batches(list(batches.values()))


def pricing_of(task: ShardingTask, plans: Sequence[ShardingPlan]) -> Pricing:
    """How a judge prices plans of a task."""
    price, found = StepPrice.of_task(task), {}
    for plan in plans:
        columns = np.array(plan.columns(task), dtype=float)
        found[digests_of(task, plan)] = float(price.exchange_stage(columns).max())
    return Pricing(task.objective, found)


def digests_of(task: ShardingTask, plan: ShardingPlan) -> tuple[str, ...]:
    """Of the shard of each device that has any."""
    return tuple(shard.digest for shard in plan.shards(task) if shard is not None)


def told_as(model: CostModel, pool: BenchmarkPool) -> Callable[[Measurement], Measurement]:
    """Tells measurements as the model does its own, if it speaks of what measures here."""
    same = pool.make() == (model.provenance.hardware, model.provenance.versions)
    level = model.provenance.quiet if same else None
    return lambda measurement: measurement.told_at(level)
