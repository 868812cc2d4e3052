"""Memory: where the current table may go, and how episodes end."""

import numpy as np
import pytest
import torch
from episodes import AMPLE, Sketch, assignment, at_random, episodes_of, few, instance, ragged, seeds
from hypothesis import given

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import BatchedPlacementEnv, TableCatalog
from autoshard.envs.lookahead import largest_units_fit
from autoshard.workload import EmbeddingTable, UserError


def test_the_four_largest_to_come_fit_where_they_fit_most_tightly() -> None:
    """As a plain loop has it, for environments with much room and with little side by side."""
    rng = np.random.default_rng(0)
    told = {True: 0, False: 0}
    for _ in range(60):
        env_ids, devices, pieces = 12, int(rng.integers(1, 6)), int(rng.integers(1, 9))
        free = rng.integers(0, 120, (env_ids, devices))
        free[:, 1:][rng.random((env_ids, devices - 1)) < 0.2] = -1  # absent
        sizes, placed = rng.integers(1, 60, (env_ids, pieces)), rng.integers(0, pieces, env_ids)
        size = sizes[np.arange(env_ids), placed]
        coming = [sorted(sizes[s, placed[s] + 1 :].tolist(), reverse=True) for s in range(env_ids)]
        largest = [max(some, default=0) for some in coming]
        found = largest_units_fit(
            torch.from_numpy(free),
            torch.from_numpy(size),
            torch.tensor(largest, dtype=torch.float64),
            torch.from_numpy(sizes).double(),
            torch.from_numpy(placed),
        )
        for env_id in range(env_ids):
            for device in np.flatnonzero(free[env_id] >= size[env_id]).tolist():
                rooms = free[env_id].tolist()
                rooms[device] -= int(size[env_id])
                fits = True
                for needed in coming[env_id][:4]:
                    fitting = [n for n, room in enumerate(rooms) if room >= needed]
                    if not fitting:
                        fits = False
                        break
                    rooms[min(fitting, key=lambda n: rooms[n])] -= needed
                assert bool(found[env_id, device]) == fits
                told[fits] += 1
    assert min(told.values()) > 100


@given(dealt=ragged, seed=seeds)
def test_devices_are_allowed_if_they_exist_and_have_memory(
    catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    instances, episodes, choose = at_random(catalog, dealt, seed)
    free = [list(instance.memory_bytes) for instance in instances]
    while True:
        for env_id, rooms in enumerate(free):
            absent = [False] * (episodes.max_devices - len(rooms))
            size = catalog.bytes[int(episodes.current[env_id])]
            assert episodes.exists[env_id].tolist() == [True] * len(rooms) + absent
            assert episodes.free[env_id, : len(rooms)].tolist() == rooms
            if not episodes.over[env_id] or episodes.infeasible[env_id]:
                assert (
                    episodes.allowed[env_id].tolist() == [room >= size for room in rooms] + absent
                )
            assert bool(episodes.infeasible[env_id]) == (
                episodes.placed[env_id] < episodes.count[env_id]
                and all(room < size for room in rooms)
            )
        if episodes.over.all():
            break
        devices = choose(episodes)
        for env_id in (~episodes.over).nonzero()[:, 0].tolist():
            free[env_id][devices[env_id]] -= catalog.bytes[int(episodes.current[env_id])]
        episodes.place(devices)
    assert min(min(rooms) for rooms in free) >= 0


def test_an_episode_ends_where_the_next_table_fits_nowhere(catalog: TableCatalog) -> None:
    costly, cheap = sorted((3, 8), key=lambda n: -float(catalog.alone_ms[n]))
    roomy = int(catalog.bytes[costly])
    tight = roomy + int(catalog.bytes[cheap]) - 1
    episodes = episodes_of(
        catalog, instance([cheap, costly], tight), instance([cheap, costly], tight, roomy)
    )
    assert episodes.over.tolist() == [False, False]
    episodes.place(torch.tensor([0, 1]))
    assert (episodes.over.tolist(), episodes.infeasible.tolist()) == ([True, False], [True, False])
    assert episodes.rest_share.tolist() == [0.5, 0.5]
    assert assignment(episodes, 0) == [-1, 0]
    episodes.place(torch.tensor([0, 0]))
    assert (episodes.over.tolist(), episodes.infeasible.tolist()) == ([True, True], [True, False])
    assert assignment(episodes, 0) == [-1, 0]
    assert assignment(episodes, 1) == [0, 1]


def test_an_episode_without_memory_is_over_at_once(
    catalog: TableCatalog,
) -> None:
    episodes = episodes_of(
        catalog, instance([3], int(catalog.bytes[3]) - 1), instance([3], int(catalog.bytes[3]))
    )
    assert episodes.over.tolist() == episodes.infeasible.tolist() == [True, False]
    assert not episodes.allowed[0].any()


def test_a_forbidden_action_ends_the_episode_and_places_nothing(catalog: TableCatalog) -> None:
    small = int(catalog.bytes[[3, 8]].min()) - 1
    instances = (
        instance([3, 8], AMPLE, small, AMPLE),
        instance([3, 8], AMPLE, AMPLE),
        instance([3, 8], AMPLE),
    )
    episodes = episodes_of(catalog, *instances)
    episodes.place(torch.tensor([1, 2, 0]))  # too small; does not exist; fine
    assert episodes.infeasible.tolist() == episodes.over.tolist() == [True, True, False]
    assert episodes.placed.tolist() == [0, 0, 1]
    assert episodes.shards(0) == [None, None, None]
    episodes.place(torch.tensor([0, 0, 0]))
    assert episodes.placed.tolist() == [0, 0, 2]
    assert episodes.infeasible.tolist() == [True, True, False]


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OutsideTraining")
def test_devices_are_safe_if_the_largest_tables_to_come_still_fit(
    model: CostModel,
) -> None:
    """Three tables of 1, 2 and 4 units; the costliest is the smallest."""
    tables = [
        EmbeddingTable(f"t{units}", units * 10_000_000, 16, pooling)
        for units, pooling in ((1, 80.0), (2, 20.0), (4, 2.0))
    ]
    catalog = TableCatalog.of_tables(model, tables, 1024)
    unit = int(catalog.bytes[0])
    for memory, allowed, safe in (
        ((9, 9), [True, True], [True, True]),
        ((4, 3), [True, True], [False, True]),  # the largest needs all of the first
        ((6, 3), [True, True], [True, True]),
        ((6, 1), [True, True], [False, True]),
        ((5, 1), [True, True], [False, False]),
        ((7, 0.5), [True, False], [True, False]),
    ):
        rooms = [int(units * unit * 1.01) for units in memory]
        episodes = episodes_of(catalog, instance([2, 0, 1], *rooms))
        assert int(episodes.current[0]) == 0
        assert episodes.allowed[0].tolist() == allowed
        assert episodes.safe[0].tolist() == safe, memory


def test_a_device_that_all_tables_fill_to_the_last_byte_is_safe(catalog: TableCatalog) -> None:
    numbers = np.random.default_rng(0).permutation(100).reshape(20, 5)
    episodes = episodes_of(
        catalog, *(instance(five, catalog.bytes[five].sum()) for five in numbers)
    )
    for _ in range(5):
        assert episodes.allowed.all()
        assert episodes.safe.all()
        episodes.place(torch.zeros(20, dtype=torch.int64))


@few
@given(dealt=ragged, seed=seeds)
def test_no_device_is_safe_that_leaves_a_table_without_memory(
    catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    _, episodes, choose = at_random(catalog, dealt, seed)
    while not episodes.over.all():
        assert not (episodes.safe & ~episodes.allowed).any()
        for env_id in (~episodes.over).nonzero()[:, 0].tolist():
            now, end = int(episodes.placed[env_id]), int(episodes.count[env_id])
            sizes = catalog.bytes[episodes.order[env_id, now:end].numpy()].tolist()
            for device in episodes.allowed[env_id].nonzero()[:, 0].tolist():
                free = episodes.free[env_id, : len(dealt[env_id].weights)].tolist()
                free[device] -= sizes[0]
                largest = max(sizes[1:], default=0)
                if largest > max(free) * 1.001:
                    assert not episodes.safe[env_id, device]
                if sum(sizes[1:]) * 1.001 <= min(free):
                    assert episodes.safe[env_id, device]
        episodes.place(choose(episodes))


def test_a_task_too_large_is_refused(catalog: TableCatalog, model: CostModel) -> None:
    episodes = BatchedPlacementEnv(catalog, 1, 2, 2)
    for too_large in (instance([1, 2, 3], 1), instance([1], 1, 1, 1)):
        with pytest.raises(UserError, match="max_tables=2 and max_devices=2"):
            episodes.start([0], [too_large])
    with pytest.raises(UserError, match="at least one table"):
        TableCatalog(EstimatedCosts(model, 1024), [])
