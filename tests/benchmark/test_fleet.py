"""Many devices and mixed ones, played by devices that sleep; pool, clients and store are real."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from bench.sleepers import simulated_pool, start_clients

from autoshard.benchmark import (
    BenchmarkPool,
    MeasurementStore,
    MeasureSettings,
    PoolError,
    TimingOptions,
)
from autoshard.benchmark.backends import backend_of
from autoshard.benchmark.machine.hardware import NodeReport
from autoshard.benchmark.pool.devices import nodes_that_measure
from autoshard.workload import EmbeddingTable, random_shards

SETTINGS = MeasureSettings(256)
QUICK = TimingOptions(precision=0.2, max_iterations=9)
Simulate = Callable[..., BenchmarkPool]


@pytest.fixture
def simulate(cluster: object, tmp_path: Path) -> Iterator[Simulate]:
    """Pools of sleeping devices, all with one store."""
    pools: list[BenchmarkPool] = []

    def start(hardware: Sequence[str], seconds: float = 0.02) -> BenchmarkPool:
        pools.append(simulated_pool(tmp_path / "costs.db", hardware, seconds))
        return pools[-1]

    yield start
    for pool in pools:
        pool.shutdown()


def test_64_devices_answer_each_shard_once(
    simulate: Simulate, tables: tuple[EmbeddingTable, ...]
) -> None:
    pool = simulate(["a"] * 64)
    assert len(pool.devices()) == 64
    shards = random_shards(tables, 600, 8, seed=3)
    answers = [answer for _, answer in pool.stream(shards, SETTINGS)]
    assert len(answers) == 600
    assert {answer.shard.digest for answer in answers} == {shard.digest for shard in shards}
    assert len({answer.measured_at for answer in answers}) == 600
    assert len({answer.device for answer in answers}) > 32  # on a busy machine some get none
    pool.close()
    with MeasurementStore(pool.store) as store:
        assert len(store) == 600


def test_of_mixed_hardware_the_most_numerous_measures_and_the_rest_is_named(
    simulate: Simulate, tables: tuple[EmbeddingTable, ...]
) -> None:
    shards = random_shards(tables, 12, 5, seed=4)
    mostly_a, mostly_b = simulate(["a", "b", "a", "b", "a"]), simulate(["a", "b", "b"])
    assert {device.hardware for device in mostly_a.devices()} == {"a"}
    assert len(mostly_a.devices()) == 3
    told = mostly_a.notices()
    assert len(told) == 2
    for number, line in zip((1, 3), told, strict=True):
        assert f"cpu{number}@simulated is not used: it is b with" in line
        assert "most devices are a with" in line
    first = mostly_a.measure(shards, SETTINGS)
    assert {answer.hardware for answer in first} == {"a"}
    # Costs of one kind of hardware say nothing of another: all is measured anew, and kept apart.
    other = mostly_b.measure(shards, SETTINGS)
    assert {(answer.hardware, answer.reused) for answer in other} == {("b", False)}
    again = mostly_a.measure(shards, SETTINGS)
    assert again == [replace(answer, reused=True) for answer in first]
    mostly_a.close()
    mostly_b.close()
    with MeasurementStore(mostly_a.store) as store:
        assert len(store) == 24


def test_a_few_shards_need_not_wait_for_thousands(
    simulate: Simulate, tables: tuple[EmbeddingTable, ...]
) -> None:
    """Nor are they lost with a large request that has them too and is dropped."""
    pool = simulate(["a"] * 4, seconds=0.1)  # so half of all would take 19 s
    shards = random_shards(tables, 1500, 8, seed=5)
    dropped, few = pool.stream(shards, SETTINGS), pool.stream(shards[-40:], SETTINGS)
    next(dropped)
    first = next(few)
    dropped.close()
    assert sorted(dict([first, *few])) == list(range(40))
    pool.close()
    with MeasurementStore(pool.store) as store:
        assert 40 < len(store) < 750


def test_four_clients_of_overlapping_shards_measure_each_once(
    make_pool: Callable[..., BenchmarkPool], tables: tuple[EmbeddingTable, ...]
) -> None:
    """They are processes of their own, on real devices."""
    shards = random_shards(tables, 24, 4, seed=6)
    asked = [[*shards[6 * place :], *shards[: 6 * place]][:18] for place in range(4)]
    pool = make_pool("shared.db")
    pool.devices()
    clients = start_clients(pool.store, 4)
    answers = ray.get([
        client.ask.remote(some, SETTINGS, QUICK)
        for client, some in zip(clients, asked, strict=True)
    ])  # fmt: skip
    for some, wanted in zip(answers, asked, strict=True):
        assert [answer.shard for answer in some] == wanted
        assert all(answer.ok for answer in some)
    made = {(answer.shard.digest, answer.measured_at) for some in answers for answer in some}
    assert len(made) == len({digest for digest, _ in made}) == 24
    pool.close()
    with MeasurementStore(pool.store) as store:
        assert len(store) == 24


def test_a_store_that_only_another_machine_can_read_is_reported(
    make_pool: Callable[..., BenchmarkPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    pool.check_store_is_here()
    monkeypatch.setattr("autoshard.benchmark.pool.pool.machine_id", lambda: "elsewhere:1")
    with pytest.raises(PoolError, match=r"costs\.db is on .*, where the cluster's pool"):
        pool.check_store_is_here()


def node(name: str, alive: bool = True, **resources: float) -> dict[str, object]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


def test_only_declared_nodes_measure_where_there_are_any() -> None:
    trainer, left = node("trainer", CPU=8), node("left", alive=False)
    assert list(nodes_that_measure([trainer, left])) == ["trainer"]
    declared = node("declared", CPU=4, GPU=2, benchmark=1)
    assert list(nodes_that_measure([trainer, declared, left])) == ["declared"]
    gone = node("gone", alive=False, benchmark=1)
    assert list(nodes_that_measure([trainer, gone])) == ["trainer"]


def test_cores_are_dealt_per_machine_and_gpus_per_node() -> None:
    def report(name: str, machine: str) -> NodeReport:
        return NodeReport(name, machine, machine, (0, 1), 100, "hw")

    reports = [report("n0", "m0"), report("n1", "m0"), report("n2", "m1")]
    nodes = {"n0": node("n0", GPU=2), "n1": node("n1"), "n2": node("n2", GPU=1)}
    cores, gpus = backend_of("cpu"), backend_of("cuda")
    places = cores.places(nodes, reports, [])
    assert [(p.owner, p.number, p.node_id) for p in places] == [
        ("m0", 0, "n0"), ("m0", 1, "n1"), ("m1", 0, "n2"), ("m1", 1, "n2"),
    ]  # fmt: skip
    assert {place.memory_bytes for place in places} == {50}
    assert cores.places(nodes, reports, places[1:]) == places[:1]
    found = gpus.places(nodes, reports, [])
    assert [place.name for place in found] == ["gpu0@m0", "gpu1@m0", "gpu0@m1"]
    assert gpus.places(nodes, reports, found[:2]) == found[2:]
