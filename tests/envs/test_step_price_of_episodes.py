"""What a plan costs by its task's objective, held against `Objective` and the oracle."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from episodes import AMPLE, AtRandom, Sketch, episodes_of, few, greedily, instance, seeds, sketches
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.networks.inputs import unit_amounts
from autoshard.envs import (
    BatchedPlacementEnv,
    EstimatedCostSource,
    Layout,
    TableCatalog,
    TaskInstance,
)
from autoshard.envs.devices import STAGES
from autoshard.workload import EmbeddingTable, Link, Objective
from autoshard.workload.plans.step_price import StepPrice, step_ms
from autoshard.workload.tasks.objective import ObjectiveName

LINKS = (None, Link(1e9), Link(2e8, 3e-4))
names = st.sampled_from(["step", "pipelined", "operators", "compute"])
objectives = st.builds(Objective, names, st.sampled_from(LINKS))
staked = st.lists(st.tuples(sketches(), objectives), min_size=1, max_size=4)


def instances_of(
    catalog: TableCatalog, dealt: list[tuple[Sketch, Objective]]
) -> list[TaskInstance]:
    return [replace(sketch.on(catalog), objective=objective) for sketch, objective in dealt]


def finished(
    catalog: TableCatalog, instances: list[TaskInstance], seed: int, splitting: float = 0.3
) -> BatchedPlacementEnv:
    episodes = episodes_of(catalog, *instances, max_splits=6)
    choose = AtRandom(range(seed, seed + len(instances)), splitting)
    while not episodes.over.all():
        episodes.place(choose(episodes))
    return episodes


def stages_of(catalog: TableCatalog, episodes: BatchedPlacementEnv, env_id: int) -> np.ndarray:
    """Of each device, by the oracle, pieces that meet there apart: [devices, stages]."""
    instance, oracle = episodes.instances[env_id], EstimatedCosts(catalog.model, catalog.batch_size)
    assert instance is not None
    devices = len(instance.memory_bytes)
    held: list[list] = [[] for _ in range(devices)]
    for piece, device in episodes.placed_pieces(env_id):
        held[device].append(piece)
    forward, backward = np.zeros(devices), np.zeros(devices)
    for device, pieces in enumerate(held):
        if pieces:
            price = catalog.model.compute.price(unit_amounts(oracle.amounts, pieces).sum(0)[None])
            forward[device], backward[device] = float(price.forward_ms), float(price.backward_ms)
    columns = np.array([sum(piece.output_width for piece in pieces) for pieces in held], float)
    objective = instance.objective
    price = StepPrice.of(objective, catalog.batch_size, devices, columns.sum())
    return np.stack(price.stages_ms(forward, backward, columns), axis=-1)


@few
@given(dealt=staked, seed=seeds)
def test_a_finished_episode_costs_what_its_objective_says(
    split_catalog: TableCatalog, dealt: list[tuple[Sketch, Objective]], seed: int
) -> None:
    """Whatever others beside it are played for."""
    episodes = finished(split_catalog, instances_of(split_catalog, dealt), seed)
    estimated = EstimatedCostSource()(episodes, range(episodes.num_envs))
    for env_id, (sketch, _) in enumerate(dealt):
        if episodes.infeasible[env_id]:
            continue
        stages, devices = stages_of(split_catalog, episodes, env_id), len(sketch.weights)
        told = float(step_ms(stages))
        assert float(episodes.plan_ms[env_id]) == pytest.approx(told, rel=1e-4)
        assert float(estimated.plan_ms[env_id]) == pytest.approx(told, rel=1e-4)
        each = stages.sum(1)
        assert episodes.cost_ms[env_id, :devices].tolist() == pytest.approx(each.tolist(), rel=1e-4)
        assert not episodes.stages_ms[env_id, devices:].any()


@few
@given(dealt=staked, seed=seeds)
def test_where_no_pieces_meet_it_is_what_the_plan_costs(
    split_catalog: TableCatalog, dealt: list[tuple[Sketch, Objective]], seed: int
) -> None:
    catalog, oracle = split_catalog, EstimatedCosts(split_catalog.model, split_catalog.batch_size)
    episodes = finished(catalog, instances_of(catalog, dealt), seed, splitting=0.1)
    for env_id, (_, objective) in enumerate(dealt):
        placed = episodes.placed_pieces(env_id)
        if episodes.infeasible[env_id] or len({(p.table.name, d) for p, d in placed}) < len(placed):
            continue
        shards = episodes.shards(env_id)
        costs = [None if shard is None else oracle.costs([shard])[0] for shard in shards]
        forward = np.array([0.0 if cost is None else cost.forward_ms for cost in costs])
        backward = np.array([0.0 if cost is None else cost.backward_ms for cost in costs])
        columns = np.array([0.0 if shard is None else shard.total_dim for shard in shards])
        price = StepPrice.of(objective, catalog.batch_size, len(shards), columns.sum())
        told = sum(float(stage.max()) for stage in price.stages_ms(forward, backward, columns))
        assert float(episodes.plan_ms[env_id]) == pytest.approx(told, rel=1e-4)


@few
@given(dealt=staked, seed=seeds)
def test_a_device_costs_what_was_predicted_of_it(
    split_catalog: TableCatalog, dealt: list[tuple[Sketch, Objective]], seed: int
) -> None:
    episodes = episodes_of(split_catalog, *instances_of(split_catalog, dealt), max_splits=6)
    choose = AtRandom(range(seed, seed + len(dealt)), 0.3)
    while not episodes.over.all():
        actions = choose(episodes)
        placing = (~episodes.over & (actions < episodes.max_devices)).nonzero()[:, 0]
        placing = placing[episodes.allowed[placing, actions[placing]]]
        waits, where = episodes.stages_ms.clone(), (placing, actions[placing])
        waits[where] = episodes.priced[:, :, 1, :STAGES][where]
        cost = episodes.cost_ms.clone()
        cost[where] = episodes.joined_ms[where]
        episodes.place(actions)
        assert torch.equal(
            episodes.stages_ms, waits
        )  # splitting changes nothing of what devices cost
        assert torch.equal(episodes.cost_ms, cost)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["step", "pipelined", "operators", "compute"])
def test_the_pace_is_an_even_share_and_the_bound_no_less(
    catalog: TableCatalog, split_catalog: TableCatalog, name: ObjectiveName, link: Link | None
) -> None:
    numbers, objective = list(range(12)), Objective(name, link)
    for some, max_splits in ((catalog, 0), (split_catalog, 0), (split_catalog, 12)):
        for devices in (1, 2, 4, 24):
            dealt = replace(instance(numbers, *[AMPLE] * devices), objective=objective)
            episodes = episodes_of(some, dealt, max_splits=max_splits)
            share = some.amounts[numbers].sum(0) / devices
            even = np.full(devices, float(some.columns[numbers].sum()) / devices)
            price = StepPrice.of(objective, some.batch_size, devices, even.sum())
            exchange = float(price.exchange_stage(even).max())
            alone = some.alone_ms[numbers]
            compute = float(some.price(share[None]).total_ms) or float(alone.max())
            assert float(episodes.even_split_ms[0]) == pytest.approx(compute + exchange, rel=1e-4)
            # Halved as far as it goes a table is four columns wide.
            least = some.narrowest_ms[numbers] if max_splits else alone
            at_best = max(float(some.price(share[None]).total_ms), float(least.max()))
            assert float(episodes.lower_bound_ms[0]) == pytest.approx(at_best + exchange, rel=1e-4)
    narrow = [split_catalog.units[n].pieces[0].width for n in _narrowest(split_catalog, numbers)]
    assert narrow == [4] * len(numbers)
    found = split_catalog.alone_ms[_narrowest(split_catalog, numbers)]
    torch.testing.assert_close(split_catalog.narrowest_ms[numbers], found)


def _narrowest(catalog: TableCatalog, numbers: list[int]) -> list[int]:
    found = []
    for number in numbers:
        while catalog.halves[number, 0] >= 0:
            number = int(catalog.halves[number, 0])
        found.append(number)
    return found


@few
@given(
    numbers=st.lists(st.integers(0, 99), min_size=2, max_size=5, unique=True), objective=objectives
)
def test_no_plan_of_whole_tables_is_much_better_than_the_bound(
    catalog: TableCatalog, numbers: list[int], objective: Objective
) -> None:
    for devices in (2, 3):
        dealt = replace(instance(numbers, *[AMPLE] * devices), objective=objective)
        ways = torch.tensor(list(product(range(devices), repeat=len(numbers))))
        episodes = episodes_of(catalog, *[dealt] * len(ways))
        for step in range(len(numbers)):
            episodes.place(ways[:, step])
        assert float(episodes.plan_ms.min()) >= 0.9 * float(episodes.lower_bound_ms[0])


def test_observations_contain_the_objective(catalog: TableCatalog) -> None:
    link, room = Link(1e9, 1e-4), (AMPLE, AMPLE)
    told = {
        Objective("operators"): (1, 0), Objective("operators", link): (1, 1),
        Objective("pipelined", link): (1, 1), Objective("compute", link): (0, 0),
    }  # fmt: skip
    episodes = episodes_of(
        catalog, *(replace(instance([3, 8], *room), objective=some) for some in told)
    )
    episodes.place(torch.zeros(len(told), dtype=torch.int64))
    layout = Layout(2)
    stakes = layout.split(layout.observe(episodes))["objective"]
    assert [tuple(row) for row in stakes[:, :2].tolist()] == list(told.values())
    slowest = episodes.stages_ms.amax(1) / episodes.even_split_ms[:, None]
    torch.testing.assert_close(stakes[:, 2:], slowest)
    torch.testing.assert_close(stakes[:, 2:].sum(1), episodes.plan_ms / episodes.even_split_ms)


def test_one_device_exchanges_nothing(catalog: TableCatalog) -> None:
    slow = Objective("operators", Link(1e6, 1.0))
    episodes = episodes_of(
        catalog, replace(instance([3, 8], AMPLE), objective=slow), instance([3, 8], AMPLE)
    )
    while not episodes.over.all():
        episodes.place(greedily(episodes))
    assert float(episodes.plan_ms[0]) == pytest.approx(float(episodes.plan_ms[1]))
    assert float(episodes.lower_bound_ms[0]) == pytest.approx(float(episodes.lower_bound_ms[1]))


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OutsideTraining")
def test_a_slow_link_counts_every_output_of_a_table(catalog: TableCatalog) -> None:
    """A table with three features is sent thrice."""
    tables = [
        EmbeddingTable("one", 1000, 16, 4.0),
        EmbeddingTable("three", 1000, 16, 4.0, features=3),
    ]
    oracle = EstimatedCosts(catalog.model, 1024)
    own = TableCatalog(oracle, [table.whole() for table in tables])
    objective = Objective("operators", Link(1e6))
    episodes = episodes_of(own, replace(instance([0, 1], AMPLE, AMPLE), objective=objective))
    while not episodes.over.all():
        episodes.place(episodes.current)
    exchange = StepPrice.of(objective, 1024, 2, 64.0).exchange_stage(np.array([16.0, 48.0]))
    assert episodes.stages_ms[0, :, 2].tolist() == pytest.approx(exchange.tolist(), rel=1e-5)
