"""Why a plan takes as long as it does."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost_model import EstimatedCosts, slowest_by_phase
from autoshard.cost_model.pricing.explanation import ALL_PHASES
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    Piece,
    Shard,
    ShardCost,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.tasks.objective import PHASES


@pytest.fixture(params=[Objective("compute"), Objective("operators", Link(1e9, 1e-4))], ids=str)
def case(
    tables: tuple[EmbeddingTable, ...], request: pytest.FixtureRequest
) -> tuple[ShardingTask, ShardingPlan]:
    """A dozen tables, one of them split; a device without any. All-to-alls are as learned, or as a
    link says.
    """
    devices = Device.uniform(4, 2**40)
    task = ShardingTask(tables[:12], devices, 1024, objective=request.param)
    wide = next(table for table in task.tables if table.dim >= 64)
    placed = [(table.whole(), n % 3) for n, table in enumerate(task.tables) if table != wide]
    pieces = [(Piece(wide, 0, 32), 0), (Piece(wide, 32, wide.dim - 32), 1)]
    return task, ShardingPlan.of_placed([*placed, *pieces], 4)


def phases_of(
    oracle: EstimatedCosts,
    held: Sequence[Sequence[Piece]],
    device: int,
    objective: Objective,
) -> list[float]:
    """Returns the time of a device in each phase, where devices hold these pieces."""
    cost = ShardCost(0.0, 0.0)
    if held[device]:
        (cost,) = oracle.costs([Shard(tuple(held[device]))])
    dims = [sum(piece.output_width for piece in mine) for mine in held]
    found = oracle.exchange(dims, objective)
    assert found is not None
    return [cost.forward_ms, cost.backward_ms, found[device], found[device]]


def test_phases_are_those_of_the_plan_s_cost(
    oracle: EstimatedCosts, case: tuple[ShardingTask, ShardingPlan]
) -> None:
    task, plan = case
    cost = oracle.plan_cost(plan, task)
    found = slowest_by_phase(oracle, plan, task)
    assert [phase.phase for phase in found] == [ALL_PHASES, *PHASES]
    columns = [
        [d.total_ms for d in cost.devices],
        *zip(*(d.phases_ms for d in cost.devices), strict=True),
    ]
    for phase, ms in zip(found, columns, strict=True):
        assert phase.device == int(np.argmax(ms))
        assert phase.ms == pytest.approx(max(ms), rel=1e-4)
        assert phase.mean_ms == pytest.approx(np.mean(ms), rel=1e-4)


def test_a_slice_costs_what_its_device_takes_less_without_it(
    oracle: EstimatedCosts, case: tuple[ShardingTask, ShardingPlan]
) -> None:
    task, plan = case
    held = [[s for s, home in plan.placed(task) if home == device] for device in range(4)]
    for phase in slowest_by_phase(oracle, plan, task):
        counted = range(4) if phase.phase == ALL_PHASES else [PHASES.index(phase.phase)]
        assert {one.piece for one in phase.pieces} == set(held[phase.device])
        reported = [one.ms for one in phase.pieces]
        assert reported == sorted(reported, reverse=True)
        before = phases_of(oracle, held, phase.device, task.objective)
        for one in phase.pieces:
            without = [list(mine) for mine in held]
            without[phase.device].remove(one.piece)
            after = phases_of(oracle, without, phase.device, task.objective)
            less = sum(before[n] - after[n] for n in counted)
            assert one.ms == pytest.approx(less, abs=1e-3)
            assert one.share == pytest.approx(one.ms / phase.ms)


def test_all_to_alls_that_nobody_knows_are_left_out(
    oracle: EstimatedCosts, case: tuple[ShardingTask, ShardingPlan]
) -> None:
    task, plan = case
    task = replace(task, objective=Objective("operators"))
    silent = EstimatedCosts(replace(oracle.model, links={}), 1024)
    found = slowest_by_phase(silent, plan, task)
    assert [phase.phase for phase in found] == [ALL_PHASES, *PHASES[:2]]
    alone = replace(task, devices=task.devices[:1])
    plan = ShardingPlan.table_wise(alone, [0] * len(task.tables))
    assert len(slowest_by_phase(oracle, plan, alone)) == 3
