"""Training by a plan: sharded in whatever way, a model learns what it would learn in one piece."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

from autoshard.benchmark.rehearsal.model import RehearsedModel, draw_batch, fill, in_model
from autoshard.benchmark.rehearsal.rehearsal import RankGroup
from autoshard.benchmark.rehearsal.times import PHASES, RankTimes, Rehearsal, Step
from autoshard.benchmark.rehearsal.training import BATCHES, LEARNING_RATE
from autoshard.workload import (
    Device,
    EmbeddingTable,
    OperatorOptions,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)

STEPS = 20
TABLES = (
    EmbeddingTable("wide", 300, 32, 3.0),
    EmbeddingTable("of two.features", 100, 16, 4.0, features=2),
    EmbeddingTable("hot", 50, 24, 6.0, zipf_alpha=1.1),
    EmbeddingTable("weighted", 80, 16, 2.0, weighted=True),
)
# Columns of each table by rank. Of the first even plan all slices are as wide; in the uneven ones
# ranks come in any order; in the last rank 0 holds all tables together, and the others nothing.
PLANS = {
    "even on 2": (2, [{0: 16, 1: 16}, {0: 8, 1: 8}, {0: 12, 1: 12}, {0: 8, 1: 8}]),
    "uneven on 2": (2, [{1: 28, 0: 4}, {0: 4, 1: 12}, {1: 24}, {1: 12, 0: 4}]),
    "co-located on 2": (2, [{0: 32}, {0: 16}, {0: 24}, {0: 16}]),
    "even on 4": (4, [{0: 8, 1: 8, 2: 8, 3: 8}, {3: 16}, {0: 12, 2: 12}, {1: 16}]),
    "uneven on 4": (4, [{3: 20, 0: 8, 2: 4}, {1: 4, 2: 12}, {2: 20, 1: 4}, {0: 4, 3: 12}]),
    "co-located on 4": (4, [{1: 32}, {1: 16}, {3: 24}, {3: 16}]),
}


def task_of(ranks: int, batch_size: int = 32) -> ShardingTask:
    devices = Device.uniform(ranks, 2**30)
    return ShardingTask(TABLES, devices, batch_size, OperatorOptions(optimizer="sgd"))


def plan_of(ranks: int, columns: list[dict[int, int]]) -> ShardingPlan:
    placements = []
    for table, widths in zip(TABLES, columns, strict=True):
        start = 0
        for rank, width in widths.items():
            placements.append(Placement(table.name, start, width, rank))
            start += width
    return ShardingPlan(tuple(placements), ranks)


@pytest.fixture(scope="module")
def stages(cluster: object) -> Iterator[dict[int, RankGroup]]:
    """Two ranks, and four, two of which share a core."""
    with closing(RankGroup(2, "cpu")) as two, closing(RankGroup(4, "cpu")) as four:
        yield {2: two, 4: four}


@pytest.fixture(scope="module")
def in_one_piece() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of tables after so many steps, in this process, nothing sharded."""
    task = task_of(1)
    torch.manual_seed(0)
    model = RehearsedModel(TABLES, task.operator, "cpu")
    tables = {}
    for number, (table, path) in enumerate(in_model(TABLES).items()):
        collection, _, name = path.partition(".")
        bags = getattr(model, collection).embedding_bags
        tables[table] = bags[name].weight
        with torch.no_grad():
            fill(tables[table], number, TABLES[number].rows, 0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        batch = draw_batch(TABLES, task.batch_size, step % BATCHES, slice(0, task.batch_size))
        optimizer.zero_grad()
        loss = nn.BCEWithLogitsLoss()(model(batch.dense, batch.sparse()), batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: weights.detach() for name, weights in tables.items()}


def put_together(parts: list[list[object]]) -> dict[str, torch.Tensor]:
    """Whole tables of what ranks hold; what nobody holds is NaN."""
    found = {table.name: torch.full((table.rows, table.dim), torch.nan) for table in TABLES}
    for part in (part for of_rank in parts for part in of_rank):
        rows, columns = part.weights.shape
        found[part.table][part.row : part.row + rows, part.column : part.column + columns] = (
            part.weights
        )
    return found


@pytest.mark.parametrize("name", [*PLANS, "torchrec"])
def test_losses_and_weights_are_those_of_the_model_in_one_piece(
    name: str,
    stages: dict[int, RankGroup],
    in_one_piece: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    """TorchRec's own plan may copy tables and split them by rows, so it has its own check."""
    ranks, columns = PLANS.get(name, (2, []))
    plan = plan_of(ranks, columns) if columns else None
    on = stages[ranks]
    on.prepare(name, task_of(ranks), plan)
    rehearsal = on.train(name, STEPS, warm_up=0)
    weights = put_together(on.parts(name))
    on.forget(name)
    losses, tables = in_one_piece
    assert rehearsal.losses == pytest.approx(losses, abs=1e-5)
    for table, expected in tables.items():
        torch.testing.assert_close(weights[table], expected, atol=1e-5, rtol=0)
    moved = [fresh_weights(n) - tables[table.name] for n, table in enumerate(TABLES)]
    assert all(float(change.abs().max()) > 1e-4 for change in moved)  # they did learn


def fresh_weights(number: int) -> torch.Tensor:
    weights = torch.empty(TABLES[number].rows, TABLES[number].dim)
    fill(weights, number, TABLES[number].rows, 0, 0)
    return weights


def test_phases_add_up_to_steps_and_each_rank_tells_what_it_holds(
    stages: dict[int, RankGroup],
) -> None:
    plan = plan_of(*PLANS["co-located on 2"])
    stages[2].prepare("told", task_of(2), plan)
    rehearsal = stages[2].train("told", 3)
    stages[2].forget("told")
    full, empty = rehearsal.ranks
    assert (full.tables, empty.tables) == (len(TABLES), 0)
    assert full.planned_bytes == plan.device_bytes(task_of(2))[0]
    assert full.peak_bytes > full.planned_bytes
    for rank in rehearsal.ranks:
        assert len(rank.steps) == 3
        for step in rank.steps:
            assert len(step.phases_ms) == len(PHASES)
            assert min(step.phases_ms) >= 0
    for step in full.steps:
        assert min(step.phases_ms) > 0  # there is some of everything
    backward = PHASES.index("backward")
    assert all(step.phases_ms[backward] == 0 for step in empty.steps)
    assert rehearsal.slowest == 0


def test_a_step_lasts_until_the_last_rank_is_through() -> None:
    def rank(name: str, *steps: tuple[float, float]) -> RankTimes:
        made = tuple(Step((0.0, own, 0.0, 0.0, wait, 0.0, 0.0), 1.0) for own, wait in steps)
        return RankTimes(name, 1, 10, 20, made)

    ranks = (rank("a", (1, 9), (2, 9), (2, 6)), rank("b", (8, 1), (8, 4), (7, 2)))
    found = Rehearsal(ranks)
    assert found.step_ms == [10, 12, 9]
    assert found.median_ms == 10
    assert found.interval_ms == (9, 12)
    assert found.slowest == 1
    document = found.to_json()
    assert document["step_ms"] == 10
    assert document["ranks"][1]["steps"][0]["phases_ms"][1] == 8


def test_what_does_not_fit_is_reported_before_training(stages: dict[int, RankGroup]) -> None:
    plan = plan_of(*PLANS["even on 2"])
    with pytest.raises(UserError, match=r"batch of 33 samples cannot be split evenly .* take 32"):
        stages[2].prepare("odd", task_of(2, batch_size=33), plan)
    with pytest.raises(PlanError, match="the plan is for 2 devices, the task has 4"):
        stages[4].prepare("few", task_of(4), plan)
    memory = stages[2].devices()[0].memory_bytes
    vast = EmbeddingTable("vast", memory // 16 // 4 + 1, 16, 1.0)
    task = ShardingTask((vast,), Device.uniform(2, 2**50), 32)
    with pytest.raises(PlanError, match=r"device 0 \(cpu.*\) would hold .* more than its"):
        stages[2].prepare("vast", task, ShardingPlan.table_wise(task, [0]))
