"""Tiny tasks, of which every plan can be priced: no play beats the best, and one play is it."""

from itertools import product

import numpy as np
import pytest
import torch
from episodes import (
    AMPLE,
    AtRandom,
    Sketch,
    assignment,
    episodes_of,
    few,
    greedily,
    instance,
    seeds,
    sketches,
)
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import TableCatalog, TaskInstance
from autoshard.workload import Shard

TINY = {"tables": (1, 6), "devices": (2, 3)}


def worst_of_plans(
    catalog: TableCatalog, dealt: TaskInstance, model: CostModel
) -> dict[tuple[int, ...], float]:
    """The slowest device's cost of each plan that fits the memory, by the devices of its tables."""
    numbers, devices = range(len(dealt.units)), len(dealt.memory_bytes)
    subsets = [held for held in product((False, True), repeat=len(dealt.units)) if any(held)]
    pieces = [catalog.undivided[number] for number in dealt.units]
    shards = [Shard(tuple(pieces[n] for n in numbers if held[n])) for held in subsets]
    costs = [cost.total_ms for cost in EstimatedCosts(model, 1024).costs(shards)]
    cost_of = dict(zip(subsets, costs, strict=True)) | {(False,) * len(pieces): 0.0}
    sizes = catalog.bytes[dealt.units]
    bytes_of = {held: int(sizes[list(held)].sum()) for held in cost_of}
    worst = {}
    for homes in product(range(devices), repeat=len(pieces)):
        parts = [tuple(home == device for home in homes) for device in range(devices)]
        if all(bytes_of[p] <= m for p, m in zip(parts, dealt.memory_bytes, strict=True)):
            worst[homes] = max(cost_of[part] for part in parts)
    return worst


@few
@given(sketch=sketches(**TINY))
def test_all_plays_together_are_all_plans(
    catalog: TableCatalog, model: CostModel, sketch: Sketch
) -> None:
    dealt = sketch.on(catalog)
    expected = worst_of_plans(catalog, dealt, model)
    ways = torch.tensor(list(product(range(len(dealt.memory_bytes)), repeat=len(dealt.units))))
    episodes = episodes_of(catalog, *[dealt] * len(ways))
    for step in range(len(dealt.units)):
        episodes.place(ways[:, step])
    assert episodes.over.all()
    complete = (~episodes.infeasible).nonzero()[:, 0].tolist()
    found = {
        tuple(assignment(episodes, env_id)): float(episodes.cost_ms[env_id].max())
        for env_id in complete
    }
    assert found.keys() == expected.keys()
    assert len(found) == len(complete)
    for homes, worst_ms in expected.items():
        assert found[homes] == pytest.approx(worst_ms, rel=1e-4)
    if expected:
        assert min(found.values()) == pytest.approx(min(expected.values()), rel=1e-4)


@few
@given(sketch=sketches(**TINY), seed=seeds)
def test_no_play_beats_the_best_plan(
    catalog: TableCatalog, model: CostModel, sketch: Sketch, seed: int
) -> None:
    dealt = sketch.on(catalog)
    best = min(worst_of_plans(catalog, dealt, model).values(), default=np.inf)
    for choose in (greedily, AtRandom(range(seed, seed + 8))):
        episodes = episodes_of(catalog, *[dealt] * 8)
        while not episodes.over.all():
            episodes.place(choose(episodes))
        worst = episodes.cost_ms.amax(1)[~episodes.infeasible]
        assert (worst >= best * (1 - 1e-4)).all()


@few
@given(numbers=st.lists(st.integers(0, 99), min_size=3, max_size=6, unique=True))
def test_no_plan_is_much_better_than_the_bound(
    catalog: TableCatalog, model: CostModel, numbers: list[int]
) -> None:
    for devices in (1, 2, 3):
        dealt = instance(numbers, *[AMPLE] * devices)
        best = min(worst_of_plans(catalog, dealt, model).values())
        assert best >= 0.9 * float(episodes_of(catalog, dealt).lower_bound_ms[0])
