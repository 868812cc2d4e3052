"""Pieces that are split: whose columns they are, where they come back, and when they may be."""

from collections import Counter
from dataclasses import replace

import numpy as np
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
    fewest,
    instance,
    ragged,
    seeds,
    sketches,
)
from hypothesis import given

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.step.overhead import DirectionOverhead, StepOverhead
from autoshard.envs import (
    BatchedPlacementEnv,
    Layout,
    RandomTaskSampler,
    ShardingVectorEnv,
    TableCatalog,
    TaskInstance,
)
from autoshard.envs.catalog import NO_HALVES
from autoshard.workload import (
    EmbeddingTable,
    Objective,
    Rule,
    ShardingPlan,
)
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.tables.table import halves

SPLIT = 0.3  # share of random actions that split, where a split is allowed


def halve(episodes: BatchedPlacementEnv) -> None:
    episodes.place(torch.full((episodes.num_envs,), episodes.split_action))


def coming(episodes: BatchedPlacementEnv, env_id: int) -> list[int]:
    """Pieces that are not placed, in their order."""
    return episodes.order[
        env_id, int(episodes.placed[env_id]) : int(episodes.count[env_id])
    ].tolist()


@few
@given(dealt=ragged, seed=seeds)
def test_columns_are_placed_once_whatever_is_split(
    split_catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    instances, episodes, choose = at_random(split_catalog, dealt, seed, SPLIT, max_splits=9)
    while not episodes.over.all():
        episodes.place(choose(episodes))
    for env_id, mine in enumerate(instances):
        task = split_catalog.task(mine)
        placed, widths = episodes.placed_pieces(env_id), Counter[str]()
        for piece, _ in placed:
            widths[piece.table.name] += piece.width
        assert len(placed) == episodes.placed[env_id]
        # Pieces are counted by table, in the task's order; other tables have none to count.
        assert int(episodes.parts[env_id].sum()) - episodes.max_tables == episodes.count[
            env_id
        ] - len(mine.units)
        if episodes.infeasible[env_id]:
            for number in coming(episodes, env_id):
                for piece in split_catalog.units[number].pieces:
                    widths[piece.table.name] += piece.width
        else:
            plan = ShardingPlan.of_pieces(task, placed)
            plan.check(task)
            assert list(plan.shards(task)) == episodes.shards(env_id)
        assert widths == {table.name: table.dim for table in task.tables}


@few
@given(dealt=ragged, seed=seeds)
def test_what_is_reported_of_the_rest_is_what_a_recount_finds(
    split_catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    catalog = split_catalog
    instances, episodes, choose = at_random(catalog, dealt, seed, SPLIT, max_splits=6)
    while True:
        for env_id, mine in enumerate(instances):
            left = coming(episodes, env_id)
            placed = [
                catalog.sizes[n] for n in episodes.order[env_id, : int(episodes.placed[env_id])]
            ]
            pieces = episodes.order[env_id, : int(episodes.count[env_id])]
            alone = catalog.alone_ms[left].tolist()
            assert alone == sorted(alone, reverse=True)
            assert int(episodes.rest_bytes[env_id]) == int(catalog.sizes[left].sum())
            free = mine.memory_bytes.sum() - sum(int(size) for size in placed)
            assert int(episodes.free[env_id, : len(mine.memory_bytes)].sum()) == free
            torch.testing.assert_close(
                episodes.rest[env_id], catalog.described[left].sum(0), rtol=1e-4, atol=1e-3
            )
            assert float(episodes.rest_ms[env_id]) == pytest.approx(sum(alone), rel=1e-4, abs=1e-4)
            added = float(catalog.alone_ms[pieces].sum() - catalog.alone_ms[mine.units].sum())
            assert float(episodes.added_ms[env_id]) == pytest.approx(added, rel=1e-3, abs=1e-4)
        if episodes.over.all():
            break
        episodes.place(choose(episodes))


@few
@given(dealt=ragged, seed=seeds)
def test_no_device_is_safe_that_leaves_the_largest_half_without_memory(
    split_catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    catalog = split_catalog
    instances, episodes, choose = at_random(catalog, dealt, seed, SPLIT, max_splits=6)
    while not episodes.over.all():
        for env_id in (~episodes.over).nonzero()[:, 0].tolist():
            sizes = catalog.sizes[coming(episodes, env_id)].tolist()
            foreseen = sorted(sizes[1:], reverse=True)[:4]
            for device in episodes.allowed[env_id].nonzero()[:, 0].tolist():
                free = episodes.free[env_id, : len(instances[env_id].memory_bytes)].tolist()
                free[device] -= sizes[0]
                found = True
                for size in foreseen:  # each where it fits most tightly
                    room = min((room for room in free if room >= size), default=None)
                    if room is None:
                        found = False
                        break
                    free[free.index(room)] -= size
                assert bool(episodes.safe[env_id, device]) == found
        episodes.place(choose(episodes))


def test_halves_come_back_where_their_cost_says(split_catalog: TableCatalog) -> None:
    catalog = split_catalog
    wide = [n for n in range(100) if catalog.undivided[n].width >= 16][:4]
    episodes = episodes_of(catalog, instance(wide, AMPLE, AMPLE), max_splits=4)
    first = int(episodes.current[0])
    one, two = catalog.halves[first].tolist()
    before = coming(episodes, 0)
    halve(episodes)
    after = coming(episodes, 0)
    assert Counter(after) == Counter([*before[1:], one, two])
    costs = catalog.alone_ms[after].tolist()
    assert costs == sorted(costs, reverse=True)
    assert episodes.placed.tolist() == [0]
    assert episodes.rest_share.tolist() == [1.0]
    assert int(episodes.current[0]) == after[0]
    assert [piece.width for piece in halves(catalog.undivided[first])] == catalog.widths[
        [one, two]
    ].tolist()


def test_a_catalog_knows_all_halves_and_their_halves(
    model: CostModel, split_catalog: TableCatalog, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    dealt = len(many_tables)
    assert len(split_catalog.undivided) == dealt < len(split_catalog.units)
    for number, (one, two) in enumerate(split_catalog.halves.tolist()):
        (piece,) = split_catalog.units[number].pieces
        if piece.width < 8:
            assert one == two == NO_HALVES
        else:
            found = [split_catalog.units[half].pieces[0] for half in (one, two)]
            assert {half.table for half in found} == {piece.table}
            assert [half.width for half in found] == [half.width for half in halves(piece)]
            assert one >= dealt
            assert two >= dealt
    whole = TableCatalog.of_tables(model, many_tables, 1024)
    assert (whole.halves == NO_HALVES).all()
    assert len(whole.units) == dealt
    for told in ("amounts", "sizes", "columns", "alone_ms"):
        torch.testing.assert_close(getattr(split_catalog, told)[:dealt], getattr(whole, told))


def test_a_piece_that_costs_little_is_split_only_where_it_lies_badly_whole(
    split_catalog: TableCatalog,
) -> None:
    catalog = split_catalog
    order = [
        n for n in catalog.alone_ms[:100].argsort().tolist() if catalog.undivided[n].width >= 8
    ]
    cheap, numbers = order[0], order[-60:]
    episodes = episodes_of(catalog, instance([*numbers, cheap], AMPLE, AMPLE), max_splits=9)
    assert catalog.alone_ms[cheap] < 0.02 * episodes.even_split_ms[0]
    while int(episodes.current[0]) != cheap:
        episodes.place(torch.tensor([0]))
    assert not episodes.splittable[0]
    tight = int(catalog.bytes[cheap]) - 1
    alone = episodes_of(catalog, instance([cheap], tight, tight), max_splits=9)
    assert not alone.infeasible[0]
    assert alone.splittable[0]


def ruled(
    catalog: TableCatalog, numbers: list[int], devices: int, *rules: Rule
) -> BatchedPlacementEnv:
    """An episode of these tables by rules, on devices with room."""
    dealt = instance(numbers, *[AMPLE] * devices)
    task = replace(catalog.task(dealt), rules=rules)
    masks = RuleMasks(task)
    units = masks.units
    own = TableCatalog(EstimatedCosts(catalog.model, catalog.batch_size), units, split=True)
    pieces = np.arange(len(units))
    return episodes_of(own, TaskInstance(pieces, dealt.memory_bytes, masks), max_splits=9)


def test_rules_say_what_may_be_split(split_catalog: TableCatalog) -> None:
    catalog = split_catalog
    wide = next(n for n in range(100) if catalog.undivided[n].width >= 32)
    other = next(n for n in range(100) if n != wide)
    name, width = catalog.undivided[wide].table.name, catalog.undivided[wide].width
    of = (name,)
    assert ruled(catalog, [wide], 2).splittable[0]
    assert not ruled(catalog, [wide], 1).splittable[0]  # all halves would lie there
    assert not ruled(catalog, [wide], 2, Rule("whole", of)).splittable[0]
    together = Rule("together", (name, catalog.undivided[other].table.name))
    assert not ruled(catalog, [wide, other], 2, together).splittable[0]
    least = width // 8 * 4
    assert ruled(catalog, [wide], 2, Rule("min_width", of, (least,))).splittable[0]
    assert not ruled(catalog, [wide], 2, Rule("min_width", of, (least + 4,))).splittable[0]
    for most in (1, 2, 3):
        episodes = ruled(catalog, [wide], 4, Rule("max_slices", of, (most,)))
        for _ in range(most - 1):
            assert episodes.splittable[0]
            halve(episodes)
        assert not episodes.splittable[0]
        assert int(episodes.count[0]) == most


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OutsideTraining")
def test_a_narrow_table_may_not_be_split(model: CostModel) -> None:
    tables = [EmbeddingTable(f"t{dim}", 1000, dim, 5.0) for dim in (4, 8)]
    catalog = TableCatalog.of_tables(model, tables, 1024, split=True)
    episodes = episodes_of(
        catalog, instance([0], AMPLE, AMPLE), instance([1], AMPLE, AMPLE), max_splits=3
    )
    assert episodes.splittable.tolist() == [False, True]
    episodes.place(torch.tensor([0, episodes.split_action]))
    assert episodes.splittable.tolist() == [False, False]
    assert catalog.widths[episodes.current[1]] == 4


def test_a_table_is_split_no_oftener_than_there_are_devices(split_catalog: TableCatalog) -> None:
    wide = next(n for n in range(100) if split_catalog.undivided[n].width >= 32)
    episodes = episodes_of(split_catalog, instance([wide], *[AMPLE] * 3), max_splits=9)
    for pieces in (1, 2):
        assert episodes.parts[0].tolist() == [pieces]
        assert episodes.splittable[0]
        halve(episodes)
    assert not episodes.splittable[0]


@pytest.mark.parametrize("max_splits", [0, 1, 3])
def test_an_episode_makes_no_more_splits_than_it_may_however_few_its_tables_are(
    split_catalog: TableCatalog, max_splits: int
) -> None:
    wide = [n for n in range(100) if split_catalog.undivided[n].width >= 32][:5]
    episodes = BatchedPlacementEnv(split_catalog, 2, 5, 4, max_splits)
    episodes.start([0, 1], [instance(wide[:2], *[AMPLE] * 4), instance(wide, *[AMPLE] * 4)])
    for _ in range(max_splits):
        assert episodes.splittable.all()
        halve(episodes)
    assert not episodes.splittable.any()
    assert episodes.count.tolist() == [2 + max_splits, 5 + max_splits]


def test_episodes_of_whole_tables_are_never_split_whatever_their_catalog_knows(
    split_catalog: TableCatalog,
) -> None:
    env = ShardingVectorEnv(split_catalog, 8, RandomTaskSampler((2, 9), (2, 4)), max_splits=0)
    env.reset(seed=0)
    for _ in range(20):
        assert not env.episodes.splittable.any()
        env.step(
            env.episodes.joined_ms.masked_fill(~env.episodes.allowed, torch.inf).argmin(1).numpy()
        )


def test_a_forbidden_split_ends_the_episode_and_changes_nothing(
    catalog: TableCatalog, split_catalog: TableCatalog
) -> None:
    for some in (catalog, split_catalog):  # one has no halves, the other but one device
        episodes = episodes_of(
            some, instance([3, 8], *[AMPLE] * (2 if some is catalog else 1)), max_splits=2
        )
        before = episodes.order.clone()
        halve(episodes)
        assert episodes.infeasible.tolist() == episodes.over.tolist() == [True]
        assert (episodes.placed.tolist(), episodes.count.tolist()) == ([0], [2])
        assert torch.equal(episodes.order, before)


@few
@given(dealt=ragged, seed=seeds)
def test_episodes_that_split_do_not_influence_those_beside(
    split_catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    instances = [sketch.on(split_catalog) for sketch in dealt]
    together = episodes_of(split_catalog, *instances, max_splits=4)
    alone = [episodes_of(split_catalog, mine, max_splits=4) for mine in instances]
    choose = AtRandom(range(seed, seed + len(instances)), SPLIT)
    choosers = [AtRandom([seed + env_id], SPLIT) for env_id in range(len(instances))]
    while True:
        wide = Layout(together.max_devices).split(Layout(together.max_devices).observe(together))
        for env_id, episodes in enumerate(alone):
            assert together.over[env_id] == episodes.over[0]
            assert together.splittable[env_id] == episodes.splittable[0]
            narrow = Layout(episodes.max_devices)
            for name, part in narrow.split(narrow.observe(episodes)).items():
                mine = wide[name][env_id]
                if name in ("devices", "exists", "allowed"):
                    mine = mine[: episodes.max_devices]
                torch.testing.assert_close(mine, part[0], rtol=1e-4, atol=1e-4)
        if together.over.all():
            break
        together.place(choose(together))
        for episodes, chooser in zip(alone, choosers, strict=True):
            episodes.place(chooser(episodes))
    for env_id, episodes in enumerate(alone):
        assert together.placed_pieces(env_id) == episodes.placed_pieces(0)


@fewest
@given(sketch=sketches((2, 6), (2, 3), tightest=2), seed=seeds)
def test_an_episode_that_learns_after_splits_goes_on_by_the_new_model(
    model: CostModel,
    other_model: CostModel,
    many_tables: tuple[EmbeddingTable, ...],
    sketch: Sketch,
    seed: int,
) -> None:
    """Each half that is made from then on finds its place by what the new model says of all."""
    catalog = TableCatalog.of_tables(model, many_tables[:100], 1024, split=True)
    fresh = TableCatalog.of_tables(other_model, many_tables[:100], 1024, split=True)
    mine = sketch.on(catalog)
    episodes, choose = episodes_of(catalog, mine, max_splits=6), AtRandom([seed], SPLIT)
    for _ in range(3):
        episodes.place(choose(episodes))
    episodes.set_oracle(EstimatedCosts(other_model, 1024))
    torch.testing.assert_close(catalog.alone_ms, fresh.alone_ms)
    while True:
        left, pieces = coming(episodes, 0), episodes.order[0, : int(episodes.count[0])]
        assert float(episodes.rest_ms[0]) == pytest.approx(
            float(fresh.alone_ms[left].sum()), rel=1e-4, abs=1e-4
        )
        added = float(fresh.alone_ms[pieces].sum() - fresh.alone_ms[mine.units].sum())
        assert float(episodes.added_ms[0]) == pytest.approx(added, rel=1e-3, abs=1e-4)
        if episodes.over.all():
            break
        action = choose(episodes)
        episodes.place(action)
        if int(action[0]) == episodes.split_action:
            costs = fresh.alone_ms[coming(episodes, 0)].tolist()
            assert costs == sorted(costs, reverse=True)
    assert not episodes.infeasible[0]


def test_what_is_split_after_learning_orders_all_that_come_by_the_new_model(
    model: CostModel, other_model: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    catalog, fresh = (
        TableCatalog.of_tables(believed, many_tables[:100], 1024, split=True)
        for believed in (model, other_model)
    )
    ours, theirs = catalog.alone_ms[:100], fresh.alone_ms[:100]
    costliest = int(ours.argmax())
    disputed = (ours[:, None] > 1.02 * ours) & (theirs[:, None] < 0.98 * theirs)
    disputed[costliest] = disputed[:, costliest] = False
    pair = disputed.nonzero()[0].tolist()
    episodes = episodes_of(catalog, instance([costliest, *pair], AMPLE, AMPLE), max_splits=1)
    assert coming(episodes, 0) == [costliest, *pair]
    episodes.set_oracle(EstimatedCosts(other_model, 1024))
    halve(episodes)
    costs = fresh.alone_ms[coming(episodes, 0)].tolist()
    assert costs == sorted(costs, reverse=True)


def test_a_table_larger_than_any_device_is_placed_in_halves(split_catalog: TableCatalog) -> None:
    catalog = split_catalog
    wide = next(n for n in range(100) if catalog.undivided[n].width >= 16)
    one, two = catalog.halves[wide].tolist()
    room = int(catalog.bytes[[one, two]].max())
    assert room < catalog.bytes[wide]
    whole, split = (
        episodes_of(catalog, instance([wide], room, room), max_splits=n) for n in (0, 1)
    )
    assert whole.infeasible[0]
    assert not split.over[0]
    assert not split.allowed.any()
    halve(split)
    for device in (0, 1):
        split.place(torch.tensor([device]))
    assert (split.over.tolist(), split.infeasible.tolist()) == ([True], [False])
    widths = [piece.width for piece, _ in split.placed_pieces(0)]
    assert sum(widths) == catalog.undivided[wide].width
    assert assignment(split, 0) == [-1]  # it is nowhere whole


def test_a_step_of_training_counts_splits_on_all_devices(
    model: CostModel, tables: tuple[EmbeddingTable, ...]
) -> None:
    overhead = StepOverhead(
        DirectionOverhead(1.0, 0.0, 0.0, 0.0, 0.0),
        DirectionOverhead(1.0, 0.0, 0.0, 0.0, 0.0),
        shared_lookup_ns=0.0,
        shared_output_ns=0.0,
        shared_feature_ms=0.0,
        regrouped_ns=1e3,
        split_sample_ns=1e5,
        shared_ms=0.0,
    )
    objective = Objective("step")
    training = replace(model, overhead=overhead).for_objective(objective)
    catalog = TableCatalog.of_tables(training, tables[:3], 512, split=True)
    mine = replace(instance([0, 1, 2], AMPLE, AMPLE), objective=objective)
    episodes = episodes_of(catalog, mine, max_splits=2)
    for _ in range(2):
        halve(episodes)
    while not episodes.over.all():
        episodes.place(torch.tensor([int(episodes.placed[0]) % 2]))
    task = catalog.task(mine)
    first_ms, each_ms = 1e3 * task.columns * 1e-6 * 256, 1e5 * 1e-6 * 256
    assert float(episodes.common_ms[0]) == pytest.approx(first_ms + 2 * each_ms)
    plan = ShardingPlan.of_pieces(task, episodes.placed_pieces(0))
    assert len(plan.placements) == 5
    oracle = EstimatedCosts(training, 512)
    step_ms = oracle.step_ms(plan, task) - oracle.common_ms(task)  # what all plans take
    assert float(episodes.plan_ms[0]) == pytest.approx(step_ms, rel=1e-3)
