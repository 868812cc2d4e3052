"""Episodes in which tables take options, held against the oracle's price of their plans."""

from collections import Counter

import numpy as np
import pytest
import torch

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.envs import BatchedPlacementEnv, TableCatalog, TaskInstance
from autoshard.envs.options import OPTION_KINDS, changed_units
from autoshard.workload import Device, Link, Network, Objective, ShardingTask, load_tables
from autoshard.workload.options import COLUMN_WISE, Sharded
from autoshard.workload.table_options import TableOptions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
RANKS = 4
LINK = Link(1e10, 3e-5)
OBJECTIVES = {
    "step": Objective("step", LINK),
    "nodes": Objective("step", Network(LINK, Link(5e9, 5e-5), 2)),
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


def play(episodes: BatchedPlacementEnv, rng: np.random.Generator) -> None:
    """Takes options often, and splits now and then."""
    while not episodes.over.all():
        masks = episodes.action_masks.double().numpy()
        masks[:, episodes.split_action] *= 0.3
        masks[:, episodes.max_devices + 1 :] *= 2
        drawn = masks * (rng.random(masks.shape) + 0.01)
        episodes.place(torch.from_numpy(drawn.argmax(1)))


@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_episode_costs_what_the_plan_does_that_it_leads_to(name: str, share: float) -> None:
    objective = OBJECTIVES[name]
    task, oracle = task_of(objective, share), oracle_of(objective)
    training = objective.in_training
    hot = {table.name: 16 for table in task.tables if table.rows > 100} if training else {}
    options = TableOptions(task, copies=training, hot_rows=hot, hash_ids=name == "nodes")
    episodes = episodes_with(task, oracle, options, 64)
    play(episodes, np.random.default_rng(0))
    whole_ms, seen, compared = oracle.common_ms(task), Counter[str](), 0
    for env_id in range(episodes.num_envs):
        seen.update(OPTION_KINDS[taken.kind] for taken in episodes.taken[env_id])
        if episodes.infeasible[env_id]:
            continue
        placed = episodes.placed_pieces(env_id)
        plan = Sharded(placed, episodes.options_of(env_id)).plan(task)
        plan.check(task)
        if len({(piece.table.name, device) for piece, device in placed}) < len(placed):
            continue
        compared += 1
        step_ms = oracle.step_ms(plan, task)
        assert float(episodes.plan_ms[env_id]) + whole_ms == pytest.approx(step_ms, rel=1e-4)
    assert compared > 20
    expected = {"row_wise"}
    if training:
        expected |= {"data_parallel", "hot_rows"}
    if name == "nodes":
        expected.add("table_row_wise")
    assert set(seen) == expected
