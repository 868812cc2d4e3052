"""Episodes in which tables take options, held against the oracle's price of their plans."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.cost_model import CostModel, EstimatedCosts, StepPredictor, load_model
from autoshard.cost_model.roofline import roofline_model
from autoshard.envs import BatchedPlacementEnv, EstimatedCostSource, TableCatalog, TaskInstance
from autoshard.envs.offers import OPTION_PARTS
from autoshard.envs.options import OPTION_KINDS, changed_units
from autoshard.workload import (
    Device,
    Link,
    Network,
    Objective,
    ShardingPlan,
    ShardingTask,
    load_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.packing.table_options import TableOptions
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.ways import OptionLimits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
RANKS = 4
LINK = Link(1e10, 3e-5)
OBJECTIVES = {
    "step": Objective("step", LINK),
    "nodes": Objective("step", Network(LINK, Link(5e9, 5e-5), 2)),
    "nodes of one": Objective("step", Network(LINK, Link(5e9, 5e-5), 1)),
    "operators": Objective("operators", Link(2e9, 1e-5)),
}


def task_of(objective: Objective, share: float, tables: int = 10) -> ShardingTask:
    drawn = tuple(load_tables("synthetic:200:6:small")[:tables])
    ample = ShardingTask(drawn, Device.uniform(RANKS, 10**12), 4096, objective=objective)
    memory = int(sum(map(ample.table_bytes, drawn)) * share)
    return ShardingTask(drawn, Device.uniform(RANKS, memory), 4096, objective=objective)


def oracle_of(objective: Objective) -> EstimatedCosts:
    return EstimatedCosts(load_model("cpu").for_objective(objective, RANKS), 4096)


def episodes_with(
    task: ShardingTask, oracle: EstimatedCosts, options: TableOptions, count: int
) -> BatchedPlacementEnv:
    """All kinds may be taken; no table is split, as slices that meet on a device are one."""
    pieces = [table.whole() for table in task.tables]
    catalog = TableCatalog(
        oracle, pieces, True, task.operator, replacing=changed_units(options, {})
    )
    instance = TaskInstance(
        np.arange(len(pieces)),
        task.usable_bytes,
        objective=task.objective,
        options=catalog.add_options(options, {}),
    )
    episodes = BatchedPlacementEnv(catalog, count, len(pieces), RANKS, 9, OPTION_KINDS)
    episodes.start(range(count), [instance] * count)
    return episodes


def drawn(episodes: BatchedPlacementEnv, rng: np.random.Generator) -> torch.Tensor:
    """Takes options often, and splits now and then."""
    masks = episodes.action_masks.double().numpy()
    masks[:, episodes.split_action] *= 0.3
    masks[:, episodes.max_devices + 1 :] *= 2
    return torch.from_numpy((masks * (rng.random(masks.shape) + 0.01)).argmax(1))


def play(episodes: BatchedPlacementEnv, rng: np.random.Generator) -> None:
    while not episodes.over.all():
        episodes.place(drawn(episodes, rng))


def options_of(task: ShardingTask, hash_ids: bool = False) -> TableOptions:
    training = task.objective.in_training
    hot = {table.name: 16 for table in task.tables if table.rows > 100} if training else {}
    return TableOptions(OptionLimits(task, copies=training, hot_rows=hot, hash_ids=hash_ids))


def plan_of(episodes: BatchedPlacementEnv, env_id: int, task: ShardingTask) -> ShardingPlan:
    return Sharded(episodes.placed_pieces(env_id), episodes.options_of(env_id)).plan(task)


def meets_itself(episodes: BatchedPlacementEnv, env_id: int) -> bool:
    """Whether slices of a table are on one device, where they are one piece of the plan."""
    placed = episodes.placed_pieces(env_id)
    return len({(piece.table.name, device) for piece, device in placed}) < len(placed)


@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_episode_costs_what_the_plan_does_that_it_leads_to(name: str, share: float) -> None:
    objective = OBJECTIVES[name]
    task, oracle = task_of(objective, share), oracle_of(objective)
    episodes = episodes_with(task, oracle, options_of(task, hash_ids=name == "nodes"), 64)
    play(episodes, np.random.default_rng(0))
    whole_ms, seen, compared = oracle.common_ms(task), Counter[str](), 0
    for env_id in range(episodes.num_envs):
        seen.update(OPTION_KINDS[taken.kind] for taken in episodes.taken[env_id])
        if episodes.infeasible[env_id]:
            continue
        plan = plan_of(episodes, env_id, task)
        plan.check(task)
        if meets_itself(episodes, env_id):
            continue
        compared += 1
        step_ms = oracle.step_ms(plan, task)
        assert float(episodes.plan_ms[env_id]) + whole_ms == pytest.approx(step_ms, rel=1e-4)
        expected = EstimatedCostSource(128)(episodes, [env_id]).plan_ms
        expected_ms = StepPredictor(oracle, task).expected_of(plan)
        assert float(expected) + whole_ms == pytest.approx(expected_ms, rel=0.02)
    assert compared > 20
    kinds = {"row_wise"}
    if objective.in_training:
        kinds |= {"data_parallel", "hot_rows"}
    if name == "nodes":
        kinds.add("table_row_wise")
    assert set(seen) == kinds


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_offered_is_what_comes(name: str) -> None:
    """The step after blocks of rows or copies; nothing is known of a unit still to be placed."""
    task, oracle = task_of(OBJECTIVES[name], 1.0), oracle_of(OBJECTIVES[name])
    episodes, rng = episodes_with(task, oracle, options_of(task), 32), np.random.default_rng(1)
    after, common = (OPTION_PARTS.index(part) for part in ("plan_after", "common"))
    known = [OPTION_KINDS.index(kind) for kind in ("row_wise", "table_row_wise", "data_parallel")]
    compared = 0
    while not episodes.over.all():
        actions = drawn(episodes, rng)
        kinds = actions - episodes.max_devices
        chosen = (torch.isin(kinds, torch.tensor(known)) & ~episodes.over).nonzero()[:, 0]
        scale, offers = episodes.even_split_ms[chosen], episodes.offers[chosen, kinds[chosen]]
        told = episodes.common_ms[chosen] + (offers[:, after] + offers[:, common]) * scale
        episodes.place(actions)
        torch.testing.assert_close(episodes.plan_ms[chosen], told, rtol=1e-4, atol=1e-3)
        compared += len(chosen)
    assert compared > 20


def test_options_stay_where_the_cost_model_changes(other_model: CostModel) -> None:
    """Blocks are priced anew, and so is what all devices bear."""
    objective = OBJECTIVES["operators"]
    task, before = task_of(objective, 1.0), oracle_of(objective)
    other = EstimatedCosts(other_model, 4096)
    episodes, rng = episodes_with(task, before, options_of(task), 16), np.random.default_rng(2)
    for _ in range(4):
        episodes.place(drawn(episodes, rng))
    assert any(episodes.taken)
    episodes.set_oracle(other)
    play(episodes, rng)
    compared = 0
    for env_id in (~episodes.infeasible).nonzero()[:, 0].tolist():
        if episodes.taken[env_id] and not meets_itself(episodes, env_id):
            step_ms = other.step_ms(plan_of(episodes, env_id, task), task)
            assert float(episodes.plan_ms[env_id]) == pytest.approx(step_ms, rel=1e-4)
            compared += 1
    assert compared > 2


def test_options_leave_memory_for_the_rest() -> None:
    """Copies of the second half of the memory would leave no device for the largest table."""
    task = task_of(OBJECTIVES["step"], 0.45)
    episodes = episodes_with(task, oracle_of(task.objective), options_of(task), 1)
    copied = episodes.max_devices + OPTION_KINDS.index("data_parallel")
    while not episodes.over.all():
        may = episodes.action_masks[0]
        assert may.any()
        devices = episodes.safe[0].nonzero()[:, 0]
        fallback = devices[0] if len(devices) else may.nonzero()[0, 0]
        episodes.place(torch.tensor([copied if may[copied] else int(fallback)]))
    assert not episodes.infeasible[0]
    plan = plan_of(episodes, 0, task)
    plan.check(task)
    assert plan.copied


def test_tables_take_no_options_that_are_not_priced_or_wanted() -> None:
    tables = [table.whole() for table in task_of(OBJECTIVES["step"], 1.0).tables]
    for objective, kinds, found in (
        (Objective("operators"), OPTION_KINDS, set()),
        (OBJECTIVES["operators"], OPTION_KINDS, {"row_wise"}),
        (OBJECTIVES["step"], OPTION_KINDS, {"row_wise", "data_parallel"}),
        (OBJECTIVES["step"], ("data_parallel",), {"data_parallel"}),
        (OBJECTIVES["step"], (), set()),
    ):
        catalog = TableCatalog(oracle_of(objective), tables)
        memory = np.full(RANKS, catalog.bytes.sum())
        instance = TaskInstance(np.arange(len(tables)), memory, objective=objective)
        episodes = BatchedPlacementEnv(catalog, 1, len(tables), RANKS, kinds=kinds)
        episodes.start([0], [instance])
        seen = set[str]()
        while not episodes.over.all():
            seen |= {OPTION_KINDS[n] for n in episodes.may_take[0].nonzero()[:, 0].tolist()}
            episodes.place(episodes.joined_ms.argmin(1))
        assert seen == found


def test_tables_are_kept_in_host_memory_where_that_of_devices_is_too_small() -> None:
    sheet = DATA_SHEETS["h100-80gb"]
    objective = Objective("operators", sheet.link(RANKS))
    ample = task_of(objective, 9.9)
    memory = int(sum(map(ample.table_bytes, ample.tables)) * 0.15)
    task = replace(ample, devices=Device.uniform(RANKS, memory))
    model = roofline_model(sheet).for_objective(objective, RANKS)
    oracle = EstimatedCosts(model, task.batch_size)
    options = TableOptions(OptionLimits(task, copies=False, rows=False), 2**40)
    episodes = episodes_with(task, oracle, options, 64)
    play(episodes, np.random.default_rng(0))
    compared = 0
    for env_id in (~episodes.infeasible).nonzero()[:, 0].tolist():
        plan = plan_of(episodes, env_id, task)
        plan.check(task)
        assert plan.cached_rows
        if not meets_itself(episodes, env_id):
            step_ms = oracle.step_ms(plan, task)
            assert float(episodes.plan_ms[env_id]) == pytest.approx(step_ms, rel=1e-4)
            compared += 1
    assert compared > 5
