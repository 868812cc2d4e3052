"""Runs the Ray Train example of docs/torchrec.md, kills a worker, and takes a node away."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from commands import Watched, actors, kill_actors, wait_until
from forked_ranks import run_forked
from torch import distributed
from trainings import write_ray_train

from autoshard.benchmark import BenchmarkPool
from autoshard.integration import plan_of_checkpoint

WORKER = "RayTrainWorker"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the example and the model that it trains."""
    write_ray_train(tmp_path)
    return tmp_path


@pytest.fixture
def second_node(cluster: Any, fresh_pool: Callable[..., BenchmarkPool]) -> Any:
    """Adds a node of two CPUs beside the head's two; returns what removes it."""
    node = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()

    def remove() -> None:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)

    yield remove
    remove()


def undisturbed(folder: Path, steps: int) -> list[float]:
    """Losses of this rank by the example's own loop, without Ray."""
    sys.path.insert(0, str(folder))
    losses: list[float] = []
    fake: Any = ray.train  # of a process that ends afterwards
    fake.get_context = lambda: SimpleNamespace(get_world_rank=distributed.get_rank)
    fake.get_checkpoint = lambda: None
    fake.report = lambda metrics, _: losses.append(metrics["loss"])
    runpy.run_path(str(folder / "train_with_ray.py"))["train_loop"]({"steps": steps})
    return losses


def start(folder: Path, steps: int) -> Watched:
    patience = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}  # other tests run beside
    return Watched(str(folder / "train_with_ray.py"), str(steps), folder, **patience)


def reported(folder: Path) -> tuple[list[tuple[int, int]], list[float]]:
    """Steps with their numbers of ranks, and losses of the first rank, of all checkpoints."""
    table: Any = ray.train.Result.from_path(folder / "run").metrics_dataframe
    rows = table.to_dict("records")
    return [(row["step"], row["ranks"]) for row in rows], [row["loss"] for row in rows]


def test_training_survives_a_killed_worker_and_a_lost_node(
    second_node: Callable[[], None], folder: Path
) -> None:
    expected = run_forked(4, undisturbed, folder, 7, of_node=2)[0]

    training = start(folder, 6)
    wait_until("checkpoints", lambda: len([*folder.glob("run/*/.metadata")]) >= 2)
    before = {worker.pid for worker in actors(WORKER)}
    assert kill_actors(WORKER, 1) == 1
    wait_until("new workers", lambda: {worker.pid for worker in actors(WORKER)} - before)
    training.end()
    steps, losses = reported(folder)
    assert steps == [(step, 4) for step in range(6)]
    assert losses == pytest.approx(expected[:6], rel=1e-5)

    second_node()
    start(folder, 8).end()
    steps, losses = reported(folder)
    assert steps[6:] == [(6, 2), (7, 2)]
    assert losses[6] == pytest.approx(expected[6], rel=1e-5)  # by the same weights and samples
    newest = max(folder.glob("run/*/.metadata")).parent
    assert plan_of_checkpoint(newest).num_devices == 2
