"""A training step on GPUs by their data sheets: what training adds, copies, rows, and intervals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.cost_model import CostModel, EstimatedCosts, StepPredictor
from autoshard.cost_model.models.checkpoint import load_model, save_model
from autoshard.cost_model.roofline import roofline_model
from autoshard.cost_model.step.by_data_sheet import overhead_of_sheet
from autoshard.cost_model.step.dense_part import dense_ms, read_layers
from autoshard.cost_model.step.overhead import StepOverhead, shared_loads_of
from autoshard.sharders import SharderContext, load_policy, make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    OperatorOptions,
    Piece,
    ShardingPlan,
    ShardingTask,
    UserError,
    load_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.ways.option import DATA_PARALLEL

H100 = DATA_SHEETS["h100-80gb"]
BATCH = 65_536


def task_of(
    ranks: int, tables: tuple[EmbeddingTable, ...], objective: str = "step", gpu: str = "h100-80gb"
) -> ShardingTask:
    link = DATA_SHEETS[gpu].link(ranks)
    devices = Device.uniform(ranks, 72 * 2**30)
    return ShardingTask(tables, devices, BATCH, objective=Objective(objective, link))  # type: ignore[arg-type]


def oracle_of(task: ShardingTask, model: CostModel | None = None) -> EstimatedCosts:
    model = model or roofline_model(H100, task.operator)
    return EstimatedCosts(model.for_objective(task.objective, len(task.devices)), BATCH)


def whole(task: ShardingTask, copied: tuple[str, ...] = ()) -> ShardingPlan:
    """Tables in turn on the devices, but for those that are copied."""
    held = [t for t in task.tables if t.name not in copied]
    ranks = len(task.devices)
    placed = [(Piece(t, 0, t.dim), n % ranks) for n, t in enumerate(held)]
    plan = ShardingPlan.of_pieces(task, placed)
    return replace(plan, options=dict.fromkeys(copied, DATA_PARALLEL))


def step_ms(task: ShardingTask, plan: ShardingPlan) -> float:
    return oracle_of(task).step_ms(plan, task)


TABLES = load_tables("mlperf:dlrm-v2")
SMALL = tuple(t.name for t in TABLES if t.rows < 200)


@pytest.mark.parametrize("ranks", [8, 16])
def test_a_step_takes_what_operators_do_and_more(ranks: int) -> None:
    task = task_of(ranks, TABLES)
    operators = task_of(ranks, TABLES, "operators")
    ratio = step_ms(task, whole(task)) / step_ms(operators, whole(operators))
    assert 1.1 < ratio < 3


def test_copies_of_small_tables_pay_and_those_of_large_ones_do_not() -> None:
    task = task_of(16, TABLES)
    large = max(TABLES, key=lambda t: t.rows).name
    without, small, every = (step_ms(task, whole(task, some)) for some in ((), SMALL, (large,)))
    assert small < without
    assert every > 10 * without


def test_a_copy_takes_as_long_as_what_its_weights_move() -> None:
    """All-reduce over the links, and memory that the gradients and the optimizer pass through."""
    table = EmbeddingTable("t", 1_000_000, 128, 1.0)
    task = task_of(8, (table, EmbeddingTable("other", 1000, 128, 1.0)))
    copies = oracle_of(task).copies
    assert copies is not None
    (each_ms,) = copies.each_ms(task, [table])
    bytes_of_weights = 4 * table.rows * table.dim
    link_ms = 2 * 7 / 8 * bytes_of_weights / task.objective.link.ring(8).bytes_s * 1e3  # type: ignore[union-attr]
    memory_ms = bytes_of_weights / (H100.memory_gb_s * 1e6)
    assert link_ms + 5 * memory_ms < each_ms < link_ms + 15 * memory_ms


def test_more_memory_bandwidth_shortens_all_but_launches() -> None:
    slow, fast = (
        overhead_of_sheet(replace(H100, memory_gb_s=speed), OperatorOptions())
        for speed in (1000, 4000)
    )
    assert slow.forward.output_ns == pytest.approx(4 * fast.forward.output_ns)
    assert slow.forward.start_ms == fast.forward.start_ms
    task = task_of(8, TABLES)
    loads = shared_loads_of(task)
    assert loads @ slow.shared_rates > loads @ fast.shared_rates


def test_rows_pay_for_bucketizing_their_lookups() -> None:
    rows = overhead_of_sheet(H100, OperatorOptions()).of_rows
    assert rows.lookup_ns > 0
    many, few = (task_of(8, (EmbeddingTable("t", 10**6, 64, pooling),)) for pooling in (50, 1))
    assert rows.ms(many, {"t": 8}) > rows.ms(few, {"t": 8})


def test_members_of_the_overhead_are_drawn_around_it() -> None:
    found = overhead_of_sheet(H100, OperatorOptions())
    rates = np.array([member.shared_rates for member in found.members])
    known = found.shared_rates > 0
    ratios = rates.mean(0)[known] / found.shared_rates[known]
    assert ((ratios > 0.8) & (ratios < 1.6)).all()
    assert (rates.std(0)[known] > 0).all()
    assert StepOverhead.from_json(found.to_json()) == found


def test_intervals_contain_what_is_not_known_of_training() -> None:
    task = task_of(16, tuple(t for t in TABLES if t.pooling_factor < 20))  # none outweighs all
    plan = whole(task, SMALL)
    known = roofline_model(H100)
    assert known.overhead is not None
    sure = replace(known, overhead=replace(known.overhead, members=()))
    widths = []
    for model in (known, sure):
        found = StepPredictor(oracle_of(task, model), task).of(plan)
        low, high = found.interval_ms
        assert low < found.expected_ms < high
        widths.append(high - low)
    assert widths[0] > 1.05 * widths[1]
    same = StepPredictor(oracle_of(task), task)
    comparison = same.of(plan).over(same.of(plan))
    assert (comparison.low, comparison.high) == (1.0, 1.0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_autoshard_copies_small_tables_on_two_nodes() -> None:
    task = task_of(16, TABLES)
    oracle = oracle_of(task)
    plan = make_sharder("autoshard", SharderContext(oracle, load_policy("cpu"))).shard(task)
    plan.check(task)
    assert len(plan.copied) >= 8
    before = task_of(16, TABLES, "operators")
    of_operators = make_sharder(
        "autoshard", SharderContext(oracle_of(before), load_policy("cpu"))
    ).shard(before)
    assert oracle.step_ms(plan, task) < 0.97 * oracle.step_ms(of_operators, task)


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OtherHardware")
def test_a_model_by_a_data_sheet_is_saved_with_its_step(tmp_path: Path) -> None:
    model = roofline_model(H100)
    save_model(model, tmp_path / "model")
    assert load_model(tmp_path / "model").overhead == model.overhead


def test_the_dense_part_follows_from_its_layers() -> None:
    layers = read_layers("13-512-256-128,3456-1024-1")
    assert layers == [[13, 512, 256, 128], [3456, 1024, 1]]
    both = dense_ms(layers, 8192, H100)
    assert both == pytest.approx(sum(dense_ms([stack], 8192, H100) for stack in layers))
    assert dense_ms(layers, 16384, H100) == pytest.approx(2 * both)
    # 4 million weights, 6 flops each, at the peak of 989 TFLOPS: what it takes at least.
    assert both > 6 * 4e6 * 8192 / 989e12 * 1e3


@pytest.mark.parametrize("text", ["13", "13-", "a-b", "13-0", "", "1-2,,3-4", "1.5-2"])
def test_layers_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--dense-layers takes the widths"):
        read_layers(text)


def test_a_data_sheet_without_the_speed_of_products_says_so() -> None:
    with pytest.raises(UserError, match=r"has no tflops, which --dense-layers needs: add"):
        dense_ms([[1, 2]], 1, replace(H100, tflops=None))
