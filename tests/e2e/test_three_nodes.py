"""A Ray cluster of three nodes on this machine; one plays the GPU worker by a custom resource."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from commands import PATIENCE, Watched
from ray._private.state import actors
from ray.util import placement_group, remove_placement_group

from autoshard.benchmark import BenchmarkPool, MeasurementStore

# What checks would take is not what these tests are about: there is one at first.
TINY = (
    "--tables synthetic:80:1:small --num-tables 6 --num-devices 2 --num-envs 8 --check-tasks 2 "
    "--check-every 100 --batch-size 512 --memory-fill 0.1-0.6"
)


def alive(kind: str) -> list[str]:
    """The nodes of all living actors of a class."""
    return [
        actor["Address"]["NodeID"]
        for actor in actors().values()
        if kind in actor["ActorClassName"] and actor["State"] == "ALIVE"
    ]


def wait_until(true: Callable[[], bool], watched: Watched) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert watched.process.poll() is None, watched.log.read_text()
        assert time.monotonic() < deadline, watched.log.read_text()
        time.sleep(0.2)


@pytest.fixture
def busy(cluster: Any) -> Iterator[None]:
    """One of the two CPUs of the head is taken, so that one trial fills it."""
    taken = placement_group([{"CPU": 1}])
    ray.get(taken.ready())
    yield
    remove_placement_group(taken)


@pytest.fixture
def workers(cluster: Any, fresh_pool: Callable[..., BenchmarkPool]) -> Iterator[Callable[..., Any]]:
    """Adds nodes that are gone after the test."""
    added = []

    def add(**options: Any) -> Any:
        added.append(cluster.add_node(**options))
        cluster.wait_for_nodes()
        return added[-1]

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


def test_actors_land_where_they_should_and_nodes_may_go(
    cluster: Any, workers: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = workers(num_cpus=2, resources={"trainer": 1})
    gpu = workers(num_cpus=0, resources={"benchmark": 1})
    options = (
        "--num-env-runners 3 --measured-share 0.3 --iterations 1000 --out run --test-seconds 0"
    )
    training = Watched("ppo_shard.py", f"{TINY} {options}", tmp_path)
    training.wait_for(r"\n +2/10")
    assert set(alive("DeviceProcess")) == {gpu.node_id}
    runners = set(alive("EnvRunner"))
    assert trainer.node_id in runners
    assert gpu.node_id not in runners
    cluster.remove_node(trainer, allow_graceful=False)
    # Ray takes a while to hold the node for dead; the env runners left play on meanwhile.
    training.wait_for(r"env runner .* was lost and is replaced(?s:.*) \d+/1000(?s:.*) \d+/1000")
    assert trainer.node_id not in alive("EnvRunner")
    training.process.send_signal(signal.SIGINT)
    training.end(code=130)
    with MeasurementStore(tmp_path / "run" / "costs.db") as store:
        assert len(store) >= 5


def test_a_node_that_joins_a_sweep_is_used(
    cluster: Any, busy: None, workers: Callable[..., Any], tmp_path: Path
) -> None:
    options = (
        "--num-samples 2 --max-iterations 30 --scheduler none --search random --reward mixed "
        "--storage sweep --json told.json"
    )
    sweep = Watched("tune_shard.py", f"{TINY} {options}", tmp_path)
    head = cluster.head_node.node_id
    wait_until(lambda: alive("ResourceTrainable") == [head], sweep)
    joined = workers(num_cpus=1, resources={"benchmark": 1})
    wait_until(lambda: joined.node_id in alive("ResourceTrainable"), sweep)
    wait_until(lambda: set(alive("DeviceProcess")) == {joined.node_id}, sweep)
    sweep.end()
    told = json.loads((tmp_path / "told.json").read_text())
    assert [trial["iterations"] for trial in told["trials"]] == [30] * 2
    assert told["at_once"] == 2
    assert ray.is_initialized()
