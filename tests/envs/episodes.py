"""Tasks, and ways to choose actions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.envs import BatchedPlacementEnv, TableCatalog, TaskInstance

few, fewest = settings(max_examples=25), settings(max_examples=8)  # for what takes long

AMPLE = 2**50  # bytes: more than any tables take


@dataclass(frozen=True)
class Sketch:
    """A task before its catalog is known. Devices have `fill` times what the tables take in all."""

    pieces: tuple[int, ...]
    weights: tuple[float, ...]
    fill: float

    def on(self, catalog: TableCatalog) -> TaskInstance:
        pieces, shares = np.array(self.pieces), np.array(self.weights)
        memory = catalog.bytes[pieces].sum() * self.fill * shares / shares.sum()
        return TaskInstance(pieces, memory.astype(np.int64) + 1)


def sketches(
    tables: tuple[int, int] = (1, 9), devices: tuple[int, int] = (1, 4), tightest: float = 0.8
) -> st.SearchStrategy[Sketch]:
    """Of the catalog's first 100 tables: with `tightest` below 1 some of them cannot be solved."""
    pieces = st.lists(st.integers(0, 99), min_size=tables[0], max_size=tables[1], unique=True).map(
        tuple
    )
    weights = st.lists(st.floats(0.2, 1), min_size=devices[0], max_size=devices[1]).map(tuple)
    return st.builds(Sketch, pieces, weights, st.floats(tightest, 3))


ragged = st.lists(sketches(), min_size=1, max_size=4)
seeds = st.integers(0, 999)


def instance(pieces: Sequence[int], *memory_bytes: int) -> TaskInstance:
    return TaskInstance(np.array(pieces), np.array(memory_bytes))


def episodes_of(
    catalog: TableCatalog, *instances: TaskInstance, max_splits: int = 0
) -> BatchedPlacementEnv:
    """An episode just large enough."""
    max_tables = max(len(instance.units) for instance in instances)
    max_devices = max(len(instance.memory_bytes) for instance in instances)
    episodes = BatchedPlacementEnv(catalog, len(instances), max_tables, max_devices, max_splits)
    episodes.start(range(len(instances)), instances)
    return episodes


def assignment(episodes: BatchedPlacementEnv, env_id: int) -> list[int]:
    """Returns the device of each unit of the task that is placed whole; else -1."""
    instance, count = episodes.instances[env_id], int(episodes.count[env_id])
    assert instance is not None
    homes = [-1] * len(instance.units)
    for origin, home in zip(episodes.origin[env_id, :count], episodes.homes[env_id], strict=False):
        if episodes.parts[env_id, origin] == 1:
            homes[int(origin)] = int(home)
    return homes


class AtRandom:
    """Chooses a random allowed device for each environment, or a split with some probability.

    The choices in an environment do not depend on the others.
    """

    def __init__(self, seeds: Sequence[int], splitting: float = 0.0) -> None:
        self._rngs = [np.random.default_rng(seed) for seed in seeds]
        self._splitting = splitting

    def __call__(self, episodes: BatchedPlacementEnv) -> Tensor:
        chosen = []
        for env_id, rng in enumerate(self._rngs):
            devices = episodes.allowed[env_id].nonzero()[:, 0].tolist()
            halves, where = rng.random() < self._splitting, rng.random()
            if episodes.splittable[env_id] and (halves or not devices):
                chosen.append(episodes.split_action)
            else:
                chosen.append(devices[int(where * len(devices))] if devices else 0)
        return torch.tensor(chosen)


def at_random(
    catalog: TableCatalog,
    dealt: Sequence[Sketch],
    seed: int,
    splitting: float = 0.0,
    max_splits: int = 0,
) -> tuple[list[TaskInstance], BatchedPlacementEnv, AtRandom]:
    """Returns the sketched tasks, an episode of each, and random choices for them."""
    instances = [sketch.on(catalog) for sketch in dealt]
    episodes = episodes_of(catalog, *instances, max_splits=max_splits)
    return instances, episodes, AtRandom(range(seed, seed + len(instances)), splitting)


def greedily(episodes: BatchedPlacementEnv) -> Tensor:
    """Where the table makes the cheapest device."""
    return episodes.joined_ms.masked_fill(~episodes.allowed, torch.inf).argmin(1)
