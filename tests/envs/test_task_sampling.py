"""Who deals: ranges, seeds, and that every task can be solved. Packing by first fit decreasing."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from episodes import assignment, episodes_of
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import RandomTaskSampler, TableCatalog
from autoshard.workload import FieldError
from autoshard.workload.packing.first_fit import first_fit_decreasing

TIGHT = RandomTaskSampler((2, 30), (1, 6), fill=(0.95, 1.0), unevenness=0.7)
seeds = st.integers(0, 9999)
few_sizes = st.lists(st.integers(0, 12), max_size=6)
few_rooms = st.lists(st.integers(1, 20), min_size=1, max_size=3)


def ranges(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted).map(tuple)


@given(tables=ranges(1, 40), devices=ranges(1, 6), seed=seeds)
def test_ranges_are_kept(
    catalog: TableCatalog, tables: tuple[int, int], devices: tuple[int, int], seed: int
) -> None:
    task_sampler = RandomTaskSampler(tables, devices)
    instance = task_sampler.sample(catalog, np.random.default_rng(seed), 1)[0]
    assert tables[0] <= len(instance.units) <= tables[1] == task_sampler.max_tables
    assert devices[0] <= len(instance.memory_bytes) <= devices[1] == task_sampler.max_devices
    assert len(set(instance.units.tolist())) == len(instance.units)
    assert (instance.memory_bytes > 0).all()


def test_the_ends_of_ranges_are_sampled_and_all_tables_too(catalog: TableCatalog) -> None:
    task_sampler, rng = RandomTaskSampler((2, 4), (1, 3)), np.random.default_rng(0)
    instances = [task_sampler.sample(catalog, rng, 1)[0] for _ in range(300)]
    assert {len(instance.units) for instance in instances} == {2, 3, 4}
    assert {len(instance.memory_bytes) for instance in instances} == {1, 2, 3}
    assert len({number for instance in instances for number in instance.units.tolist()}) > 190


@given(fill=st.tuples(st.floats(0.05, 0.7), st.floats(0.05, 0.7)).map(sorted), seed=seeds)
def test_the_tables_take_a_share_of_the_memory_within_the_range(
    catalog: TableCatalog, fill: list[float], seed: int
) -> None:
    task_sampler = RandomTaskSampler((60, 60), (2, 4), (fill[0], fill[1]), unevenness=0.3)
    instance = task_sampler.sample(catalog, np.random.default_rng(seed), 1)[0]
    share = catalog.bytes[instance.units].sum() / instance.memory_bytes.sum()
    assert share <= fill[1] * (1 + 1e-6)
    if fill[1] < 0.5:  # else a huge table may need more memory
        assert share >= fill[0] * (1 - 1e-6)


@given(unevenness=st.floats(0, 0.9), seed=seeds)
def test_devices_are_as_uneven_as_asked_for(
    catalog: TableCatalog, unevenness: float, seed: int
) -> None:
    sampler = RandomTaskSampler((20, 20), (4, 4), unevenness=unevenness)
    (instance,) = sampler.sample(catalog, np.random.default_rng(seed), 1)
    memory = instance.memory_bytes
    assert memory.min() >= (1 - unevenness) * memory.max() * (1 - 1e-6)
    if unevenness == 0:
        assert len(set(memory.tolist())) == 1
    elif unevenness > 0.01:
        assert len(set(memory.tolist())) == 4


@given(seed=seeds)
def test_every_task_can_be_played_to_its_end(catalog: TableCatalog, seed: int) -> None:
    instance = TIGHT.sample(catalog, np.random.default_rng(seed), 1)[0]
    (homes,) = first_fit_decreasing(
        catalog.bytes[instance.units][None], instance.memory_bytes[None]
    )
    assert homes.min() >= 0
    home_of = dict(zip(instance.units.tolist(), homes.tolist(), strict=True))
    episodes = episodes_of(catalog, instance)
    while not episodes.over.all():
        episodes.place(torch.tensor([home_of[int(episodes.current[0])]]))
    assert not episodes.infeasible[0]
    assert assignment(episodes, 0) == homes.tolist()


@given(seed=seeds)
def test_the_same_seed_samples_the_same(catalog: TableCatalog, seed: int) -> None:
    first, second, other = (
        [TIGHT.sample(catalog, rng, 1)[0] for _ in range(3)]
        for rng in map(np.random.default_rng, (seed, seed, seed + 1))
    )
    for mine, yours in zip(first, second, strict=True):
        assert mine.units.tolist() == yours.units.tolist()
        assert mine.memory_bytes.tolist() == yours.memory_bytes.tolist()
    for another in (first[1], other[0]):
        assert first[0].memory_bytes.tolist() != another.memory_bytes.tolist()


def test_a_small_catalog_is_sampled_whole(catalog: TableCatalog) -> None:
    small = TableCatalog(EstimatedCosts(catalog.model, 1024), catalog.undivided[:5])
    instance = RandomTaskSampler((10, 20), (2, 2)).sample(small, np.random.default_rng(0), 1)[0]
    assert sorted(instance.units.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tables", (0, 5)),
        ("num_tables", (6, 5)),
        ("num_devices", (0, 1)),
        ("num_devices", (3, 2)),
        ("fill", (0.0, 0.5)),
        ("fill", (0.6, 0.5)),
        ("fill", (0.5, 1.1)),
        ("fill", (float("nan"), 0.5)),
        ("unevenness", -0.1),
        ("unevenness", 1.0),
        ("unevenness", float("nan")),
    ],
)
def test_errors_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"^{field}: must") as raised:
        RandomTaskSampler(**{field: value})
    assert raised.value.field == field


def packed(sizes: list[int], rooms: list[int]) -> list[int]:
    found: list[int] = first_fit_decreasing(np.array([sizes]), np.array([rooms]))[0].tolist()
    return found


def test_first_fit_decreasing_by_hand() -> None:
    # 7 into the largest room, 5 into the other, 3 beside the 7, which leaves 1 for the other.
    assert packed([5, 1, 7, 3], [8, 10]) == [0, 0, 1, 1]
    assert packed([4, 3, 3, 2], [6, 6]) == [0, 1, 1, 0]
    assert packed([4, 4, 4], [6, 6]) == [0, 1, -1]
    assert packed([7], [6, 6]) == [-1]
    assert packed([], [1]) == []


def fits(homes: tuple[int, ...] | list[int], sizes: list[int], rooms: list[int]) -> bool:
    held = [0] * len(rooms)
    for home, size in zip(homes, sizes, strict=True):
        held[home] += size
    return all(one <= room for one, room in zip(held, rooms, strict=True))


@given(sizes=few_sizes, rooms=few_rooms)
def test_what_is_packed_fits_and_what_cannot_be_packed_is_not(
    sizes: list[int], rooms: list[int]
) -> None:
    given_sizes, given_rooms = list(sizes), list(rooms)
    homes = packed(sizes, rooms)
    assert (sizes, rooms) == (given_sizes, given_rooms)
    if -1 not in homes:
        assert fits(homes, sizes, rooms)
    else:
        assert sum(sizes) > max(rooms)
    if not any(fits(way, sizes, rooms) for way in product(range(len(rooms)), repeat=len(sizes))):
        assert -1 in homes
