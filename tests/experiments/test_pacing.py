"""How long measuring takes, told early: on devices that answer as real ones do, in no time."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from formula import formula_ms

from autoshard.benchmark import Measurement, MeasureSettings, Timing, TimingOptions
from autoshard.benchmark.measurement import Directions
from autoshard.benchmark.pool.jobs import MAX_INTERLEAVED
from autoshard.experiments.collecting.pacing import FEWEST_ANSWERS, Pace, stream_within
from autoshard.experiments.console.budget import Budget
from autoshard.workload import EmbeddingTable, Shard, UserError, random_shards

SETTINGS = MeasureSettings(1024)


def steady(_: float) -> float:
    return 1.0


def slow_spell(at_s: float) -> float:
    """For half a minute a neighbour makes everything take half as long again."""
    return 1.5 if 20 < at_s < 50 else 1.0


class SimulatedPool:
    """Devices of given speeds that take shards by turns, as a pool assigns them.

    A shard takes what a formula that is not linear in its tables says, and noise of 40 %; a seventh
    of the time is none of the operator's. `now` is when the latest answer came. What a device does
    first takes `young` times as long.
    """

    def __init__(
        self,
        speeds: Sequence[float],
        slowness: Callable[[float], float] = steady,
        seed: int = 0,
        known: frozenset[str] = frozenset(),
        young: float = 1.0,
    ) -> None:
        self.speeds = speeds
        self.now = 0.0
        self.asked: list[int] = []
        self.measured: set[str] = set()
        self._slowness = slowness
        self._known = known
        self._young = dict.fromkeys(range(len(speeds)), young)
        self._rng = np.random.default_rng(seed)

    def clock(self) -> float:
        return self.now

    def stream(
        self,
        shards: Sequence[Shard],
        settings: MeasureSettings,
        timing: TimingOptions | None = None,
        retry_failed: bool = False,
    ) -> Iterator[tuple[int, Measurement]]:
        self.asked.append(len(shards))
        queue = [n for n, shard in enumerate(shards) if shard.digest not in self._known]
        for number in set(range(len(shards))) - set(queue):
            yield number, self._answer(shards[number], 0, 1.0, reused=True)
        busy = [(self.now, device) for device in range(len(self.speeds))]
        answers: list[tuple[float, int, int, float]] = []
        while queue:  # whoever is free takes some
            at, device = heapq.heappop(busy)
            count = min(MAX_INTERLEAVED, math.ceil(len(queue) / len(self.speeds)))
            some, queue = queue[:count], queue[count:]
            spent = [self._seconds(shards[number], device, at) for number in some]
            done = at + sum(spent) * 7 / 6 * self._young.pop(device, 1.0)
            answers += [(done, n, device, s) for n, s in zip(some, spent, strict=True)]
            heapq.heappush(busy, (done, device))
        for done, number, device, seconds in sorted(answers):
            self.now = done
            self.measured.add(shards[number].digest)
            yield number, self._answer(shards[number], device, seconds)

    def _seconds(self, shard: Shard, device: int, at_s: float) -> float:
        expected = 0.05 + 0.025 * sum(formula_ms(shard, 1024)) ** 0.9
        noise = math.exp(0.4 * self._rng.standard_normal())
        return expected * noise * self._slowness(at_s) / self.speeds[device]

    def _answer(
        self, shard: Shard, device: int, seconds: float, reused: bool = False
    ) -> Measurement:
        timing = Timing(1.0, 2.0, Directions.of(0.02), 20, 0, 0.0, seconds)
        name = f"device {device}"
        return Measurement(shard, SETTINGS, "hw", "v", "ok", name, "n", 1.0, timing, reused=reused)


@pytest.mark.parametrize(
    ("speeds", "slowness", "young"),
    [
        ((1.0,), steady, 1.0),
        ((1.0,), steady, 3.0),
        ((1.0, 1.0), steady, 3.0),
        ((1.0, 5.0), steady, 1.0),  # two hosts, one five times as fast
        ((1.0, 5.0), steady, 3.0),
        ((1.0, 1.0), slow_spell, 3.0),
        ((*[1.0] * 8, *[3.0] * 8), steady, 1.0),
        ((1.0, 1e-9), steady, 1.0),  # one hangs
    ],
)
def test_what_is_told_early_holds_within_a_third(
    many_tables: tuple[EmbeddingTable, ...],
    speeds: tuple[float, ...],
    slowness: Callable[[float], float],
    young: float,
) -> None:
    ratios = []
    drawn = random_shards(many_tables, 100 * max(4, len(speeds)), 20)
    for seed in range(12):
        shards = [drawn[n] for n in np.random.default_rng(seed).permutation(len(drawn))]
        pool = SimulatedPool(speeds, slowness, seed, young=young)
        pace = Pace(shards, 1024, len(speeds), pool.clock)
        told, ends = None, []
        for number, answer in pool.stream(shards, SETTINGS):
            pace.take(number, answer)
            if told is None and (left := pace.left_s()) is not None:
                told, early = pool.now + left, len(ends) < len(shards) / 2
            ends.append(pool.now)
        assert told is not None
        assert early
        assert pace.left_s() == pytest.approx(0, abs=1e-6)
        # What a device that hangs has taken is given up in the end, or done by others.
        ratios.append(told / ends[-1 - MAX_INTERLEAVED])
    kept = [2 / 3 < ratio < 4 / 3 for ratio in ratios]
    assert sum(kept) >= 0.9 * len(kept), ratios
    assert 0.8 < np.mean(ratios) < 1.2


def test_nothing_is_told_before_enough_is_known(many_tables: tuple[EmbeddingTable, ...]) -> None:
    shards = random_shards(many_tables, FEWEST_ANSWERS, 4)
    known = frozenset(shard.digest for shard in shards[:4])
    pool = SimulatedPool([1.0], known=known)
    pace = Pace(shards, 1024, 1, pool.clock)
    for number, answer in pool.stream(shards, SETTINGS):  # what was in the store tells nothing
        pace.take(number, answer)
        assert pace.left_s() is None


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 5.0), (0.2, 0.2)])
@pytest.mark.parametrize("seconds", [20.0, 60.0])
def test_a_budget_is_used_and_kept(
    many_tables: tuple[EmbeddingTable, ...], speeds: tuple[float, ...], seconds: float
) -> None:
    shards = random_shards(many_tables, 1200, 20)
    pool = SimulatedPool(speeds)
    answered, pace = within(pool, shards, Budget(seconds, pool.clock))
    assert 0.7 * seconds < pool.now <= 1.15 * seconds
    # The first ones, small or large; at most a few were under way when the time was over.
    asked = range(sum(pool.asked))
    assert set(answered) <= set(asked)
    assert len(asked) - len(answered) < MAX_INTERLEAVED
    assert len(asked) < len(shards)
    left_out = pace.fitting(len(shards), math.inf)
    assert left_out == [n for n in range(len(shards)) if n not in answered]


def test_what_is_in_the_store_is_not_taken_for_work(
    many_tables: tuple[EmbeddingTable, ...],
) -> None:
    shards = random_shards(many_tables, 400, 20)
    pool = SimulatedPool([1.0], known=frozenset(shard.digest for shard in shards[:300]))
    answered, _ = within(pool, shards, Budget(20.0, pool.clock))
    assert len(answered) > 300 + len(pool.measured) / 2
    assert pool.now > 10.0


def test_without_a_limit_all_is_asked_at_once(many_tables: tuple[EmbeddingTable, ...]) -> None:
    shards = random_shards(many_tables, 50, 4)
    pool = SimulatedPool([1.0, 1.0])
    answered, _ = within(pool, shards, Budget(None, pool.clock))
    assert len(answered) == 50
    assert pool.asked == [50]
    spent = SimulatedPool([1.0])
    answered, _ = within(spent, shards, Budget(1e-9, itertools.count().__next__))
    assert not answered
    assert not spent.asked


def within(pool: SimulatedPool, shards: Sequence[Shard], budget: Budget) -> tuple[list[int], Pace]:
    """The numbers of the shards that were answered for, in order."""
    pace = Pace(shards, 1024, len(pool.speeds), pool.clock)
    found = stream_within(pool, shards, SETTINGS, pace, budget)  # type: ignore[arg-type]
    return sorted(number for number, _ in found), pace


def test_a_budget_counts_down() -> None:
    now = [0.0]
    budget = Budget(10.0, lambda: now[0])
    part = budget.part(0.25)
    now[0] = 4.0
    assert (budget.left_s(), part.left_s()) == (6.0, 0.0)
    assert part.is_spent
    assert not budget.is_spent
    assert budget.part(0.5).left_s() == 3.0
    now[0] = 11.0
    assert budget.is_spent
    assert budget.part(0.5).left_s() < 0.01
    endless = Budget(None).part(0.5)
    assert not endless.is_limited
    assert not endless.is_spent
    for seconds in (0.0, -1.0, math.nan):
        with pytest.raises(UserError, match="--seconds must be more than 0"):
            Budget(seconds)
