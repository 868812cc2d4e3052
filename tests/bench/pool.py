"""Metrics of the pool: utilization of many devices, and throughput with several clients.

Devices are simulated by sleeping for the time that a shard takes, as no machine here has 64. The
pool's actor, its clients and its store are real.
"""

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import ray

from autoshard.benchmark import MeasureSettings, TimingOptions
from autoshard.workload import EmbeddingTable, Shard, load_tables, random_shards
from bench.metric import Metric
from bench.sleepers import simulated_pool, start_clients
from bench.workbench import SETTINGS, TABLES, cpu_pool, say

_SHARD_SECONDS = 0.5  # upper end for a shard on a core, with the start of its operator: 0.15 to 0.5
_SHARDS_A_DEVICE = 20
_FLEETS = (1, 8, 64, 256)
_SHARDS_A_SECOND = 128  # for all devices together, so that fleets differ in size only
_FLEET_SHARDS, _FLEET_TURNS = 512, 2
_CLIENTS = 4
_REAL_SHARDS, _TURNS = 32, 4
_SAME_WORK = TimingOptions(precision=0.0, max_iterations=16)


def scale_metrics(folder: Path) -> list[Metric]:
    """Measures the pool with many devices and with several clients."""
    tables = load_tables(TABLES)
    return [
        *_sleeping_metrics(tables, folder),
        _throughput(tables, folder),
        _measured_once(tables, folder),
    ]


def _sleeping_metrics(tables: Sequence[EmbeddingTable], folder: Path) -> list[Metric]:
    """Measures utilization of simulated devices, and CPU time of the pool's actor."""
    count = 64
    say(f"{count} devices that sleep {_SHARD_SECONDS} s a shard")
    shards = random_shards(tables, count * _SHARDS_A_DEVICE, 20, seed=2)
    busy, _ = _sleep(shards, folder / "busy.db", count, _SHARD_SECONDS)
    metrics = [
        Metric(f"utilization of {count} simulated devices, {_SHARD_SECONDS} s per shard",
               "at least 0.90", busy),
    ]  # fmt: skip
    taken = dict.fromkeys(_FLEETS, math.inf)
    for turn in range(_FLEET_TURNS):
        for count in _FLEETS:
            say(f"the pool's actor with {count} devices, turn {turn + 1} of {_FLEET_TURNS}")
            store = folder / f"{count}-{turn}.db"
            mean_seconds = count / _SHARDS_A_SECOND
            _, used_ms = _sleep(shards[:_FLEET_SHARDS], store, count, mean_seconds)
            taken[count] = min(taken[count], used_ms)
    metrics += [
        Metric(f"CPU time of the pool's actor per shard, {count} devices", "", taken[count], "ms")
        for count in _FLEETS
    ]
    metrics += [
        Metric(f"CPU time of the pool's actor per shard, {count} devices over 8", "at most 1.2",
               taken[count] / taken[8])
        for count in _FLEETS if count > 8
    ]  # fmt: skip
    return metrics


def _sleep(shards: Sequence[Shard], store: Path, count: int, seconds: float) -> tuple[float, float]:
    """Returns the utilization of the devices, and the actor's CPU time per shard in ms."""
    pool = simulated_pool(store, ["sleeping"] * count, seconds)
    pool.devices()
    used, started = pool.cpu_seconds(), time.monotonic()
    answers = pool.measure(shards, SETTINGS)
    took, used = time.monotonic() - started, pool.cpu_seconds() - used
    pool.shutdown()
    slept = sum(answer.timing.operator_seconds for answer in answers if answer.timing is not None)
    return slept / (count * took), used * 1e3 / len(shards)


def _throughput(tables: Sequence[EmbeddingTable], folder: Path) -> Metric:
    """Compares shards per second of four clients and of one, in turns, with equal work."""
    shards = random_shards(tables, _REAL_SHARDS, 20, seed=3)
    seconds: dict[int, list[float]] = {1: [], _CLIENTS: []}
    with cpu_pool(folder / "clients.db") as pool:
        pool.devices()
        clients = start_clients(pool.store, _CLIENTS)
        for turn in range(_TURNS):
            say(f"one client and {_CLIENTS}, turn {turn + 1} of {_TURNS}")
            for count in (1, _CLIENTS) if turn % 2 else (_CLIENTS, 1):
                # Another seed, so that the store has no answer.
                settings = MeasureSettings(1024, seed=2 * turn + (count > 1))
                started = time.monotonic()
                ray.get([
                    client.ask.remote(shards[place::count], settings, _SAME_WORK)
                    for place, client in enumerate(clients[:count])
                ])  # fmt: skip
                seconds[count].append(time.monotonic() - started)
    ratio = statistics.median(one / four for one, four in zip(*seconds.values(), strict=True))
    return Metric(f"shards per second, {_CLIENTS} clients over one", "at least 0.90", ratio)


def _measured_once(tables: Sequence[EmbeddingTable], folder: Path) -> Metric:
    """Counts measurements per distinct shard that four clients request concurrently."""
    say(f"{_CLIENTS} clients with the same shards")
    shards = random_shards(tables, 24, 10, seed=4)
    with cpu_pool(folder / "shared.db") as pool:
        pool.devices()
        clients = start_clients(pool.store, _CLIENTS)
        requests = [[*shards[6 * place :], *shards[: 6 * place]][:18] for place in range(_CLIENTS)]
        answers = ray.get([
            client.ask.remote(request, SETTINGS, _SAME_WORK)
            for client, request in zip(clients, requests, strict=True)
        ])  # fmt: skip
    made = {(found.shard.digest, found.measured_at) for answer in answers for found in answer}
    distinct = {shard.digest for request in requests for shard in request}
    name = f"measurements per distinct shard, {_CLIENTS} concurrent clients"
    return Metric(name, "1", len(made) / len(distinct))
