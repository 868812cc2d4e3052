"""The rules of the episode, whatever is dealt and however it is played."""

from functools import partial

import pytest
import torch
from episodes import (
    AMPLE,
    AtRandom,
    Sketch,
    assignment,
    at_random,
    episodes_of,
    few,
    instance,
    ragged,
    seeds,
    sketches,
)
from hypothesis import given

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import BatchedPlacementEnv, Layout, TableCatalog
from autoshard.envs.devices import DEVIATION
from autoshard.workload import EmbeddingTable, Piece, Shard

same = partial(torch.testing.assert_close, equal_nan=True)


def total_ms(model: CostModel, shard: Shard | None) -> float:
    return 0.0 if shard is None else EstimatedCosts(model, 1024).costs([shard])[0].total_ms


@few
@given(dealt=ragged, seed=seeds)
def test_every_table_is_placed_once_the_costliest_first(
    catalog: TableCatalog, model: CostModel, dealt: list[Sketch], seed: int
) -> None:
    instances, episodes, choose = at_random(catalog, dealt, seed)
    placed: list[list[int]] = [[] for _ in instances]
    while not episodes.over.all():
        for env_id in (~episodes.over).nonzero()[:, 0].tolist():
            placed[env_id].append(int(episodes.current[env_id]))
        episodes.place(choose(episodes))
    for env_id, numbers in enumerate(placed):
        shards = [shard for shard in episodes.shards(env_id) if shard is not None]
        held = sorted(piece.digest for shard in shards for piece in shard.pieces)
        assert held == sorted(catalog.undivided[number].digest for number in numbers)
        costs = [total_ms(model, Shard((catalog.undivided[number],))) for number in numbers]
        assert costs == pytest.approx(sorted(costs, reverse=True), rel=1e-5)
        if episodes.infeasible[env_id]:
            assert len(numbers) == episodes.placed[env_id] < len(dealt[env_id].pieces)
        else:
            assert sorted(numbers) == sorted(dealt[env_id].pieces)


@few
@given(dealt=ragged, seed=seeds)
def test_devices_cost_what_was_predicted_and_what_the_oracle_says(
    catalog: TableCatalog, model: CostModel, dealt: list[Sketch], seed: int
) -> None:
    episodes = episodes_of(catalog, *(sketch.on(catalog) for sketch in dealt))
    choose = AtRandom(range(seed, seed + len(dealt)))
    while not episodes.over.all():
        devices, playing = choose(episodes), (~episodes.over).nonzero()[:, 0]
        before = episodes.cost_ms.clone()
        before[playing, devices[playing]] = episodes.joined_ms[playing, devices[playing]]
        deviations = episodes.priced[playing, devices[playing], 1, DEVIATION]
        episodes.place(devices)
        assert torch.equal(episodes.cost_ms, before)
        assert torch.equal(episodes.priced[playing, devices[playing], 0, DEVIATION], deviations)
    for env_id, sketch in enumerate(dealt):
        costs = [total_ms(model, shard) for shard in episodes.shards(env_id)]
        assert episodes.cost_ms[env_id, : len(costs)].tolist() == pytest.approx(costs, rel=1e-4)
        assert episodes.cost_ms[env_id, len(costs) :].sum() == 0
        whole = sum(total_ms(model, Shard((catalog.undivided[n],))) for n in sketch.pieces)
        assert float(episodes.all_ms[env_id]) == pytest.approx(whole, rel=1e-4)


@given(dealt=ragged, seed=seeds)
def test_what_is_left_goes_down_to_nothing(
    catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    episodes = episodes_of(catalog, *(sketch.on(catalog) for sketch in dealt))
    choose = AtRandom(range(seed, seed + len(dealt)))
    assert torch.equal(episodes.rest_share, torch.ones(len(dealt)))
    torch.testing.assert_close(episodes.rest_ms, episodes.all_ms)
    while not episodes.over.all():
        episodes.place(choose(episodes))
    for env_id, sketch in enumerate(dealt):
        left = [
            n
            for n, home in zip(sketch.pieces, assignment(episodes, env_id), strict=True)
            if home < 0
        ]
        assert int(episodes.rest_bytes[env_id]) == catalog.bytes[left].sum()
        assert float(episodes.rest_ms[env_id]) == pytest.approx(
            float(catalog.alone_ms[left].sum()), abs=1e-3
        )
        assert float(episodes.rest_share[env_id]) == pytest.approx(len(left) / len(sketch.pieces))


@few
@given(dealt=ragged, seed=seeds)
def test_episodes_do_not_influence_each_other(
    catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    instances = [sketch.on(catalog) for sketch in dealt]
    together = episodes_of(catalog, *instances)
    alone = [episodes_of(catalog, instance) for instance in instances]
    wide = Layout(together.max_devices)
    choosers = [AtRandom([seed + env_id]) for env_id in range(len(instances))]
    choose = AtRandom(range(seed, seed + len(instances)))
    while True:
        seen = wide.split(wide.observe(together))
        for env_id, episodes in enumerate(alone):
            assert together.over[env_id] == episodes.over[0]
            narrow = Layout(episodes.max_devices)
            for name, part in narrow.split(narrow.observe(episodes)).items():
                mine = seen[name][env_id]
                if name in ("devices", "exists", "allowed"):
                    assert not mine[episodes.max_devices :].nan_to_num().any()
                    mine = mine[: episodes.max_devices]
                same(mine, part[0], rtol=1e-4, atol=1e-5)
        if together.over.all():
            break
        together.place(choose(together))
        for episodes, chooser in zip(alone, choosers, strict=True):
            episodes.place(chooser(episodes))
    for env_id, episodes in enumerate(alone):
        assert assignment(together, env_id) == assignment(episodes, 0)


@given(first=sketches(), second=sketches(), seed=seeds)
def test_nothing_of_the_last_episode_is_left(
    catalog: TableCatalog, first: Sketch, second: Sketch, seed: int
) -> None:
    used, fresh = (BatchedPlacementEnv(catalog, 1, 9, 4) for _ in range(2))
    layout = Layout(4)
    used.start([0], [first.on(catalog)])
    choose = AtRandom([seed])
    while not used.over.all():
        used.place(choose(used))
    for episodes in (used, fresh):
        episodes.start([0], [second.on(catalog)])
    choosers = AtRandom([seed]), AtRandom([seed])
    while True:
        same(layout.observe(used), layout.observe(fresh), rtol=0, atol=0)
        assert torch.equal(used.over, fresh.over)
        if used.over.all():
            break
        for episodes, chooser in zip((used, fresh), choosers, strict=True):
            episodes.place(chooser(episodes))
    assert assignment(used, 0) == assignment(fresh, 0)


@given(sketch=sketches(), seed=seeds)
def test_an_assignment_is_in_the_tasks_order(
    catalog: TableCatalog, sketch: Sketch, seed: int
) -> None:
    episodes, choose = episodes_of(catalog, sketch.on(catalog)), AtRandom([seed])
    homes: dict[int, int] = {}
    while not episodes.over.all():
        device = choose(episodes)
        homes[int(episodes.current[0])] = int(device[0])
        episodes.place(device)
    assert assignment(episodes, 0) == [homes.get(number, -1) for number in sketch.pieces]


def test_only_active_episodes_place(catalog: TableCatalog) -> None:
    episodes = episodes_of(catalog, instance([3, 8], AMPLE), instance([3, 8], AMPLE))
    episodes.place(torch.tensor([0, 0]), torch.tensor([False, True]))
    assert episodes.placed.tolist() == [0, 1]


def test_the_bound_is_an_even_share_or_the_costliest_table(catalog: TableCatalog) -> None:
    numbers = list(range(40))
    episodes = episodes_of(
        catalog, instance(numbers, AMPLE, AMPLE), instance(numbers[:3], *[AMPLE] * 4)
    )
    pace, bound = episodes.even_split_ms.tolist(), episodes.lower_bound_ms.tolist()
    assert bound[0] == pace[0] > float(catalog.alone_ms[numbers].max())
    assert bound[1] == pytest.approx(float(catalog.alone_ms[numbers[:3]].max()))
    assert bound[1] > pace[1]


def test_a_catalog_holds_column_pieces_too(
    model: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    wide, other = [table for table in many_tables if table.dim >= 16][:2]
    halves = [Piece(wide, 0, 8), Piece(wide, 8, wide.dim - 8)]
    catalog = TableCatalog(EstimatedCosts(model, 1024), [*halves, other.whole()])
    assert catalog.bytes[:2].tolist() == [
        model.provenance.operator.memory([piece], 1024).total for piece in halves
    ]
    episodes = episodes_of(catalog, *[instance([0, 1, 2], AMPLE, AMPLE)] * 2)
    while not episodes.over.all():
        episodes.place(torch.stack([episodes.current[0] != 0, episodes.current[1] == 2]).long())
    assert episodes.shards(0) == [Shard((halves[0],)), Shard((halves[1], other.whole()))]
    costs = [total_ms(model, shard) for shard in episodes.shards(0)]
    assert episodes.cost_ms[0].tolist() == pytest.approx(costs, rel=1e-4)
    # Two pieces of a table that meet on a device are one there.
    assert episodes.shards(1) == [Shard.of_tables([wide]), Shard.of_tables([other])]
