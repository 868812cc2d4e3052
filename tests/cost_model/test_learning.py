"""Calibration, links, plans, and what is worth measuring."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from formula import REFERENCE_LEVEL, formula_exchanges, measurement

from autoshard.benchmark import Exchange, ReferenceLevel
from autoshard.benchmark.measurement import ExchangeKey
from autoshard.cost_model import (
    CostDataset,
    CostModel,
    DataError,
    EstimatedCosts,
    OutsideTraining,
    load_model,
)
from autoshard.cost_model.learning import calibration
from autoshard.cost_model.learning.calibration import MIN_CALIBRATION_SHARDS, calibrate
from autoshard.cost_model.learning.evaluation import Score, evaluations_per_second
from autoshard.cost_model.learning.links import exchange_ms, fit_links, link_error
from autoshard.cost_model.pricing.proposals import compare_predictions, select_shards_to_measure
from autoshard.sharders import AloneGreedySharder, LocalSearchSharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    OperatorOptions,
    Shard,
    ShardingPlan,
    ShardingTask,
    UserError,
    random_shards,
    random_tasks,
)
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.tables.parts import Part, part_of_shard
from autoshard.workload.tasks.links import all_reduce_ms

OTHER = OperatorOptions("fp16")


def slower(shards: list[Shard]) -> CostDataset:
    """Another machine: lookups cost two and a half times as much."""
    data = CostDataset.of(
        measurement(s, dearer=lambda table: 2.5, noise=0.02, operator=OTHER) for s in shards
    )
    return replace(data, hardware="another machine")


def test_calibration_needs_a_few_shards_of_another_machine(
    model: CostModel,
    many_tables: tuple[EmbeddingTable, ...],
    formula_parts: dict[Part, CostDataset],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = random_shards(many_tables, 400, 20, seed=21)
    test = slower([shard for shard in shards if part_of_shard(shard) == "test"])
    few = slower([shard for shard in shards if part_of_shard(shard) == "train"][:50])
    monkeypatch.setattr(calibration, "_FOLDS", 2)  # which are for the uncertainty
    calibrated = calibrate(model, few)
    scores = [
        Score.of(m.compute.predict(test.shards, test.batch_sizes).total_ms.double().numpy(),
                 test.totals_ms)
        for m in (model, calibrated)
    ]  # fmt: skip
    assert scores[0].median_error > 0.3
    assert scores[1].median_error < 0.2 * scores[0].median_error
    assert calibrated.provenance.hardware == "another machine"
    assert calibrated.provenance.operator == OTHER
    (cost,) = EstimatedCosts(calibrated, 1024).costs([test.shards[0]])
    assert cost.spread < 0.5
    assert calibrated.links == {}  # it was another machine's
    few_here = replace(few, hardware="a machine").subset(range(MIN_CALIBRATION_SHARDS))
    monkeypatch.setattr(calibration, "_OPTIONS", replace(calibration._OPTIONS, steps=1))
    assert calibrate(model, few_here).links == model.links
    with pytest.raises(DataError, match="too few to calibrate with"):
        calibrate(model, few.subset(range(5)))


def test_a_link_is_near_to_the_all_to_alls_that_were_measured(
    model: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    """Of the slowest rank the formula says 0.05 ms a rank, and about 2e-3 ms a column."""
    oracle = EstimatedCosts(model, 1024)
    unseen = formula_exchanges(many_tables[50:], 20)
    for exchange in unseen:
        measured_ms = (max(exchange.forward_ms) + max(exchange.backward_ms)) / 2
        linked = oracle.exchange(exchange.key.dims, Objective("compute"))
        assert linked is not None
        assert max(linked) == pytest.approx(measured_ms, rel=0.35)
        named = Objective("operators", oracle.link(exchange.key.ranks))
        assert oracle.exchange(exchange.key.dims, named) == linked
    error = link_error(unseen)
    assert error is not None
    assert error < 0.3
    assert oracle.link(1) is None
    assert oracle.link(7) is None  # more ranks than devices
    assert oracle.exchange([64] * 12, Objective("compute")) is None
    assert EstimatedCosts(replace(model, links={}), 1024).link(2) is None


def test_a_known_link_is_found_again() -> None:
    """Ranks that share a device are left aside."""
    link = Link(2e9, 3e-4)
    found = []
    for number, dims in enumerate(((8, 8), (64, 16), (512, 8), (30, 70), (256, 256), (9, 800))):
        price = StepPrice.of(Objective("operators", link), 1024, 2, float(sum(dims)))
        times = tuple(price.exchange_ms(np.array(dims, dtype=float)).tolist())
        key = ExchangeKey(dims, 1024, 2)
        found.append(Exchange(key, "hw", "v", times, times, 0.01, 20, float(number)))
    for columns in (8, 64, 512):  # half as fast around rings, which start five times as late
        took = (all_reduce_ms(link, 2, 2 * 4 * 1024 * columns, starts=5),) * 2
        key = ExchangeKey((columns, columns), 1024, 2, collective="all_reduce")
        found.append(Exchange(key, "hw", "v", (0.0, 0.0), took, 0.01, 20, 9.0))
    sharing = replace(found[0], key=ExchangeKey((8,) * 5, 1024, 2), forward_ms=(99.0,) * 5)
    (only,) = fit_links([*found, sharing]).items()
    assert only[0] == 2
    assert only[1].bytes_s == pytest.approx(link.bytes_s, rel=1e-2)
    assert only[1].latency_s == pytest.approx(link.latency_s, rel=1e-2)
    assert only[1].ring(2).bytes_s == pytest.approx(link.bytes_s / 2, rel=1e-2)
    assert only[1].ring(2).latency_s == pytest.approx(5 * link.latency_s, rel=1e-2)
    too_few = fit_links(found[:-1])[2]
    assert only[1] == too_few.with_rings(only[1].ring(2), 2)
    assert too_few.ring(2) == too_few
    assert link_error([sharing]) is None
    assert fit_links(found[2:]) == {}  # too few: others than all-to-alls do not count
    flat = [replace(e, forward_ms=(1.0, 1.0), backward_ms=(1.0, 1.0)) for e in found]
    assert fit_links(flat) == {}  # more columns take no longer


def test_a_latency_at_one_number_of_ranks_is_that_of_others() -> None:
    link, found = Link(2e9, 3e-4), []
    for collective, took_ms in (
        ("all_to_all", lambda columns: exchange_ms((columns,) * 4, 1024, link)),
        ("all_reduce", lambda columns: all_reduce_ms(link, 4, 4 * 1024 * columns, starts=2)),
    ):
        for columns in (16, 64, 128, 256, 512):
            took = (took_ms(columns),) * 4
            key = ExchangeKey((columns,) * 4, 1024, 4, collective=collective)  # type: ignore[arg-type]
            found.append(Exchange(key, "hw", "v", took, took, 0.01, 20, 9.0))
    for fitted in fit_links(found).values():
        assert isinstance(fitted, Link)
        assert fitted.latency_s == pytest.approx(3e-4, rel=1e-2)
        assert fitted.ring_latency_s == pytest.approx(6e-4, rel=1e-2)


def test_both_levels_of_a_network_are_found_again() -> None:
    network = Network(Link(2e9, 1e-4, 1e9, 5e-4), Link(1e8, 1e-3, 5e7, 3e-3), 2)
    found = []
    for ranks, nodes in ((2, ()), (4, (0, 0, 1, 1))):
        for columns in (16, 64, 128, 256, 512):
            took = (exchange_ms((columns,) * ranks, 1024, network),) * ranks
            key = ExchangeKey((columns,) * ranks, 1024, 4, nodes)
            found.append(Exchange(key, "hw", "v", took, took, 0.01, 20, 9.0))
            took = (all_reduce_ms(network, ranks, 4 * 1024 * columns, starts=1),) * ranks
            key = replace(key, collective="all_reduce")
            found.append(Exchange(key, "hw", "v", (0.0,) * ranks, took, 0.01, 20, 9.0))
    links = fit_links(found)
    assert links[2] == network.inside
    fitted = links[4]
    assert isinstance(fitted, Network)
    for old, new in ((network.inside, fitted.inside), (network.between, fitted.between)):
        assert new.bytes_s == pytest.approx(old.bytes_s, rel=1e-2)
        assert new.ring_bytes_s == pytest.approx(old.ring_bytes_s, rel=1e-2)
        assert new.ring_latency_s == pytest.approx(old.ring_latency_s, rel=1e-2)


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OtherHardware")
def test_a_network_of_all_to_alls_from_before_becomes_the_link_that_it_implied() -> None:
    """As the shipped model had it before links took its place."""
    assert load_model("cpu").links == {2: Link(2.03e9, 2.34e-4)}


def test_whole_plans_are_priced(
    model: CostModel, oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    task = ShardingTask(tables[:9], Device.uniform(4, 2**40), 1024)
    plan = ShardingPlan.table_wise(task, [0, 0, 0, 1, 1, 1, 2, 2, 2])
    cost = oracle.plan_cost(plan, task)
    shards = [shard for shard in plan.shards(task) if shard is not None]
    assert [d.compute_ms for d in cost.devices[:3]] == pytest.approx(
        [c.total_ms for c in oracle.costs(shards)]
    )
    assert cost.devices[3].compute_ms == 0
    assert all(device.forward_exchange_ms > 0 for device in cost.devices)
    silent = EstimatedCosts(replace(model, links={}), 1024)
    assert silent.plan_cost(plan, task).devices[0].forward_exchange_ms == 0
    with pytest.raises(UserError, match="batch size is 512, the oracle's is 1024"):
        oracle.plan_cost(plan, replace(task, batch_size=512))
    with pytest.raises(UserError, match="weights is fp16"):
        LocalSearchSharder(oracle).shard(replace(task, operator=OTHER))
    assert oracle.costs([]) == []
    with pytest.raises(UserError, match="at least 1"):
        EstimatedCosts(model, 0)


def test_features_of_a_table_widen_its_all_to_alls(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    """Each feature's output is sent, whatever the table's own columns are."""
    spent = []
    for features in (1, 4):
        shared = [replace(table, features=features) for table in tables[:6]]
        task = ShardingTask(tuple(shared), Device.uniform(2, 2**40), 1024)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OutsideTraining)  # it learned of plain tables alone
            cost = oracle.plan_cost(ShardingPlan.table_wise(task, [0, 1] * 3), task)
        spent.append([device.forward_exchange_ms for device in cost.devices])
        columns = [sum(features * t.dim for t in tables[n:6:2]) for n in range(2)]
        told = oracle.exchange(columns, task.objective)
        assert told is not None
        assert spent[-1] == pytest.approx(told)
    assert min(spent[1]) > max(spent[0])


def test_selected_shards_are_new_and_never_of_test_tables(
    oracle: EstimatedCosts, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    def tasks(members: object) -> list[ShardingTask]:
        return random_tasks(members, 4, 1024, OperatorOptions(), 2**40, 5)  # type: ignore[arg-type]

    makers = [AloneGreedySharder, LocalSearchSharder]
    first = select_shards_to_measure(oracle, makers, many_tables, tasks, set(), 40, 0)
    assert 30 <= len(first) <= 40
    assert len({shard.digest for shard in first}) == len(first)
    assert {part_of_shard(shard) for shard in first} == {"train", "validation"}
    known = {shard.digest for shard in first}
    second = select_shards_to_measure(oracle, makers, many_tables, tasks, known, 40, 0)
    assert not known & {shard.digest for shard in second}
    deviations = oracle.prices(first).deviation.numpy()
    usual = oracle.prices(random_shards(many_tables, 100, 60, 3)).deviation.numpy()
    assert deviations.max() > np.median(usual)


def test_predictions_are_compared_at_the_level_of_the_model(
    oracle: EstimatedCosts, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    task = ShardingTask(many_tables[:12], Device.uniform(3, 2**40), 1024)
    plan = AloneGreedySharder(oracle).shard(task)
    honest = compare_predictions(
        oracle, [(task, plan)], lambda some: [measurement(s) for s in some]
    )
    assert honest[0].ratio == pytest.approx(1, abs=0.1)
    assert honest[0].max_ratio == pytest.approx(1, abs=0.15)
    # Another store's level: twice the reference, so all of its costs read twice as high.
    slow = ReferenceLevel(2 * REFERENCE_LEVEL.forward_ms, 2 * REFERENCE_LEVEL.backward_ms)
    other = compare_predictions(
        oracle, [(task, plan)], lambda some: [measurement(s).normalized_to(slow) for s in some]
    )
    assert other[0].ratio == pytest.approx(honest[0].ratio)


def test_evaluations_are_counted(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    assert evaluations_per_second(oracle, [table.whole() for table in tables]) > 0


def test_calibration_to_another_batch_size_knows_its_tables(
    model: CostModel,
    many_tables: tuple[EmbeddingTable, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a batch 16 times as large every table is out of distribution until some are measured."""
    shards = random_shards(many_tables, 300, 20, seed=31)
    few = [shard for shard in shards if part_of_shard(shard) == "train"][:50]
    test = [shard for shard in shards if part_of_shard(shard) == "test"]
    monkeypatch.setattr(calibration, "_FOLDS", 2)  # which are for the uncertainty
    calibrated = calibrate(model, CostDataset.of(measurement(s, 16_384) for s in few))
    costs = EstimatedCosts(calibrated, 16_384).costs(test)
    spreads = [cost.spread for cost in costs]
    errors = [
        abs(cost.total_ms / measurement(shard, 16_384).total_ms - 1)
        for cost, shard in zip(costs, test, strict=True)
    ]
    assert np.median(errors) < 0.1
    assert np.median(spreads) < 0.4
