"""Devices that sleep, and clients of a pool, in processes of their own.

They are apart from the metrics, for each of their processes loads this file: what it imports is
light, and torch is not among it.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from autoshard.benchmark import BenchmarkPool, Measurement, MeasureSettings, Timing, TimingOptions
from autoshard.benchmark.backends.base import Place
from autoshard.benchmark.machine.hardware import DeviceInfo
from autoshard.benchmark.measurement import Directions
from autoshard.benchmark.pool.fleet import Fleet, PoolDevice
from autoshard.workload import Shard

_VERSIONS = "simulated"
_DEVICES_A_PROCESS = 64


class Sleepers:
    """Devices in one process that sleep instead of computing."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def call(self, device: DeviceInfo, method: str, *arguments: Any) -> Any:
        """Answers as the benchmark actor of a device does."""
        if method != "measure":
            raise NotImplementedError(method)
        answers = []
        for shard, settings, _ in arguments[0]:
            # 0.5 to 1.5 times the mean, by the shard, so that devices finish at different times.
            seconds = self._seconds * (0.5 + int(shard.digest[:8], 16) / 2**32)
            await asyncio.sleep(seconds)
            timing = Timing(1.0, 2.0, Directions.of(0.01), 16, 0, 0.0, seconds)
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
        """Does nothing: the process serves other devices as well."""


class SleepingFleet(Fleet):
    """Devices that sleep `seconds` per shard on average: one for each name of hardware."""

    def __init__(self, hardware: Sequence[str], seconds: float) -> None:
        super().__init__()
        self._hardware = hardware
        self._seconds = seconds

    async def grow(self) -> None:
        """Starts all devices."""
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


class Client:
    """A client of the pool in a separate process."""

    def __init__(self, store: str) -> None:
        self._pool = BenchmarkPool(store, kind="cpu")

    def ask(self, shards: list[Shard], settings: MeasureSettings, timing: TimingOptions) -> Any:
        """Returns the measurements in the order of the shards."""
        return self._pool.measure(shards, settings, timing)


def simulated_pool(store: Path, hardware: Sequence[str], seconds: float) -> BenchmarkPool:
    """Returns a separate pool over devices that sleep."""
    fleet = SleepingFleet(hardware, seconds)
    return BenchmarkPool(store, fleet=fleet, name=f"simulated-{uuid.uuid4().hex}")


def start_clients(store: Path, count: int) -> list[Any]:
    """Starts clients of the cluster's pool, each in a separate process."""
    actor: Any = ray.remote(num_cpus=0)(Client)
    clients = [actor.remote(str(store)) for _ in range(count)]
    ray.get([client.__ray_ready__.remote() for client in clients])
    return clients
