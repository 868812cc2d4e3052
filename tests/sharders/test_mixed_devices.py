"""Devices of several kinds: each has the cost model of its hardware, and slower ones get less."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tasks import task_of

from autoshard.cost_model import (
    CostModel,
    EstimatedCosts,
    StepPredictor,
    load_model,
    slowest_by_phase,
)
from autoshard.cost_model.pricing.mixed_costs import MixedCosts
from autoshard.cost_model.roofline import roofline_model
from autoshard.sharders import (
    AnnealingSharder,
    Policy,
    PolicySharder,
    SharderContext,
    make_sharder,
    open_context,
)
from autoshard.sharders.policy import groups
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    ShardingPlan,
    ShardingTask,
    UserError,
    synthetic_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.ways.option import ShardingOption, columns_task

SHARDERS = ("cost", "cost_fused", "cost_fused_search", "policy", "autoshard", "neuroshard")
OBJECTIVES = (
    Objective("compute"),
    Objective("operators", Link(5e9, 2e-5)),
    Objective("step", Link(5e9, 2e-5)),
)
Kinds = tuple[CostModel, CostModel]


@pytest.fixture(scope="module")
def machines() -> Kinds:
    """Two machines of the shipped model's training data: the second is about four times as fast."""
    model = load_model("cpu")
    assert model.machines is not None
    found = [model.on_hardware(machine.hardware) for machine in model.machines.trained_on]
    slow, fast = found[0], found[3]  # whose ensembles differ in size
    assert slow is not None
    assert fast is not None
    return slow, fast


def mixed_task(kinds: Kinds, objective: Objective, tables: int = 30) -> ShardingTask:
    """Two devices of each kind, those of the slow one first."""
    task = task_of(synthetic_tables(tables, seed=7, profile="small"), 4)
    devices = tuple(
        replace(device, hardware=kinds[number // 2].provenance.hardware)
        for number, device in enumerate(task.devices)
    )
    return replace(task, devices=devices, objective=objective)


def oracles(kinds: Kinds, task: ShardingTask) -> list[EstimatedCosts]:
    ranks = len(task.devices)
    return [EstimatedCosts(m.for_objective(task.objective, ranks), 1024) for m in kinds]


def mixed_costs(kinds: Kinds, task: ShardingTask) -> MixedCosts:
    parts = zip(kinds, oracles(kinds, task), strict=True)
    return MixedCosts({model.provenance.hardware: oracle for model, oracle in parts})


def equal(task: ShardingTask) -> ShardingTask:
    """The task if nothing were known of the hardware."""
    return replace(task, devices=tuple(replace(d, hardware="") for d in task.devices))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_each_device_costs_what_it_does_among_its_like(
    machines: Kinds, objective: Objective
) -> None:
    task = mixed_task(machines, objective)
    parts = oracles(machines, task)
    mixed = mixed_costs(machines, task)
    plan = ShardingPlan.table_wise(task, [n % 4 for n in range(len(task.tables))])
    found = mixed.plan_cost(plan, task).phases_ms
    alike = [part.plan_cost(plan, equal(task)).phases_ms for part in parts]
    assert found[:2] == pytest.approx(alike[0][:2], rel=1e-5)
    assert found[2:] == pytest.approx(alike[1][2:], rel=1e-5)
    assert not np.allclose(alike[0], alike[1], rtol=0.2)
    assert mixed.step_ms(plan, task) == pytest.approx(mixed.plan_cost(plan, task).step_ms, rel=1e-5)
    # Under uncertainty, too: the slow devices are the last of each stage of compute in all samples.
    predicted = StepPredictor(mixed, task).of(plan)
    low, high = (StepPredictor(p, equal(task)).of(plan).expected_ms for p in reversed(parts))
    assert low < predicted.expected_ms <= high * 1.001
    (slowest, *_) = slowest_by_phase(mixed, plan, task)
    assert slowest.device in (0, 1)


def test_what_is_not_known_of_training_is_drawn_of_each_devices_own_kind() -> None:
    """Two plans, in both of which devices of the slow kind are the slowest, differ by its costs."""
    fast, slow = (roofline_model(DATA_SHEETS[name]) for name in ("h100-80gb", "l4-24gb"))
    task = mixed_task((fast, slow), Objective("step"))
    most = ShardingPlan.table_wise(task, [3] * 29 + [0])
    fewer = ShardingPlan.table_wise(task, [3] * 28 + [0, 0])
    mixed, (_, alone) = mixed_costs((fast, slow), task), oracles((fast, slow), task)
    drawn = [
        predictor.of(most).drawn_ms - predictor.of(fewer).drawn_ms
        for predictor in (StepPredictor(mixed, task), StepPredictor(alone, equal(task)))
    ]
    assert drawn[0] == pytest.approx(drawn[1], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "objective"),
    [("autoshard", OBJECTIVES[2]), *((name, OBJECTIVES[1]) for name in SHARDERS)],
    ids=str,
)
def test_slow_devices_get_less(
    name: str, machines: Kinds, objective: Objective, policy: Policy
) -> None:
    task = mixed_task(machines, objective)
    mixed = mixed_costs(machines, task)
    plan = make_sharder(name, SharderContext(mixed, policy)).shard(task)
    plan.check(task)
    blind = make_sharder(name, SharderContext(oracles(machines, task)[0], policy))
    taken_for_equal = blind.shard(equal(task))
    assert mixed.step_ms(plan, task) < 0.9 * mixed.step_ms(taken_for_equal, task)


def test_plans_are_as_good_as_those_of_annealing(machines: Kinds, policy: Policy) -> None:
    task = mixed_task(machines, OBJECTIVES[1])
    mixed = mixed_costs(machines, task)
    plan = make_sharder("autoshard", SharderContext(mixed, policy)).shard(task)
    annealed = AnnealingSharder(mixed, proposals=30_000, seed=1).shard(task)
    assert mixed.step_ms(plan, task) <= 1.02 * mixed.step_ms(annealed, task)


def test_kinds_that_do_not_differ_are_planned_as_equal_devices(machines: Kinds) -> None:
    """By the same sums: that there are two kinds changes nothing."""
    alike = replace(machines[0].provenance, hardware="cpu: another of the same")
    twice = machines[0], replace(machines[0], provenance=alike)
    task = mixed_task(twice, OBJECTIVES[1])
    mixed, one = mixed_costs(twice, task), oracles(twice, task)[0]
    for name in ("cost", "cost_fused"):
        both = (
            make_sharder(name, SharderContext(oracle)).shard(given)
            for oracle, given in ((mixed, task), (one, equal(task)))
        )
        first, second = (one.step_ms(plan, equal(task)) for plan in both)
        assert first == pytest.approx(second, rel=1e-4)


def test_groups_of_many_devices_have_as_many_of_each_kind(
    machines: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "PIECES", 40)
    small = mixed_task(machines, Objective("operators"), tables=90)
    names = [model.provenance.hardware for model in machines]
    memory = small.devices[0].memory_bytes
    devices = [Device(f"d{n}", memory, hardware=names[n // 8]) for n in range(16)]
    task = replace(small, devices=tuple(devices))
    mixed = mixed_costs(machines, task)
    plan = PolicySharder(Policy.untrained(), mixed).shard(task)
    plan.check(task)
    cost = mixed.plan_cost(plan, task)
    assert cost.balance > 0.8
    held = np.bincount([placed.device for placed in plan.placements], minlength=16)
    assert held[8:].sum() > 1.5 * held[:8].sum()


def test_tables_by_rows_wait_for_the_slow_devices(machines: Kinds) -> None:
    """Blocks are even, so that the price is that of the slow kind."""
    task = mixed_task(machines, OBJECTIVES[1])
    giant = EmbeddingTable("giant", 400_000, 64, 200.0)
    task = columns_task(replace(task, tables=(giant,)), {"giant": ShardingOption(row_blocks=4)})
    parts = oracles(machines, task)
    plan = ShardingPlan.table_wise(task, [0, 1, 2, 3])
    slow = parts[0].step_ms(plan, equal(task))
    assert mixed_costs(machines, task).step_ms(plan, task) == pytest.approx(slow, rel=1e-4)


def test_hardware_is_a_part_of_the_task(machines: Kinds, tmp_path: Path) -> None:
    task = mixed_task(machines, OBJECTIVES[0])
    task.save(tmp_path / "task.json")
    assert ShardingTask.load(tmp_path / "task.json") == task
    parts = oracles(machines, task)
    with pytest.raises(UserError, match=r"device2 is of cpu: AMD .*, the oracle's is cpu: Intel"):
        parts[0].check(task)
    unknown = replace(task, devices=(*task.devices[:3], Device("d3", 2**30, hardware="cpu: new")))
    with pytest.raises(UserError, match="d3 is of cpu: new, the oracle's kinds are cpu: Intel"):
        mixed_costs(machines, task).check(unknown)
    with pytest.raises(UserError, match="d3 is of hardware without a name"):
        mixed_costs(machines, task).check(replace(unknown, devices=(Device("d3", 2**30),)))
    with pytest.raises(UserError, match=r"cpu: Intel.* is named twice: name each kind once"):
        open_context(frozenset(), task.tables, 1024, [machines[0], machines[0]])
