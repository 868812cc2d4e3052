"""The pool's figures: how it keeps many devices busy, and what many askers cost it.

Sixty-four devices are more than a machine has, so their part is played by devices that sleep for
as long as a shard takes; the pool's actor, its clients and its store are the real ones.
"""

import asyncio
import math
import statistics
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from autoshard.benchmark import BenchmarkPool, Measurement, MeasureSettings, Timing, TimingOptions
from autoshard.benchmark.backends import Place
from autoshard.benchmark.fleet import Fleet, PoolDevice
from autoshard.benchmark.hardware import DeviceInfo
from autoshard.workload import EmbeddingTable, Shard, load_tables, random_shards
from bench.figure import Figure
from bench.workbench import SETTINGS, TABLES, cpu_pool, say

_VERSIONS = "simulated"
_DEVICES_A_PROCESS = 64
_SHARD_SECONDS = 0.5  # of a shard on a core, the start of its operator and all: 0.15 to 0.5
_SHARDS_A_DEVICE = 20
_FLEETS = (1, 8, 64, 256)
_SHARDS_A_SECOND = 128  # of all devices together, so that fleets differ in nothing but their size
_FLEET_SHARDS, _FLEET_TURNS = 512, 2
_ASKERS = 4
_REAL_SHARDS, _TURNS = 32, 4
_SAME_WORK = TimingOptions(precision=0.0, max_iterations=16)


class Sleepers:
    """Devices in one process that sleep instead of computing, which many can do at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def call(self, device: DeviceInfo, method: str, *arguments: Any) -> Any:
        """What a device's benchmark answers."""
        if method != "measure":
            raise NotImplementedError(method)
        answers = []
        for shard, settings, _ in arguments[0]:
            # Half to three halves of the mean, by the shard: no two devices are done together.
            seconds = self._seconds * (0.5 + int(shard.digest[:8], 16) / 2**32)
            await asyncio.sleep(seconds)
            timing = Timing(1.0, 2.0, 0.01, 16, 0, 0.0, seconds)
            made = Measurement(
                shard, settings, device.hardware, _VERSIONS, "ok", device.name, device.node,
                time.time(), timing,
            )  # fmt: skip
            answers.append(made)
        return answers


class _Sleeper(PoolDevice):
    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.handle.call.remote(self.info, method, *arguments)

    def end(self) -> None:
        """Its process serves others too."""


class SleepingFleet(Fleet):
    """Devices that sleep for `seconds` a shard in the mean: one for each name of hardware."""

    def __init__(self, hardware: Sequence[str], seconds: float) -> None:
        super().__init__()
        self._hardware = hardware
        self._seconds = seconds

    async def grow(self) -> None:
        """Start them all."""
        if self.devices:
            return
        actor: Any = ray.remote(num_cpus=0)(Sleepers)
        processes = [
            actor.options(max_concurrency=1000).remote(self._seconds)
            for _ in range(0, len(self._hardware), _DEVICES_A_PROCESS)
        ]
        await asyncio.gather(*(process.__ray_ready__.remote() for process in processes))
        node = ray.get_runtime_context().get_node_id()
        for number, hardware in enumerate(self._hardware):
            place = Place("cpu", "simulated", number, node, f"cpu{number}@simulated")
            info = DeviceInfo(place.name, place.kind, place.owner, hardware, 0)
            process = processes[number // _DEVICES_A_PROCESS]
            self.add(_Sleeper(place, process, info, _VERSIONS))


class Asker:
    """A client of the pool in a process of its own."""

    def __init__(self, store: str) -> None:
        self._pool = BenchmarkPool(store, kind="cpu")

    def ask(self, shards: list[Shard], settings: MeasureSettings, timing: TimingOptions) -> Any:
        """The measurements, in the order of the shards."""
        return self._pool.measure(shards, settings, timing)


def simulated_pool(store: Path, hardware: Sequence[str], seconds: float) -> BenchmarkPool:
    """A pool of its own, beside that of the cluster, over devices that sleep."""
    fleet = SleepingFleet(hardware, seconds)
    return BenchmarkPool(store, fleet=fleet, name=f"simulated-{uuid.uuid4().hex}")


def start_askers(store: Path, count: int) -> list[Any]:
    """Clients of the cluster's pool, each in a process of its own."""
    actor: Any = ray.remote(num_cpus=0)(Asker)
    askers = [actor.remote(str(store)) for _ in range(count)]
    ray.get([asker.__ray_ready__.remote() for asker in askers])
    return askers


def scale_figures(folder: Path) -> list[Figure]:
    """What the pool makes of many devices and of many askers."""
    tables = load_tables(TABLES)
    return [
        *_sleeping_figures(tables, folder),
        _throughput(tables, folder),
        _measured_once(tables, folder),
    ]


def _sleeping_figures(tables: Sequence[EmbeddingTable], folder: Path) -> list[Figure]:
    """How busy a pool keeps devices that sleep, and what its actor takes for that."""
    count = 64
    say(f"{count} devices that sleep {_SHARD_SECONDS} s a shard")
    shards = random_shards(tables, count * _SHARDS_A_DEVICE, 20, seed=2)
    busy, _ = _sleep(shards, folder / "busy.db", count, _SHARD_SECONDS)
    figures = [
        Figure(f"{count} devices of {_SHARD_SECONDS} s a shard, share of time busy",
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
    figures += [
        Figure(f"CPU time of the pool's actor a shard, {count} devices", "", taken[count], "ms")
        for count in _FLEETS
    ]
    figures += [
        Figure(f"CPU time of the pool's actor a shard, {count} devices over 8", "at most 1.2",
               taken[count] / taken[8])
        for count in _FLEETS if count > 8
    ]  # fmt: skip
    return figures


def _sleep(shards: Sequence[Shard], store: Path, count: int, seconds: float) -> tuple[float, float]:
    """The share of time devices are busy; milliseconds of CPU time a shard takes the actor."""
    pool = simulated_pool(store, ["sleeping"] * count, seconds)
    pool.devices()
    used, started = pool.cpu_seconds(), time.monotonic()
    answers = pool.measure(shards, SETTINGS)
    took, used = time.monotonic() - started, pool.cpu_seconds() - used
    pool.shutdown()
    slept = sum(answer.timing.operator_seconds for answer in answers if answer.timing is not None)
    return slept / (count * took), used * 1e3 / len(shards)


def _throughput(tables: Sequence[EmbeddingTable], folder: Path) -> Figure:
    """Shards a second of four askers over those of one, by turns and with the same work."""
    shards = random_shards(tables, _REAL_SHARDS, 20, seed=3)
    seconds: dict[int, list[float]] = {1: [], _ASKERS: []}
    with cpu_pool(folder / "asked.db") as pool:
        pool.devices()
        askers = start_askers(pool.store, _ASKERS)
        for turn in range(_TURNS):
            say(f"one asker and {_ASKERS}, turn {turn + 1} of {_TURNS}")
            for count in (1, _ASKERS) if turn % 2 else (_ASKERS, 1):
                # Other batches are other measurements: the seed keeps the store from answering.
                settings = MeasureSettings(1024, seed=2 * turn + (count > 1))
                started = time.monotonic()
                ray.get([
                    asker.ask.remote(shards[place::count], settings, _SAME_WORK)
                    for place, asker in enumerate(askers[:count])
                ])  # fmt: skip
                seconds[count].append(time.monotonic() - started)
    return Figure(
        f"shards a second, {_ASKERS} askers over one",
        "at least 0.90",
        statistics.median(one / four for one, four in zip(*seconds.values(), strict=True)),
    )


def _measured_once(tables: Sequence[EmbeddingTable], folder: Path) -> Figure:
    """Measurements made for each distinct shard that four askers ask for at once."""
    say(f"{_ASKERS} askers that ask for the same shards")
    shards = random_shards(tables, 24, 10, seed=4)
    with cpu_pool(folder / "shared.db") as pool:
        pool.devices()
        askers = start_askers(pool.store, _ASKERS)
        asked = [[*shards[6 * place :], *shards[: 6 * place]][:18] for place in range(_ASKERS)]
        answers = ray.get([
            asker.ask.remote(some, SETTINGS, _SAME_WORK)
            for asker, some in zip(askers, asked, strict=True)
        ])  # fmt: skip
    made = {(each.shard.digest, each.measured_at) for some in answers for each in some}
    distinct = {shard.digest for some in asked for shard in some}
    return Figure(
        f"measurements a distinct shard, {_ASKERS} askers at once", "1", len(made) / len(distinct)
    )
