"""What a player sees, and what makes no difference to it."""

import numpy as np
import pytest
import torch
from episodes import AMPLE, AtRandom, Sketch, episodes_of, instance, seeds, sketches
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import BatchedPlacementEnv, Layout, TableCatalog, TaskInstance
from autoshard.envs.observation import DESCRIBED, DEVICE, DEVICE_PARTS
from autoshard.workload import EmbeddingTable

PER_DEVICE = ("devices", "exists", "allowed")


@pytest.fixture(scope="module")
def catalogs_of_bytes(
    model: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> tuple[TableCatalog, TableCatalog]:
    """The same tables, and the same with twice the bytes."""
    lean, full = (TableCatalog.of_tables(model, many_tables, 1024) for _ in range(2))
    full.bytes, full.sizes = 2 * full.bytes, 2 * full.sizes
    full.set_oracle(EstimatedCosts(model, 1024))
    return lean, full


def seen_of(episodes: BatchedPlacementEnv) -> dict[str, Tensor]:
    layout = Layout(episodes.max_devices)
    return layout.split(layout.observe(episodes))


def same(first: Tensor, second: Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4, equal_nan=True)


@given(max_devices=st.integers(1, 9), batch=st.lists(st.integers(1, 3), max_size=2))
def test_the_parts_are_the_whole_vector(max_devices: int, batch: list[int]) -> None:
    layout = Layout(max_devices)
    rng = np.random.default_rng(max_devices)
    vectors = rng.random((*batch, layout.size)).astype(np.float32)
    arrays, tensors = layout.split(vectors), layout.split(torch.from_numpy(vectors))
    for parts in (arrays, tensors):
        assert {name: part.shape[len(batch) :] for name, part in parts.items()} == layout.shapes
        whole = [np.asarray(part).reshape(*batch, -1) for part in parts.values()]
        np.testing.assert_array_equal(np.concatenate(whole, axis=-1), vectors)
    assert all(isinstance(part, Tensor) for part in tensors.values())
    assert arrays["devices"].shape[-2] == max_devices


def test_parts_are_views() -> None:
    layout = Layout(3)
    vector = np.zeros(layout.size, np.float32)
    layout.split(vector)["allowed"][:] = 1
    assert vector.sum() == 3


def test_what_is_seen_is_new_memory(catalog: TableCatalog) -> None:
    episodes = episodes_of(catalog, instance([3, 8], AMPLE, AMPLE))
    layout = Layout(2)
    first = layout.observe(episodes)
    copy = first.clone()
    episodes.place(torch.tensor([0]))
    assert torch.equal(first, copy)
    assert not torch.equal(layout.observe(episodes), copy)


@given(sketch=sketches(), seed=seeds)
def test_masks_and_progress_are_those_of_the_episode(
    catalog: TableCatalog, sketch: Sketch, seed: int
) -> None:
    episodes, choose = episodes_of(catalog, sketch.on(catalog)), AtRandom([seed])
    while True:
        seen = seen_of(episodes)
        assert torch.equal(seen["exists"].bool(), episodes.exists)
        assert torch.equal(seen["allowed"].bool(), episodes.allowed)
        assert float(seen["progress"][0, 0]) == pytest.approx(
            int(episodes.placed[0]) / len(sketch.pieces)
        )
        if episodes.over.all():
            break
        episodes.place(choose(episodes))


@pytest.mark.parametrize(("tables", "devices"), [(1, 2), (1, 4), (2, 4), (3, 2)])
def test_however_few_the_tables_are_what_is_seen_is_finite(
    catalog: TableCatalog, tables: int, devices: int
) -> None:
    episodes = episodes_of(catalog, instance(range(tables), *[AMPLE] * devices))
    layout = Layout(devices)
    assert (episodes.even_split_ms > 0).all()
    while True:
        assert layout.observe(episodes).isfinite().all()
        if episodes.over.all():
            break
        episodes.place(torch.zeros(1, dtype=torch.int64))


@given(sketch=sketches(devices=(2, 4)), seed=seeds, data=st.data())
def test_devices_in_another_order_are_seen_in_that_order(
    catalog: TableCatalog, sketch: Sketch, seed: int, data: st.DataObject
) -> None:
    dealt = sketch.on(catalog)
    order = data.draw(st.permutations(range(len(sketch.weights))))
    mixed = TaskInstance(dealt.units, dealt.memory_bytes[order])
    episodes, other, choose = (
        episodes_of(catalog, dealt),
        episodes_of(catalog, mixed),
        AtRandom([seed]),
    )
    while True:
        mine, yours = seen_of(episodes), seen_of(other)
        for name, part in mine.items():
            same(part[:, order] if name in PER_DEVICE else part, yours[name])
        assert torch.equal(episodes.over, other.over)
        if episodes.over.all():
            break
        device = choose(episodes)
        episodes.place(device)
        other.place(torch.tensor([order.index(int(device[0]))]))


@given(sketch=sketches(), seed=seeds)
def test_the_order_of_the_task_is_not_seen(
    catalog: TableCatalog, sketch: Sketch, seed: int
) -> None:
    dealt = sketch.on(catalog)
    episodes = episodes_of(catalog, dealt)
    other = episodes_of(catalog, TaskInstance(dealt.units[::-1].copy(), dealt.memory_bytes))
    choosers = AtRandom([seed]), AtRandom([seed])
    while not episodes.over.all():
        mine, yours = seen_of(episodes), seen_of(other)
        for name, part in mine.items():
            same(part, yours[name])
        for player, chooser in zip((episodes, other), choosers, strict=True):
            player.place(chooser(player))


@given(sketch=sketches(), seed=seeds)
def test_only_shares_of_the_memory_are_seen(
    catalogs_of_bytes: tuple[TableCatalog, TableCatalog], sketch: Sketch, seed: int
) -> None:
    """Tables with twice the bytes on devices with twice the memory look the same."""
    catalogs = catalogs_of_bytes
    assert (catalogs[1].bytes == 2 * catalogs[0].bytes).all()
    small = sketch.on(catalogs[0])
    episodes = episodes_of(catalogs[0], small)
    other = episodes_of(catalogs[1], TaskInstance(small.units, 2 * small.memory_bytes))
    choose = AtRandom([seed])
    while True:
        for name, part in seen_of(episodes).items():
            same(part, seen_of(other)[name])
        if episodes.over.all():
            break
        device = choose(episodes)
        episodes.place(device)
        other.place(device)


def test_a_task_twice_as_large_looks_alike(
    model: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    """Each table twice, on twice the devices: what is placed and the devices look the same."""
    twins = [table for table in many_tables[:20] for _ in range(2)]
    catalog = TableCatalog.of_tables(model, twins, 1024)
    memory = int(catalog.bytes[::2].sum())
    small = episodes_of(catalog, instance(range(0, 40, 2), *[memory] * 2))
    large = episodes_of(catalog, instance(range(40), *[memory] * 4))
    assert (seen_of(small)["progress"] < seen_of(large)["progress"])[0].tolist() == [0, 1, 1, 0]
    norm = DESCRIBED + DEVICE_PARTS.index("soft_after")
    assert norm == DEVICE - 1
    for device in (0, 1, 1, 0, 1):
        once, twice = seen_of(small), seen_of(large)
        for name in ("table", "rest"):
            same(once[name], twice[name])
        for half in (slice(0, 2), slice(2, 4)):
            # The norm is of all devices: of more of them it is another.
            same(once["devices"][..., :norm], twice["devices"][:, half, :norm])
        small.place(torch.tensor([device]))
        large.place(torch.tensor([device]))
        large.place(torch.tensor([device + 2]))
