from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from commands import PATIENCE, in_pool, wait_until
from ray._private.state import actors

from autoshard.benchmark import BenchmarkPool, MeasurementStore, MeasureSettings, TimingOptions
from autoshard.benchmark.machine.hardware import physical_cores
from autoshard.workload import EmbeddingTable, random_shards

QUICK = TimingOptions(precision=0.2, max_iterations=9)


@pytest.mark.skipif(len(physical_cores()) < 2, reason="a second node needs a second core")
def test_a_node_that_leaves_while_100_shards_are_measured(
    cluster: Any,
    fresh_pool: Callable[..., BenchmarkPool],
    tables: tuple[EmbeddingTable, ...],
    tmp_path: Path,
) -> None:
    """Two Ray nodes share this machine, so each gets half of its cores; one is then removed."""
    second = cluster.add_node(num_cpus=1)
    try:
        pool = fresh_pool()
        devices = pool.devices()
        assert len(devices) == len(physical_cores())
        places = homes_of(pool)
        assert len(set(places.values())) == 2
        shards = random_shards(tables, 100, 10, seed=2)
        answers: dict[int, Any] = {}
        for index, answer in pool.stream(shards, MeasureSettings(512)):
            assert index not in answers
            answers[index] = answer
            if len(answers) == 20:
                cluster.remove_node(second, allow_graceful=False)
    finally:
        if second in cluster.worker_nodes:
            cluster.remove_node(second)
    assert sorted(answers) == list(range(100))
    assert all(answers[index].ok for index in answers)
    assert [answers[index].shard for index in range(100)] == shards
    lost = {name for name, node in places.items() if node == second.node_id}
    assert {answer.device for answer in answers.values()} == set(places)
    assert lost
    pool.close()
    with MeasurementStore(tmp_path / "costs.db") as store:
        found = [item.shard.digest for item in store.measurements()]
    assert len(found) == len(set(found)) == 100


def test_a_pool_moves_to_nodes_that_declare_the_resource_and_back(
    cluster: Any,
    fresh_pool: Callable[..., BenchmarkPool],
    tables: tuple[EmbeddingTable, ...],
) -> None:
    """A first such node joins while the pool measures elsewhere, and leaves while it measures."""
    pool = fresh_pool()
    count = len(pool.devices())
    elsewhere = nodes_of(pool)
    shards = random_shards(tables, 16, 6, seed=8)
    declared = cluster.add_node(num_cpus=0, resources={"benchmark": 1})
    try:
        answers = dict(pool.stream(shards, MeasureSettings(256), QUICK))
        wait_until("the node", lambda: nodes_of(pool) == {declared.node_id}, PATIENCE)
        wait_until("all devices", lambda: len(pool.devices()) == count, PATIENCE)
        assert any("only nodes with the resource" in notice for notice in pool.notices())
        for index, answer in pool.stream(shards, MeasureSettings(256, seed=1), QUICK):
            if len(answers) == len(shards):
                cluster.remove_node(declared)
            answers[len(shards) + index] = answer
    finally:
        if declared in cluster.worker_nodes:
            cluster.remove_node(declared)
    assert sorted(answers) == list(range(2 * len(shards)))
    assert all(answer.ok for answer in answers.values())
    wait_until("other nodes", lambda: nodes_of(pool) == elsewhere, PATIENCE)


def nodes_of(pool: BenchmarkPool) -> set[str]:
    """The Ray nodes that a pool measures on."""
    return set(homes_of(pool).values())


def homes_of(pool: BenchmarkPool) -> dict[str, str]:
    """The Ray node of each device that a pool measures on."""
    found: dict[str, str] = in_pool(
        pool, lambda own: {each.info.name: each.place.node_id for each in own._fleet.devices}
    )
    return found


@ray.remote(num_cpus=0)
def devices_of(store: Path, name: str) -> int:
    return len(BenchmarkPool(store, name=name).devices())


def node_of(pool: BenchmarkPool) -> str:
    return str(actors(pool._actor._actor_id.hex())["Address"]["NodeID"])


def test_a_pool_is_on_the_node_of_its_first_client_and_then_on_that_of_the_next(
    cluster: Any, fresh_pool: Callable[..., BenchmarkPool], tmp_path: Path
) -> None:
    fresh_pool()
    second = cluster.add_node(num_cpus=1, resources={"second": 1})
    try:
        asked = devices_of.options(resources={"second": 1}).remote(tmp_path / "costs.db", "moves")
        assert ray.get(asked, timeout=PATIENCE) > 0
        pool = BenchmarkPool(tmp_path / "costs.db", name="moves")
        assert node_of(pool) == second.node_id
    finally:
        cluster.remove_node(second, allow_graceful=False)
    here = ray.get_runtime_context().get_node_id()
    wait_until("the pool", lambda: pool.devices() and node_of(pool) == here, PATIENCE)
    pool.shutdown()
