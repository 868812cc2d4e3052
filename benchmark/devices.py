"""Finding the cluster's devices and keeping one actor on each of them.

A GPU gets an actor that holds it through Ray (`num_gpus=1`). A CPU core gets one that pins itself
and asks Ray for nothing: an actor that held a CPU would leave none for RLlib or Tune on a small
machine. Ray nodes that share a machine also share its cores, so cores are dealt per machine.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmark.hardware import DeviceInfo, NodeReport, this_machine
from benchmark.measurement import Measurement

KINDS = ("auto", "cpu", "cuda")
_START_SECONDS = 120.0
_RETRY_SECONDS = 60.0  # before a place where no actor could be started is tried again
_HIGH_LOAD = 0.15  # of a device's time: beyond the system's own small share
_HIGH_DISTURBANCE = 0.6  # of a device's iterations
_LOAD_MEMORY = 0.8  # how much of the running mean each new measurement leaves in place


class DeviceProcess:
    """The actor on a device. It alone loads torch and fbgemm; whoever starts it stays light."""

    def __init__(self, name: str, core: int | None, memory_bytes: int) -> None:
        from benchmark.actor import DeviceBenchmark

        self._benchmark = DeviceBenchmark(name, core, memory_bytes)

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the device's benchmark answers."""
        return getattr(self._benchmark, method)(*arguments)


@dataclass(frozen=True)
class _Place:
    """Where a device is: a core of a machine, or the n-th GPU of a node."""

    machine: str
    node_id: str
    host: str
    core: int | None
    gpu: int | None
    memory_bytes: int

    @property
    def name(self) -> str:
        what = f"gpu{self.gpu}" if self.core is None else f"cpu{self.core}"
        return f"{what}@{self.host}"

    @property
    def unit(self) -> tuple[str, int | None, int | None]:
        """What no two actors may share: a core belongs to its machine, a GPU number to its node."""
        owner = self.machine if self.core is not None else self.node_id
        return owner, self.core, self.gpu


@dataclass(eq=False)
class PoolDevice:
    """A running actor, and a lock for those who need the device for themselves."""

    place: _Place
    handle: Any
    info: DeviceInfo
    versions: str
    exclusive: asyncio.Lock = field(default_factory=asyncio.Lock)
    alive: bool = True
    foreign_load: float = 0.0
    disturbed: float = 0.0

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the device's benchmark answers."""
        return await self.handle.call.remote(method, *arguments)


class DeviceFleet:
    """All devices of the pool. Costs are only comparable on one kind of hardware, so the pool
    measures on the most numerous one and says which devices it leaves aside.
    """

    def __init__(self, kind: str, most_devices: int | None) -> None:
        self.devices: list[PoolDevice] = []
        self._kind = kind
        self._most = most_devices
        self._reports: dict[str, NodeReport] = {}
        self._faults: list[str] = []
        self._failed_at: dict[tuple[str, int | None, int | None], float] = {}

    async def grow(self) -> list[PoolDevice]:
        """Forget devices of nodes that are gone and start actors on places that have none."""
        nodes = {node["NodeID"]: node for node in _nodes() if node["Alive"]}
        for device in list(self.devices):
            if device.place.node_id not in nodes:
                self.drop(device, "its node left the cluster")
        kind = self._kind
        if kind == "auto":
            has_gpu = any(node["Resources"].get("GPU", 0) >= 1 for node in nodes.values())
            kind = "cuda" if has_gpu else "cpu"
        await self._report_on([node_id for node_id in nodes if node_id not in self._reports])
        reports = [self._reports[node_id] for node_id in nodes if node_id in self._reports]
        places = self._gpu_places(reports, nodes) if kind == "cuda" else self._core_places(reports)
        lately = time.monotonic() - _RETRY_SECONDS
        places = [place for place in places if self._failed_at.get(place.unit, -1e9) < lately]
        if self._most is not None:
            places = places[: max(0, self._most - len(self.devices))]
        started = await asyncio.gather(*(self._start(place) for place in places))
        fresh = [device for device in started if device is not None]
        self.devices += fresh
        return fresh

    def drop(self, device: PoolDevice, reason: str) -> None:
        """Take a device out of service."""
        if device.alive:
            device.alive = False
            self.devices.remove(device)
            self._faults.append(f"{device.info.name}: {reason}")
            ray.kill(device.handle)

    def release(self) -> None:
        """End all actors; `grow` starts them again."""
        for device in self.devices:
            device.alive = False
            ray.kill(device.handle)
        self.devices.clear()

    def main_hardware(self) -> tuple[str, str]:
        """Hardware and library versions of most devices."""
        kinds = Counter((device.info.hardware, device.versions) for device in self.devices)
        return kinds.most_common(1)[0][0] if kinds else ("", "")

    def of_main_hardware(self) -> list[PoolDevice]:
        """The devices that measure."""
        main = self.main_hardware()
        return [d for d in self.devices if (d.info.hardware, d.versions) == main]

    def in_use(self, device: PoolDevice) -> bool:
        """True if the device is of the kind that measures."""
        return device.alive and (device.info.hardware, device.versions) == self.main_hardware()

    def observe(self, device: PoolDevice, measurement: Measurement) -> None:
        """Learn from a measurement how much of a device others take."""
        if measurement.timing is not None:
            timing, step = measurement.timing, 1 - _LOAD_MEMORY
            share = timing.disturbed / (timing.disturbed + timing.iterations)
            device.foreign_load += step * (timing.foreign_load - device.foreign_load)
            device.disturbed += step * (share - device.disturbed)

    def notices(self) -> list[str]:
        """What users should know of the devices, one line each; faults are told once."""
        lines, self._faults = self._faults, []
        for device in self.devices:
            if device.foreign_load > _HIGH_LOAD:
                lines.append(
                    f"{device.info.name} is under foreign load: other processes take "
                    f"{device.foreign_load:.0%} of it, costs may read high"
                )
            elif device.disturbed > _HIGH_DISTURBANCE:
                lines.append(
                    f"{device.info.name} is disturbed: {device.disturbed:.0%} of its iterations "
                    "were slowed down by others and had to be repeated"
                )
            if not self.in_use(device):
                lines.append(
                    f"{device.info.name} is left aside: it is {device.info.hardware} with "
                    f"{device.versions}, most devices are {' with '.join(self.main_hardware())}"
                )
        return lines

    def _core_places(self, reports: Sequence[NodeReport]) -> list[_Place]:
        """Cores without an actor, each dealt to the node of its machine that has the fewest."""
        taken = {device.place.unit for device in self.devices}
        load = Counter(device.place.node_id for device in self.devices)
        places = []
        for machine in sorted({report.machine_id for report in reports}):
            nodes = [report for report in reports if report.machine_id == machine]
            cores = sorted({core for report in nodes for core in report.cores})
            for core in cores:
                if (machine, core, None) in taken:
                    continue
                able = [report for report in nodes if core in report.cores]
                node = min(able, key=lambda report: (load[report.node_id], report.node_id))
                load[node.node_id] += 1
                memory = node.memory_bytes // len(cores)
                places.append(_Place(machine, node.node_id, node.host, core, None, memory))
        return places

    def _gpu_places(
        self, reports: Sequence[NodeReport], nodes: dict[str, dict[str, Any]]
    ) -> list[_Place]:
        taken = {device.place.unit for device in self.devices}
        return [
            place
            for report in reports
            for number in range(int(nodes[report.node_id]["Resources"].get("GPU", 0)))
            for place in [_Place(report.machine_id, report.node_id, report.host, None, number, 0)]
            if place.unit not in taken
        ]

    async def _report_on(self, node_ids: Sequence[str]) -> None:
        probe = ray.remote(num_cpus=0)(this_machine)
        asked = [probe.options(**_on_node(node_id)).remote(node_id) for node_id in node_ids]
        for node_id, answer in zip(node_ids, asked, strict=True):
            try:
                self._reports[node_id] = await answer
            except RayError as error:
                self._faults.append(f"node {node_id[:8]} cannot be looked at: {first_line(error)}")

    async def _start(self, place: _Place) -> PoolDevice | None:
        actor: Any = ray.remote(num_cpus=0, num_gpus=0 if place.gpu is None else 1)(DeviceProcess)
        handle = actor.options(**_on_node(place.node_id)).remote(
            place.name, place.core, place.memory_bytes
        )
        try:
            answer = handle.call.remote("describe")
            info, versions = await asyncio.wait_for(answer, _START_SECONDS)
        except (TimeoutError, RayError) as error:
            self._failed_at[place.unit] = time.monotonic()
            self._faults.append(f"{place.name} cannot be used: {first_line(error)}")
            ray.kill(handle)
            return None
        return PoolDevice(place, handle, info, versions)


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _on_node(node_id: str) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def first_line(error: BaseException) -> str:
    """What an error says, in one line that fits a report."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0][:300]}" if lines else type(cause).__name__
