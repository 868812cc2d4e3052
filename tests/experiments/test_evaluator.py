"""The evaluator on a simulated pool: what it measures, when it stops, what it prints."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import geometric_mean

import numpy as np
import pytest
from simulated import SimulatedPool, true_ms

from autoshard.benchmark import Measurement, MeasureSettings, TimingOptions
from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.repeated_measurements import (
    RepeatedMeasurements,
    evaluation_seeds,
    selection_seeds,
)
from autoshard.experiments.console import cli
from autoshard.experiments.evaluation.evaluator import (
    Evaluator,
    Limits,
)
from autoshard.experiments.evaluation.measured_plan import measure_step
from autoshard.experiments.evaluation.planners import Outcome, PlannedTask, plan_task
from autoshard.experiments.evaluation.posterior import digests_of
from autoshard.experiments.evaluation.ratio import Ratio
from autoshard.experiments.evaluation.report import Evaluation, bounds_ms
from autoshard.sharders import FusedGreedySharder, make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    Shard,
    ShardingTask,
    UserError,
)

NAMES = ("dim", "lookup", "size_lookup")
SETTINGS = MeasureSettings(1024)


def tasks_of(tables: Sequence[EmbeddingTable], count: int, seed: int = 0) -> list[ShardingTask]:
    rng = np.random.default_rng(seed)
    drawn = [rng.permutation(len(tables))[:12].tolist() for _ in range(count)]
    devices = Device.uniform(3, 2**40)
    return [ShardingTask(tuple(tables[n] for n in some), devices, 1024) for some in drawn]


class Source:
    """Entries that take a while to be planned."""

    def __init__(
        self, pool: SimulatedPool, tasks: Sequence[ShardingTask], seconds: float = 0.0
    ) -> None:
        self.pool, self.tasks, self.seconds, self.taken = pool, tasks, seconds, 0
        self.sharders = {name: make_sharder(name) for name in NAMES}

    def __iter__(self) -> Iterator[PlannedTask]:
        for task in self.tasks:
            self.taken += 1
            self.pool.now += self.seconds
            yield PlannedTask(task, plan_task(self.sharders, task))


def repeats_of(pool: SimulatedPool, seeds: int = 3) -> RepeatedMeasurements:
    return RepeatedMeasurements(
        pool, SETTINGS, evaluation_seeds(seeds), TimingOptions(), notify=cli.note, clock=pool.clock
    )


def evaluate(
    pool: SimulatedPool, source: Source, limits: Limits, begin: int, seeds: int = 3
) -> Evaluation:
    return Evaluator(iter(source), repeats_of(pool, seeds), limits, pool.clock).run(begin)


def ratios(found: Evaluation) -> dict[str, Ratio]:
    pairs = {n: Ratio.of(found.steps_ms[n], found.steps_ms["size_lookup"]) for n in NAMES}
    return {name: ratio for name, ratio in pairs.items() if ratio is not None}


def true_ratio(found: Evaluation, name: str) -> float:
    """On the tasks that were judged."""
    steps_ms: dict[str, list[float]] = {}
    for each in (name, "size_lookup"):
        plans = [outcome.plan for outcome in found.outcomes[each]]
        steps_ms[each] = [
            max(true_ms(s) for s in plan.shards(task) if s is not None)
            for plan, task in zip(plans, found.tasks, strict=True)
            if plan is not None
        ]
    return geometric_mean(steps_ms[name]) / geometric_mean(steps_ms["size_lookup"])


def shards_of(found: Evaluation, names: Sequence[str] = NAMES) -> set[str]:
    return {
        digest
        for name in names
        for outcome, task in zip(found.outcomes[name], found.tasks, strict=True)
        if outcome.plan is not None
        for digest in digests_of(task, outcome.plan)
    }


def test_it_measures_until_all_intervals_are_narrow(
    many_tables: tuple[EmbeddingTable, ...],
) -> None:
    pool = SimulatedPool(repeats=0.04, batches=0.01)
    source = Source(pool, tasks_of(many_tables, 200))
    found = evaluate(pool, source, Limits(0.1, 1e6), begin=3)
    assert found.ended == "all intervals are within +-10.0%"
    assert 3 < len(found.tasks) == source.taken < 200  # some were what was missing, not all
    for name, ratio in ratios(found).items():
        assert ratio.half_width <= 0.1
        assert abs(ratio.value - true_ratio(found, name)) < 0.05
    assert found.repeats == len(pool.order)
    assert found.seconds == found.measuring_seconds == pool.now


def test_at_first_every_shard_is_measured_once(many_tables: tuple[EmbeddingTable, ...]) -> None:
    pool = SimulatedPool(seconds=1.0)
    found = evaluate(pool, Source(pool, tasks_of(many_tables, 4)), Limits(1e-6, 40), begin=4)
    shards = shards_of(found)
    first = pool.order[: len(shards)]
    assert {digest for digest, _ in first} == shards
    assert {seed for _, seed in first} == {0}
    assert len(pool.order) == 40  # and then as long as there is time


def test_tasks_are_measured_again_in_turns_and_with_all_batches(
    many_tables: tuple[EmbeddingTable, ...],
) -> None:
    pool = SimulatedPool(repeats=0.05)
    source = Source(pool, tasks_of(many_tables, 6), seconds=0.0)
    found = evaluate(pool, source, Limits(1e-6, 240), begin=6)
    repeats = [
        {pool.count(digest) for o in outcomes if o.plan for digest in digests_of(task, o.plan)}
        for task, *outcomes in zip(found.tasks, *found.outcomes.values(), strict=True)
    ]
    counts = set.union(*repeats)
    assert max(counts) - min(counts) <= 1  # no task is far ahead of another
    assert min(counts) >= 3
    assert {seed for _, seed in pool.order} == {0, 2, 4}
    for digest in shards_of(found):
        each = [len(pool.kept.get((digest, seed), ())) for seed in (0, 2, 4)]
        assert max(each) - min(each) <= 1


def test_the_seconds_are_kept_and_what_is_left_out_is_told(
    many_tables: tuple[EmbeddingTable, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pool = SimulatedPool(seconds=1.0)
    source = Source(pool, tasks_of(many_tables, 50), seconds=5.0)
    found = evaluate(pool, source, Limits(0.001, 60), begin=8)
    assert 60 <= pool.now <= 66  # what is in flight: a plan, and a visit
    assert 1 < len(found.tasks) < 8
    assert found.ended.startswith("stopped by --seconds 60: the interval of ")
    assert found.ended.endswith(f"; {8 - len(found.tasks)} of 8 tasks were left out")
    assert found.measuring_seconds == len(pool.order) < found.seconds

    brief = SimulatedPool(seconds=1.0)
    with pytest.raises(UserError, match="--seconds 3 were over before all plans of one task"):
        evaluate(brief, Source(brief, tasks_of(many_tables, 3)), Limits(0.01, 3), begin=2)
    assert len(brief.order) == 3

    long = SimulatedPool(seconds=1.0)
    evaluate(long, Source(long, tasks_of(many_tables, 3)), Limits(1e-6, 200), begin=3)
    told = [line for line in capsys.readouterr().out.splitlines() if " of 200 s: " in line]
    assert 3 <= len(told) <= 5


def test_more_tasks_where_tasks_are_what_is_missing(
    many_tables: tuple[EmbeddingTable, ...],
) -> None:
    """Nothing is gained by measuring again what is known to a thousandth."""
    exact = SimulatedPool(repeats=0.001)
    found = evaluate(exact, Source(exact, tasks_of(many_tables, 300)), Limits(0.02, 400), begin=3)
    assert len(found.tasks) > 10
    assert len(exact.order) < 1.2 * len(shards_of(found))
    dear = SimulatedPool(repeats=0.001)  # a task that takes an hour to plan never pays
    source = Source(dear, tasks_of(many_tables, 300), seconds=3600.0)
    found = evaluate(dear, source, Limits(0.02, 3 * 3600.0 + 300), begin=3)
    assert len(found.tasks) == 3


def test_tasks_that_have_an_end(many_tables: tuple[EmbeddingTable, ...]) -> None:
    pool = SimulatedPool(repeats=0.01)
    some = tasks_of(many_tables, 3)
    found = evaluate(pool, Source(pool, some), Limits(0.0005, 2000), begin=5)
    assert found.tasks == some  # five were asked for, there are three
    assert "left out" not in found.ended
    failing = SimulatedPool(repeats=0.01)
    task = some[0]
    alone = evaluate(failing, Source(failing, [task]), Limits(0.01, 50), begin=1)
    assert alone.ended.endswith("noise of one task, which does not generalize to others")


def test_going_on_from_what_is_kept(many_tables: tuple[EmbeddingTable, ...]) -> None:
    pool = SimulatedPool(repeats=0.02, batches=0.01)
    tasks = tasks_of(many_tables, 5)
    first = evaluate(pool, Source(pool, tasks), Limits(1e-6, 150), begin=5)
    before = len(pool.order)
    pool.now = 0.0
    second = evaluate(pool, Source(pool, tasks), Limits(1e-6, 30), begin=5)
    assert second.repeats <= 30  # the first round of it came from the store
    assert len(pool.order) == before + second.repeats
    assert second.outcomes["dim"][0].plan == first.outcomes["dim"][0].plan


def test_a_shard_that_cannot_be_measured_takes_its_plans_out(
    many_tables: tuple[EmbeddingTable, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tasks_of(many_tables, 3)
    plan = make_sharder("dim").shard(tasks[1])
    failing = digests_of(tasks[1], plan)[0]
    pool = SimulatedPool(fails=frozenset([failing]))
    found = evaluate(pool, Source(pool, tasks), Limits(0.01, 120), begin=3)
    costs = [outcome.cost for outcome in found.outcomes["dim"]]
    assert [cost is None for cost in costs] == [False, True, False]
    assert np.isnan(found.steps_ms["dim"][0]).tolist() == [False, True, False]
    assert capsys.readouterr().out.count("note: a shard cannot be measured: it does not fit") == 1


class Stubborn(SimulatedPool):
    """Never repeats a shard with the same index batch."""

    def stream(
        self,
        shards: Sequence[Shard],
        settings: MeasureSettings,
        timing: TimingOptions | None = None,
        retry_failed: bool = False,
        repeats: int = 1,
    ) -> Iterator[tuple[int, Measurement]]:
        return super().stream(shards, settings, timing, retry_failed, 1)


def test_a_pool_that_has_no_more_repeats_ends_it(many_tables: tuple[EmbeddingTable, ...]) -> None:
    pool = Stubborn(repeats=0.02)
    found = evaluate(pool, Source(pool, tasks_of(many_tables, 3)), Limits(1e-6, 1e6), begin=3)
    assert found.ended.startswith("there are no more tasks, and repeats would not help")
    assert max(pool.count(digest) for digest in shards_of(found)) == 3


def test_batches_that_judge_never_choose() -> None:
    for count in range(1, 20):
        judging, verifying = evaluation_seeds(count), selection_seeds(count)
        assert len(set(judging)) == len(set(verifying)) == count
        assert not set(evaluation_seeds(50)) & set(verifying)


def test_repeats_over_batches(tables: tuple[EmbeddingTable, ...]) -> None:
    task = tasks_of(tables, 1)[0]
    plan = make_sharder("size_lookup").shard(task)
    pool = SimulatedPool(repeats=0.02, batches=0.02)
    repeats = repeats_of(pool)
    shards = [shard for shard in plan.shards(task) if shard is not None]
    assert repeats.wanted(shards[0]) == 1
    assert repeats.measure(shards, 5)
    for shard in shards:
        assert [len(pool.kept[shard.digest, seed]) for seed in (0, 2, 4)] == [2, 2, 1]
    assert repeats.wanted(shards[0]) == 6
    assert repeats.repeats == len(pool.order) == 15
    assert not repeats.measure(shards, 6, deadline=pool.now)
    known = repeats.known()
    for shard in shards:
        means = [np.mean(pool.kept[shard.digest, seed]) for seed in (0, 2, 4)]
        assert known[shard.digest].mean_ms.both == pytest.approx(np.mean(means))
    cost = repeats.plan_cost(task, plan)
    assert cost is not None
    assert cost.step_ms == pytest.approx(max(k.mean_ms.both for k in known.values()))


def test_a_plan_that_is_judged_waits_for_its_link(tables: tuple[EmbeddingTable, ...]) -> None:
    bare = tasks_of(tables, 1)[0]
    link = Link(1e8, 1e-3)
    plan = make_sharder("size_lookup").shard(bare)
    found = {}
    for name, objective in (("step", Objective()), ("linked", Objective("operators", link))):
        task = replace(bare, objective=objective)
        pool = SimulatedPool(repeats=0.01)
        entry = PlannedTask(task, {"size_lookup": Outcome(plan)})
        found[name] = Evaluator(iter([entry]), repeats_of(pool), Limits(), pool.clock).run(1)
    columns = np.array(plan.columns(bare), float)
    # Both all-to-alls: 1 ms of latency, and what the device with most columns sends the other two.
    exchanges = 2 * (1 + 1e3 * (4 * 1024 / 3 / 1e8) * 2 * columns.max())
    apart, linked = (found[name].steps_ms["size_lookup"] for name in ("step", "linked"))
    assert linked == pytest.approx(apart + exchanges)
    costs = [found[name].outcomes["size_lookup"][0].cost for name in ("step", "linked")]
    assert costs[0] is not None
    assert costs[1] is not None
    assert costs[1].step_ms == pytest.approx(costs[0].step_ms + exchanges)
    assert linked.mean() == pytest.approx(costs[1].step_ms, rel=0.02)


def test_no_plan_of_whole_tables_undercuts_the_bound(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    bare = tasks_of(tables, 1)[0]
    for objective in (
        Objective("compute"),
        Objective("operators"),
        Objective("operators", Link(1e8, 1e-3)),
    ):
        task = replace(bare, objective=objective)
        (bound,) = bounds_ms(oracle, [task])
        steps = [
            oracle.plan_cost(sharder.shard(task), task).step_ms
            for sharder in (make_sharder("dim"), FusedGreedySharder(oracle))
        ]
        assert 0.8 * min(steps) < bound <= min(steps) * (1 + 1e-6)  # single precision


def test_one_plan(tables: tuple[EmbeddingTable, ...]) -> None:
    task = tasks_of(tables, 1)[0]
    plan = make_sharder("size_lookup").shard(task)
    slowest = max(true_ms(shard) for shard in plan.shards(task) if shard is not None)
    found = measure_step({"": repeats_of(SimulatedPool(repeats=0.01))}, task, plan, repeats=3)
    assert found is not None
    low, high = np.quantile(found, (0.025, 0.975))
    assert low < found.mean() < high
    assert found.mean() == pytest.approx(slowest, rel=0.03)
    fails = frozenset(digests_of(task, plan)[:1])
    assert measure_step({"": repeats_of(SimulatedPool(fails=fails))}, task, plan, repeats=3) is None
