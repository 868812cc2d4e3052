"""What training takes beside operators: fitted, saved, and priced alike everywhere."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from autoshard.benchmark import ReferenceLevel
from autoshard.benchmark.rehearsals.kept import RehearsedPlan
from autoshard.cost_model import (
    CostModel,
    EstimatedCosts,
    StepPredictor,
    load_model,
    save_model,
    slowest_by_phase,
)
from autoshard.cost_model.learning.overheads import fit_copies, fit_overhead, fit_rows, report_on
from autoshard.cost_model.step.common_price import CommonPrice
from autoshard.cost_model.step.option_overheads import (
    HOT_OVERHEAD,
    CopyOverhead,
    RowOverhead,
    copy_loads,
)
from autoshard.cost_model.step.overhead import DirectionOverhead, StepOverhead, loads_of, splits_of
from autoshard.sharders import LocalSearchSharder, SharderContext, make_sharder, next_steps
from autoshard.sharders.heuristics.random_plans import copying_plans, random_plans, row_wise_plans
from autoshard.workload import (
    Device,
    Link,
    Objective,
    ShardingPlan,
    ShardingTask,
    UserError,
    load_tables,
)
from autoshard.workload.tasks.rules import Rule
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption, columns_task

OVERHEAD = StepOverhead(
    forward=DirectionOverhead(1.1, 5.0, 0.8, 60.0, 1.5),
    backward=DirectionOverhead(1.2, 2.0, 0.3, 20.0, 0.4),
    shared_lookup_ns=4.0,
    shared_output_ns=3.0,
    shared_feature_ms=0.02,
    regrouped_ns=1.5,
    split_sample_ns=60.0,
    shared_ms=0.7,
)
COPIES = CopyOverhead(1.5, 6.0, 0.2, 1.0, 1.8)
STEP = Objective("step", dense_ms=2.5)


def task_of(seed: int = 1, ranks: int = 3, batch_size: int = 1024) -> ShardingTask:
    tables = load_tables(f"synthetic:12:{seed}:small")
    return ShardingTask(tables, Device.uniform(ranks, 2**40), batch_size, objective=STEP)


@pytest.fixture(scope="module")
def model() -> CostModel:
    return replace(load_model("cpu"), overhead=OVERHEAD)


def test_a_device_takes_its_operator_and_what_comes_with_its_load(model: CostModel) -> None:
    task = task_of()
    operators = EstimatedCosts(model, 1024)
    training = EstimatedCosts(model.for_objective(STEP), 1024)
    for plan in islice(random_plans(task), 3):
        shards = [shard for shard in plan.shards(task) if shard is not None]
        every = zip(shards, operators.costs(shards), training.costs(shards), strict=True)
        for shard, alone, with_rest in every:
            both = np.array([alone.forward_ms, alone.backward_ms])
            expected = OVERHEAD.in_training(both, loads_of(shard.pieces, 1024))
            assert (with_rest.forward_ms, with_rest.backward_ms) == pytest.approx(
                tuple(expected),
                rel=5e-3,  # networks count a column and a lookup more
            )
            assert with_rest.spread < alone.spread  # what comes with the load is known


def test_scenarios_and_reports_agree_with_the_mean(model: CostModel) -> None:
    task, oracle = task_of(), EstimatedCosts(model.for_objective(STEP), 1024)
    for plan in islice(random_plans(task, seed=1), 3):
        splits = splits_of(plan.placed(task))
        of_splits = OVERHEAD.split_cost(task.columns, 1024, 3).ms(splits)
        assert oracle.common_ms(task, plan) - oracle.common_ms(task) == pytest.approx(of_splits)
        cost = oracle.plan_cost(plan, task)
        assert cost.common_ms == oracle.common_ms(task, plan)
        assert cost.step_ms == pytest.approx(oracle.step_ms(plan, task), rel=1e-4)
        found = StepPredictor(oracle, task).of(plan)
        assert found.expected_ms == pytest.approx(cost.step_ms, rel=0.1)
        assert found.drawn_ms.mean() == pytest.approx(found.expected_ms, rel=0.1)


def test_inputs_come_over_the_link_before_the_forward_pass(model: CostModel) -> None:
    """Ids and lengths of the other ranks' samples, 8 bytes each; a pipeline gets them meanwhile."""
    over, task = replace(STEP, link=Link(1e8, 1e-3)), task_of()
    model = replace(model, overhead=replace(OVERHEAD, copies=COPIES))
    plain, linked = (EstimatedCosts(model.for_objective(over, ranks), 1024) for ranks in (1, 3))
    shards = [shard for shard in next(random_plans(task)).shards(task) if shard is not None]
    for shard, without, found in zip(
        shards, plain.costs(shards), linked.costs(shards), strict=True
    ):
        lookups, _, bags, _ = loads_of(shard.pieces, 1024)
        expected = 1e3 * 8 * (lookups + bags) * 2 / 3 / 1e8
        assert found.forward_ms - without.forward_ms == pytest.approx(expected, rel=5e-3)
        assert found.backward_ms == pytest.approx(without.backward_ms)
    assert linked.common_ms(task) - plain.common_ms(task) == pytest.approx(3.0)
    assert linked.common_ms(task, all_copied(task)) == plain.common_ms(task, all_copied(task))
    linked.check(replace(task, objective=over))
    with pytest.raises(UserError, match=r"of 3 devices over 0\.1 GB/s, 1000 us, the task"):
        linked.check(task)
    pipelined = model.for_objective(replace(over, name="pipelined"), 3)
    assert EstimatedCosts(pipelined, 1024).costs(shards) == plain.costs(shards)


def all_copied(task: ShardingTask) -> ShardingPlan:
    names = (table.name for table in task.tables)
    return ShardingPlan((), len(task.devices), dict.fromkeys(names, DATA_PARALLEL))


def beside_copies_and_rows(task: ShardingTask, plan: ShardingPlan) -> float:
    """What all devices bear by a plan, but for what copies and rows themselves take."""
    without = replace(OVERHEAD, copies=CopyOverhead(0, 0, 0, 0, 0), rows=RowOverhead(0, 0))
    return CommonPrice(without, task).plan_ms(plan)


def test_hot_rows_add_copies_and_the_telling_apart(model: CostModel, copying: CostModel) -> None:
    task, oracle = task_of(), EstimatedCosts(copying, 1024)
    table, option = task.tables[0], ShardingOption(hot_rows=50)
    plan = next(random_plans(task))
    # As if hot rows were a table of their own, which is copied.
    (hot,), cold = option.copies(table, 1024), option.held(table, 1024)
    two = replace(task, tables=(cold, hot, *task.tables[1:]))
    apart = replace(plan, options={hot.name: DATA_PARALLEL})
    plan = replace(plan, options={table.name: option})
    telling_ms = HOT_OVERHEAD.ms(task, {table.name: 50})
    assert telling_ms > 0
    assert oracle.step_ms(plan, task) == pytest.approx(oracle.step_ms(apart, two) + telling_ms)
    assert oracle.common_ms(task, plan) - beside_copies_and_rows(two, apart) == pytest.approx(
        telling_ms + COPIES.start_ms + COPIES.each_ms(two, [hot])[0]
    )
    found = StepPredictor(oracle, task).of(plan)
    assert found.expected_ms == pytest.approx(oracle.step_ms(plan, task), rel=0.1)
    counted = replace(task, objective=Objective())
    with pytest.raises(
        UserError, match=r"hot rows of t0+ are copied to all devices, and objective"
    ):
        EstimatedCosts(model.for_objective(Objective()), 1024).plan_cost(plan, counted)


def test_operators_cost_what_they_did(model: CostModel) -> None:
    task = replace(task_of(), objective=Objective())
    plan = next(random_plans(task))
    before = EstimatedCosts(replace(model, overhead=None), 1024).plan_cost(plan, task)
    now = EstimatedCosts(model.for_objective(task.objective), 1024).plan_cost(plan, task)
    assert now == before


def test_the_price_must_be_that_of_the_objective(model: CostModel) -> None:
    with pytest.raises(UserError, match="objective is step, the oracle prices operators"):
        EstimatedCosts(model, 1024).check(task_of())
    with pytest.raises(UserError, match="does not know what training takes beside operators"):
        replace(model, overhead=None).for_objective(STEP)


def test_it_is_saved_with_the_model(model: CostModel, tmp_path: Path) -> None:
    save_model(model, tmp_path / "model")
    found = load_model(tmp_path / "model")
    assert found.overhead == OVERHEAD
    assert not found.in_training


def test_coefficients_are_found_again() -> None:
    rng, rehearsed, operators = np.random.default_rng(0), [], []
    for seed, ranks, batch_size in (
        (1, 2, 1024),
        (2, 3, 4096),
        (3, 4, 512),
        (4, 2, 8192),
        (5, 3, 64),
    ):
        task = replace(task_of(seed, ranks, batch_size), objective=Objective())
        for plan in islice(random_plans(task, seed), 4):
            loads = np.stack([
                loads_of(() if shard is None else shard.pieces, batch_size)
                for shard in plan.shards(task)
            ])  # fmt: skip
            alone = loads[:, -1:] * rng.uniform(1, 30, (ranks, 2))
            passes = np.stack(
                [OVERHEAD.in_training(*each) for each in zip(alone, loads, strict=True)]
            )
            splits = splits_of(plan.placed(task))
            common_ms = CommonPrice(OVERHEAD, task).whole_ms(splits)
            rest = replace(OVERHEAD, shared_lookup_ns=0.0)
            rest_ms = CommonPrice(rest, task).whole_ms(splits)
            common = np.tile([common_ms - rest_ms, rest_ms], (ranks, 1))
            step_ms = passes.max(0).sum() + common_ms
            parts = np.hstack([passes, common]) * rng.normal(1, 1e-4, (ranks, 4))
            rehearsed.append(RehearsedPlan(task, plan, parts, step_ms))
            operators.append(alone)
    found = fit_overhead(rehearsed, operators)
    assert found.rates == pytest.approx(OVERHEAD.rates, rel=0.05, abs=1e-7)
    report = report_on(found, rehearsed, operators)
    assert (report.ratio, report.deviation) == pytest.approx((1, 0), abs=0.01)
    assert sum(report.shares.values()) == pytest.approx(1)
    with pytest.raises(UserError, match=r"5 plans were rehearsed: .* needs at least 8"):
        fit_overhead(rehearsed[:5], operators[:5])


def test_another_machine_takes_as_much_longer_as_its_reference() -> None:
    rows, level = RowOverhead(2.0, 0.3, 0.4), ReferenceLevel(0.3, 4.0)
    known = replace(OVERHEAD, copies=COPIES, rows=rows, reference_level=level)
    slow = known.at_level(ReferenceLevel(0.75, 4.0))
    loads, operators_ms = np.array([9e5, 3e5, 4e4, 1.0]), np.array([6.0, 9.0])
    for overhead, factor in ((known, 1.0), (slow, 2.5)):
        beside = known.in_training(np.zeros(2), loads)
        together = known.rates[:, 0] * operators_ms + factor * beside
        assert overhead.in_training(operators_ms, loads) == pytest.approx(together)
    task = task_of()
    names = [table.name for table in task.tables]
    copied = dict.fromkeys(names[:4], DATA_PARALLEL)
    plans = [
        ShardingPlan.table_wise(task, [n % 3 for n in range(12)]),
        next(iter(random_plans(task, 0))),  # with splits
        replace(ShardingPlan.table_wise(columns_task(task, copied), [0] * 8), options=copied),
    ]
    for plan in plans:
        found = [CommonPrice(each, task).plan_ms(plan) - STEP.dense_ms for each in (known, slow)]
        assert found[1] == pytest.approx(2.5 * found[0])
    assert slow.of_rows.ms(task, {names[0]: 3}) == pytest.approx(2.5 * rows.ms(task, {names[0]: 3}))
    assert splits_of(plans[1].placed(task)) > 0
    assert slow.at_level(level).rates == pytest.approx(known.rates)
    assert StepOverhead.from_json(slow.to_json()) == slow
    assert known.at_level(None) is known
    assert known.at_level(ReferenceLevel(0.75, 4.0, method=1)) is known  # not comparable
    assert OVERHEAD.at_level(level) is OVERHEAD  # of which it is not known


def test_a_search_makes_no_split_that_costs_more_than_it_gains(model: CostModel) -> None:
    """What a split adds on all devices is seen by the search, not only by reports."""
    tables = load_tables("zipf:6:1")  # for 4 devices: whole, they cannot be balanced
    by_columns = Rule("not_row_wise", tuple(table.name for table in tables))
    task = replace(task_of(ranks=4), tables=tables, rules=(by_columns,))
    free = replace(OVERHEAD, split_sample_ns=0.0, regrouped_ns=0.0)
    each = replace(free, split_sample_ns=1e6)  # 256 ms for each split
    first = replace(free, regrouped_ns=1e5)  # some 15 s for the first one
    splits = []
    for overhead in (free, each, first):
        oracle = EstimatedCosts(replace(model, overhead=overhead).for_objective(STEP), 1024)
        plan = make_sharder("cost_fused_search", SharderContext(oracle)).shard(task)
        splits.append(splits_of(plan.placed(task)))
        whole = LocalSearchSharder(oracle, split=False).shard(task)
        assert oracle.step_ms(plan, task) <= oracle.step_ms(whole, task) * (1 + 1e-3)
    assert splits[0] > 0
    assert splits[1:] == [0, 0]


@pytest.fixture(scope="module")
def copying(model: CostModel) -> CostModel:
    return replace(model, overhead=replace(OVERHEAD, copies=COPIES)).for_objective(STEP)


def copying_plan(task: ShardingTask, count: int, seed: int = 0) -> ShardingPlan:
    """A random plan with copies of the first tables."""
    copied = [table.name for table in task.tables[:count]]
    plan = next(random_plans(task, seed))
    kept = tuple(each for each in plan.placements if each.table not in copied)
    return ShardingPlan(kept, plan.num_devices, dict.fromkeys(copied, DATA_PARALLEL))


def test_copies_cost_the_same_on_all_devices_by_hand() -> None:
    task = replace(task_of(ranks=4), objective=replace(STEP, link=Link(1e9)))
    first, second = task.tables[:2]
    by_hand = COPIES.start_ms
    for table in (first, second):
        lookups, weights = 256 * table.pooling_factor, table.rows * table.dim
        by_hand += 1e-6 * (
            6.0 * lookups + 0.2 * lookups * table.dim + 1.0 * 256 * table.dim + 1.8 * weights
        )
        by_hand += 1e3 * 2 * 3 / 4 * 4 * weights / 1e9  # each rank sends three quarters twice
    assert COPIES.ms(task, [first, second]) == pytest.approx(by_hand)
    assert COPIES.ms(task, []) == 0


@pytest.mark.parametrize("count", [1, 5, 12])
def test_a_plan_with_copies_costs_the_others_plan_and_the_copies(
    copying: CostModel, count: int
) -> None:
    task, oracle = task_of(), EstimatedCosts(copying, 1024)
    plan = copying_plan(task, count)
    sharded, rest = replace(plan, options={}), plan.columns_task(task)
    copies_ms = COPIES.ms(task, task.tables[:count])
    step_ms = oracle.step_ms(plan, task)
    # Beside copies all outputs are put in order once, whether others are split or not.
    ordered = task.columns if rest.tables else 0
    order_ms = 1e-6 * OVERHEAD.regrouped_ns * 1024 / 3 * ordered
    assert step_ms == pytest.approx(oracle.step_ms(sharded, rest) + copies_ms + order_ms)
    cost = oracle.plan_cost(plan, task)
    assert cost.step_ms == pytest.approx(step_ms, rel=1e-4)
    assert [device.memory_bytes for device in cost.devices] == list(plan.device_bytes(task))
    assert all(device.tables >= count for device in cost.devices)
    predictor = StepPredictor(oracle, task)
    found = predictor.of(plan)
    assert found.expected_ms == pytest.approx(predictor.expected_of(plan))
    assert found.expected_ms == pytest.approx(step_ms, rel=0.1)
    low, high = found.over(predictor.of(copying_plan(task, count, 1))).low, found.interval_ms[1]
    assert low > 0
    assert high >= found.expected_ms


def test_copies_are_priced_only_where_their_cost_is_known(model: CostModel) -> None:
    task = task_of()
    plan = copying_plan(task, 3)
    with pytest.raises(UserError, match="t00 is copied to all devices, and the cost model"):
        EstimatedCosts(model.for_objective(STEP), 1024).plan_cost(plan, task)
    alone = replace(task, objective=Objective())
    with pytest.raises(UserError, match="copied to all devices, and objective operators counts"):
        EstimatedCosts(model, 1024).plan_cost(plan, alone)


def test_coefficients_of_copies_are_found_again(tmp_path: Path, copying: CostModel) -> None:
    rng, rehearsed, operators = np.random.default_rng(0), [], []
    known = replace(OVERHEAD, copies=COPIES)
    for seed, ranks, batch_size in ((1, 2, 1024), (2, 3, 4096), (3, 4, 8192), (4, 2, 8192)):
        task = replace(task_of(seed, ranks, batch_size), objective=Objective())
        for plan in islice(copying_plans(random_plans(task, seed), task, rng), 6):
            loads = np.stack([
                loads_of(() if shard is None else shard.pieces, batch_size)
                for shard in plan.shards(task)
            ])  # fmt: skip
            alone = loads[:, -1:] * rng.uniform(1, 30, (ranks, 2))
            each = zip(alone, loads, strict=True)
            passes = np.stack([OVERHEAD.in_training(*one) for one in each])
            common_ms = beside_copies_and_rows(task, plan)
            step_ms = (
                passes.max(0).sum()
                + common_ms
                + COPIES.ms(task, [table for table in task.tables if table.name in plan.copied])
            )
            rehearsed.append(RehearsedPlan(task, plan, np.hstack([passes, passes]), step_ms))
            operators.append(alone)
    found = fit_copies(OVERHEAD, rehearsed, operators).copies
    assert found is not None
    for name, value in vars(COPIES).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02, abs=1e-6), name
    report = report_on(known, rehearsed, operators)
    assert (report.ratio, report.deviation) == (pytest.approx(1), pytest.approx(0, abs=1e-9))
    # Where all plans copy the same tables, costs of lookups and of weights are not identifiable:
    # their ratio is that of another machine.
    elsewhere = replace(OVERHEAD, copies=COPIES.scaled(3.0))
    alike = fit_copies(elsewhere, rehearsed[:1] * 8, operators[:1] * 8).copies
    assert alike is not None
    assert alike.rates == pytest.approx(COPIES.rates, rel=0.01)
    # Where plans tell them apart, another machine's count little.
    heavier = replace(COPIES, weight_ns=3 * COPIES.weight_ns)
    own = fit_copies(replace(OVERHEAD, copies=heavier), rehearsed, operators).copies
    assert own is not None
    assert own.weight_ns - COPIES.weight_ns < 0.15 * (heavier.weight_ns - COPIES.weight_ns)
    with pytest.raises(UserError, match="3 plans with copies were rehearsed"):
        fit_copies(OVERHEAD, rehearsed[:3], operators[:3])
    save_model(copying, tmp_path / "model")
    assert load_model(tmp_path / "model").overhead == known


def test_coefficients_of_rows_are_found_again(tmp_path: Path, copying: CostModel) -> None:
    rng, rehearsed, operators = np.random.default_rng(0), [], []
    rows = RowOverhead(1.5, 0.02, 0.1)
    known = replace(OVERHEAD, copies=COPIES, rows=rows)
    for seed, ranks, batch_size in ((1, 2, 1024), (2, 3, 4096), (3, 4, 8192), (4, 2, 8192)):
        task = replace(task_of(seed, ranks, batch_size), objective=Objective())
        for plan in islice(row_wise_plans(random_plans(task, seed), task, rng), 6):
            loads = np.stack([
                loads_of(() if shard is None else shard.pieces, batch_size)
                for shard in plan.shards(task)
            ])  # fmt: skip
            alone = loads[:, -1:] * rng.uniform(1, 30, (ranks, 2))
            each = zip(alone, loads, strict=True)
            passes = np.stack([OVERHEAD.in_training(*one) for one in each])
            step_ms = passes.max(0).sum() + CommonPrice(known, task).plan_ms(plan)
            rehearsed.append(RehearsedPlan(task, plan, np.hstack([passes, passes]), step_ms))
            operators.append(alone)
    found = fit_rows(OVERHEAD, rehearsed, operators).rows
    assert found is not None
    for name, value in vars(rows).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02, abs=1e-6), name
    report = report_on(known, rehearsed, operators)
    assert (report.ratio, report.deviation) == (pytest.approx(1), pytest.approx(0, abs=1e-9))
    with pytest.raises(UserError, match="3 plans with blocks of rows were rehearsed"):
        fit_rows(OVERHEAD, rehearsed[:3], operators[:3])
    save_model(replace(copying, overhead=known), tmp_path / "model")
    assert load_model(tmp_path / "model").overhead == known
    # Where it was not measured, it follows from the passes.
    starts_ms = OVERHEAD.forward.start_ms + OVERHEAD.backward.start_ms
    assert OVERHEAD.of_rows.start_ms == pytest.approx(starts_ms)


def test_loads_of_copies_are_of_a_rank_s_own_samples() -> None:
    (table,) = load_tables("synthetic:1:1:small")
    loads = copy_loads([table], 1000, 4)
    lookups = 250 * table.pooling_factor
    expected = [lookups, lookups * table.dim, 250 * table.dim, table.rows * table.dim]
    np.testing.assert_allclose(loads, [expected])


def test_without_columns_there_are_no_all_to_alls(copying: CostModel) -> None:
    linked = replace(task_of(), objective=replace(STEP, link=Link(1e9, 1e-3)))
    oracle = EstimatedCosts(copying, 1024)
    plan = copying_plan(linked, len(linked.tables))
    step_ms = OVERHEAD.shared_ms + STEP.dense_ms + COPIES.ms(linked, linked.tables)
    assert oracle.step_ms(plan, linked) == pytest.approx(step_ms)
    assert oracle.plan_cost(plan, linked).step_ms == pytest.approx(step_ms)
    assert StepPredictor(oracle, linked).of(plan).interval_ms == pytest.approx([step_ms] * 2)


def test_what_is_not_known_of_copies_is_in_the_interval_and_cancels_between_plans(
    copying: CostModel,
) -> None:
    assert copying.overhead is not None
    unsure = replace(COPIES, deviation=0.1)
    model = replace(copying, overhead=replace(copying.overhead, copies=unsure))
    task = task_of()
    plan = copying_plan(task, len(task.tables))
    predictor = StepPredictor(EstimatedCosts(model, 1024), task)
    found, copies_ms = (
        predictor.of(plan),
        COPIES.ms(task, [table for table in task.tables if table.name in plan.copied]),
    )
    low, high = found.interval_ms
    assert high - low == pytest.approx(2 * 1.645 * 0.1 * copies_ms, rel=0.2)
    assert found.drawn_ms.mean() == pytest.approx(found.expected_ms, rel=0.03)
    than = found.over(predictor.of(plan))
    assert (than.low, than.high) == (1.0, 1.0)


def test_plans_with_copies_are_explained_and_improved(copying: CostModel) -> None:
    task, oracle = task_of(), EstimatedCosts(copying, 1024)
    plan = copying_plan(task, 4)
    predictor = StepPredictor(oracle, task)
    steps = next_steps(oracle, task, plan)
    assert steps
    for step in steps:
        assert step.plan.copied == plan.copied
        step.plan.check(task)
        assert step.expected_ms == pytest.approx(predictor.expected_of(step.plan), rel=0.02)
        assert step.expected_ms < predictor.expected_of(plan)
    phases = slowest_by_phase(oracle, plan, task)
    assert not {part.piece.table.name for phase in phases for part in phase.pieces} & {*plan.copied}
    alone = copying_plan(task, 12)
    assert slowest_by_phase(oracle, alone, task) == ()
    assert next_steps(oracle, task, alone) == []
