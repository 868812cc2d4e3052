"""The drift monitor: alarms where costs change only, advice on moving, and its callback."""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from bench.drift import Laws, Stream, heavier, laws_of, more_skewed, planned
from mlflow import MlflowClient
from torchrec import KeyedJaggedTensor

from autoshard.cost_model import EstimatedCosts, OtherHardware, OutsideTraining, StepPredictor
from autoshard.sharders import DriftMonitor, DriftReport
from autoshard.workload import Link, ShardingPlan, ShardingTask, UserError
from autoshard.workload.plans.moves import moves_between, traffic_of
from autoshard.workload.ways.option import ShardingOption

WINDOW, STEPS = 20, 100_000
LINK = Link(1e9)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        warnings.simplefilter("ignore", OutsideTraining)
        yield


@pytest.fixture(scope="module")
def laws() -> Laws:
    return laws_of("Zipf")


@pytest.fixture(scope="module")
def known(laws: Laws) -> tuple[ShardingPlan, ShardingTask, EstimatedCosts]:
    """Plan, task and oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return planned(laws)


def monitor_of(
    known: tuple[ShardingPlan, ShardingTask, EstimatedCosts], **given: object
) -> DriftMonitor:
    return DriftMonitor(*known, STEPS, LINK, window=WINDOW, **given)  # type: ignore[arg-type]


def reported(found: DriftReport | None) -> DriftReport:
    assert found is not None
    return found


def test_no_alarm_without_drift_though_other_rows_get_hot(
    laws: Laws, known: tuple[ShardingPlan, ShardingTask, EstimatedCosts]
) -> None:
    monitor, stream = monitor_of(known), Stream(laws, 3, WINDOW)
    assert stream.report(monitor) is None  # the reference, as the tables are no profile
    for _ in range(5):
        report = reported(stream.report(monitor))
        low, high = report.change.ratio_90
        assert not report.change.is_drift
        assert report.advice is None
        assert low < report.change.ratio < high
        assert report.change.ratio == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("change", [heavier, more_skewed])
def test_a_change_is_seen_once_and_is_the_reference_then(
    laws: Laws, known: tuple[ShardingPlan, ShardingTask, EstimatedCosts], change: object
) -> None:
    changed = change(laws, 1.4)  # type: ignore[operator]
    monitor, stream = monitor_of(known), Stream(laws, 4, WINDOW)
    stream.report(monitor)
    report = reported(stream.report(monitor, changed))
    assert report.change.is_drift
    assert report.change.p_value < 0.001
    assert (report.change.ratio > 1) == (change is heavier)
    assert report.now.expected_ms / report.before.expected_ms == pytest.approx(
        report.change.ratio, rel=0.02
    )
    assert report.advice is not None
    assert not reported(stream.report(monitor, changed)).change.is_drift


def test_few_surprises_in_many_short_windows() -> None:
    """By the law of p values. Batches that differ together do not make them smaller."""
    laws = {name: law for name, law in laws_of("uniform").items() if name in ("t0", "t1")}
    found, stream = [], Stream(laws, 5, WINDOW)
    known = planned(laws)
    for _ in range(6):  # references, which all windows after them share
        monitor = monitor_of(known)
        stream.report(monitor)
        found += [reported(stream.report(monitor)).change.p_value for _ in range(5)]
    assert np.mean(np.array(found) < 0.05) <= 0.2


def test_moving_pays_if_steps_are_left(laws: Laws) -> None:
    """From a plan with all tables on a device, which takes most of the time."""
    _, task, oracle = planned(laws)
    poor = ShardingPlan.table_wise(task, [0] * len(task.tables))
    for steps in (STEPS, 0):
        monitor = DriftMonitor(poor, task, oracle, steps, LINK, window=WINDOW)
        stream = Stream(laws, 6, WINDOW)
        stream.report(monitor)
        report = reported(stream.report(monitor, heavier(laws, 1.5)))
        advice = report.advice
        assert advice is not None
        if not steps:
            assert advice.stays
            assert not advice.pays
            assert "stay" in report.line
            continue
        moves = moves_between(poor, advice.plan, task)
        assert advice.moves == moves
        most = max(traffic.most for traffic in traffic_of(moves, len(task.devices)))
        assert advice.moving_s == pytest.approx(most / LINK.bytes_s)
        predictor = StepPredictor(oracle, report.task)
        gain_ms = predictor.of(poor).expected_ms - predictor.of(advice.plan).expected_ms
        assert advice.saved_s == pytest.approx(gain_ms * steps / 1000 - advice.moving_s, rel=1e-6)
        low, high = advice.saved_90_s
        assert 0 < low < advice.saved_s < high
        assert advice.error > 0
        assert advice.pays
        assert "moving pays" in report.line
        assert f"{steps:,} steps" in report.line
        assert report.metrics["drift/pays"] == 1
        advice.plan.check(report.task)


def test_a_profiled_task_is_the_reference(
    laws: Laws, known: tuple[ShardingPlan, ShardingTask, EstimatedCosts]
) -> None:
    plan, _, oracle = known
    first, stream = monitor_of(known), Stream(laws, 7, WINDOW)
    stream.report(first)
    counted = reported(stream.report(first)).task
    monitor = monitor_of((plan, counted, oracle))
    assert not reported(stream.report(monitor)).change.is_drift
    assert reported(stream.report(monitor, heavier(laws, 1.5))).change.is_drift


def test_blocks_of_rows_are_watched(laws: Laws) -> None:
    """The first block of a table by rows gets all lookups: the same of other rows."""
    plan, task, oracle = planned(laws)
    widest = max(task.tables, key=lambda table: table.dim * table.pooling_factor)
    (placement,) = plan.by_table()[widest.name][:1]
    rest = tuple(p for p in plan.placements if p.table != widest.name)
    by_rows = replace(placement, start=0, width=widest.dim, device=0, row_blocks=4)
    plans = plan, replace(plan, placements=(*rest, by_rows))
    watching = [monitor_of((each, task, oracle)) for each in plans]
    rng = np.random.default_rng(0)

    def window(stride: int) -> list[DriftReport | None]:
        found = []
        for _ in range(WINDOW):
            batch = {name: law.batch(rng, 1.0, 0) for name, law in laws.items()}
            rows = batch[widest.name].rows % (widest.rows // 4) * stride
            batch[widest.name] = batch[widest.name]._replace(rows=rows)
            found = [monitor.count(batch.__getitem__) for monitor in watching]
        return found

    window(4)
    columns, blocks = window(1)
    assert not reported(columns).change.is_drift
    assert reported(blocks).change.is_drift


def test_the_callback_counts_one_batch_in_so_many_and_logs(
    laws: Laws, known: tuple[ShardingPlan, ShardingTask, EstimatedCosts], tmp_path: Path
) -> None:
    every, ranks = 3, 2
    features = {name: [f"f_{name}"] for name in laws}
    monitor = monitor_of(known, every=every, features=features)
    rng, counted, reports = np.random.default_rng(2), [], []
    count = monitor.count
    monitor.count = lambda read: counted.append(monitor.step) or count(read)  # type: ignore[method-assign, func-returns-value]
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("training")
    with mlflow.start_run() as run:
        for _ in range(2 * WINDOW * every * ranks):
            parts = [law.batch(rng, 1 / ranks, 0) for law in laws.values()]
            lengths = [rng.multinomial(len(p.rows), [2 / 1024] * 512) for p in parts]
            batch = KeyedJaggedTensor(
                [f"f_{name}" for name in laws],
                torch.from_numpy(np.concatenate([part.rows for part in parts])),
                lengths=torch.from_numpy(np.concatenate(lengths)),
            )
            report = monitor.observe(batch) or monitor.wait()
            reports += [report] if report else []
    assert counted == [2 + every * ranks * number for number in range(2 * WINDOW)]
    (report,) = reports
    assert not report.change.is_drift
    logged = MlflowClient().get_run(run.info.run_id).data.metrics
    assert logged == {name: pytest.approx(value) for name, value in report.metrics.items()}
    assert logged["drift/alarm"] == 0
    assert report.step == counted[-1]


def test_without_a_run_nothing_is_logged(
    laws: Laws, known: tuple[ShardingPlan, ShardingTask, EstimatedCosts], tmp_path: Path
) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    assert "mlflow" in sys.modules
    monitor, stream = monitor_of(known), Stream(laws, 8, WINDOW)
    stream.report(monitor)
    stream.report(monitor)
    assert not (tmp_path / "mlflow.db").exists()


def test_bad_input_ends_in_a_line(
    known: tuple[ShardingPlan, ShardingTask, EstimatedCosts],
) -> None:
    plan, task, oracle = known
    unlinked = replace(task, objective=replace(task.objective, link=None))
    model = replace(oracle.model).for_objective(unlinked.objective, len(task.devices))
    with pytest.raises(UserError, match="the task has no link: give the one over which"):
        DriftMonitor(plan, unlinked, EstimatedCosts(model, task.batch_size), STEPS)
    with pytest.raises(UserError, match="every must be at least 1, got 0"):
        DriftMonitor(plan, task, oracle, STEPS, every=0)
    with pytest.raises(UserError, match="a window needs at least 20 batches, got 3"):
        DriftMonitor(plan, task, oracle, STEPS, window=3)
    hot = replace(plan, options={plan.placements[0].table: ShardingOption(hot_rows=5)})
    with pytest.raises(UserError, match=r"no ids of table t\d+, of which the plan copies"):
        DriftMonitor(hot, task, oracle, STEPS)
    with pytest.raises(UserError, match="batches: an item is a int"):
        monitor_of(known).observe(3)
