"""Finds the cluster's devices and keeps one actor on each.

Nodes with the custom resource `benchmark` (any amount) measure, so that trainers can be kept off
their cores. Without such nodes, all nodes measure. The backend of a kind of device says what its
actors request from Ray and how they bind to a device.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from autoshard.benchmark.backends import backend_of_hardware, best_backend, requested_backend
from autoshard.benchmark.backends.base import DeviceBackend, Node, Place, on_node
from autoshard.benchmark.machine.hardware import NodeReport, this_machine
from autoshard.benchmark.machine.process import at_usual_priority
from autoshard.benchmark.pool.fleet import Fleet, PoolDevice
from autoshard.workload import UserError
from autoshard.workload.data_sheets import is_hardware

RESOURCE = "benchmark"
# Limits for hangs alone: an actor starts within seconds, on a crowded machine within tens of them.
_START_SECONDS = 300.0
_REPORT_SECONDS = 60.0
_RETRY_SECONDS = 60.0  # before a place where no actor could be started is tried again
_MAX_REQUESTED = 256  # GPUs: a longer list only keeps the autoscaler busy
_TRACE = 0.001  # amount of a node's `benchmark` resource: enough to request such nodes


class DeviceProcess:
    """The actor on a device. It alone loads torch and fbgemm; whoever starts it stays light."""

    def __init__(self, backend: DeviceBackend, place: Place) -> None:
        at_usual_priority()
        from autoshard.benchmark.actor import DeviceBenchmark

        self._benchmark = DeviceBenchmark(backend, place)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the device's benchmark."""
        return getattr(self._benchmark, method)(*arguments)


class DeviceFleet(Fleet):
    """All devices of one kind in the cluster.

    Args:
        kind: One of `KINDS`.
        max_devices: Maximum number of devices; None for all.
        hardware: Fingerprint of the devices to take; by default those of any hardware.
    """

    def __init__(self, kind: str, max_devices: int | None, hardware: str = "") -> None:
        super().__init__()
        self._hardware = hardware
        self._others: set[Place] = set()  # where there is a device of other hardware
        self._requested = backend_of_hardware(hardware) if hardware else requested_backend(kind)
        self._settled = self._requested  # what "auto" means while devices are held
        self._max_devices = max_devices
        self._reports: dict[str, NodeReport] = {}
        self._looked = False  # at all nodes
        self._places: list[Place] = []  # known and free of actors
        self._starting: dict[Place, asyncio.Task[PoolDevice | None]] = {}
        self._failures: dict[Place, tuple[float, str]] = {}
        self._only_declared = False
        self._bundles: list[dict[str, float]] | None = None

    async def grow(self) -> None:
        """Drops devices of nodes that no longer measure, and starts actors on free devices."""
        nodes = nodes_that_measure(ray.nodes())  # type: ignore[no-untyped-call]
        self._only_declared = any(map(is_declared, nodes.values()))
        for device in list(self.devices):
            if device.place.node_id not in nodes:
                self.drop(
                    device,
                    f"only nodes with the resource {RESOURCE!r} are measured on"
                    if self._only_declared
                    else "its node left the cluster",
                )
        new = [node_id for node_id in nodes if node_id not in self._reports]
        self._looked = self._looked and not new
        await self._report_on(new)
        self._looked = all(node_id in self._reports for node_id in nodes)
        backend = self._settle(best_backend(nodes.values()))
        reports = [self._reports[node_id] for node_id in nodes if node_id in self._reports]
        reports = [report for report in reports if self._may_have(report)]
        taken = [*(device.place for device in self.devices), *self._starting]
        self._places = [
            place for place in backend.places(nodes, reports, taken) if place not in self._others
        ]
        places = [place for place in self._places if self._failure(place) is None]
        if self._max_devices is not None:
            places = places[: max(0, self._max_devices - len(self.devices) - len(self._starting))]
        for place in places:  # in the background: one that is slow to start delays no other
            task = self._starting[place] = asyncio.create_task(self._start(backend, place))
            task.add_done_callback(partial(self._started, place))

    def request_devices(self, count: int) -> None:
        """Requests GPUs from Ray's autoscaler, if there is one."""
        if self._requested is None or not self._requested.num_gpus:
            return
        count = min(count, _MAX_REQUESTED if self._max_devices is None else self._max_devices)
        bundle = {"GPU": float(self._requested.num_gpus)}
        bundle |= {RESOURCE: _TRACE} if self._only_declared else {}
        bundles = [bundle] * count
        if bundles != self._bundles:
            request_resources(bundles=bundles)
            self._bundles = bundles

    @property
    def is_settling(self) -> bool:
        """True while devices are being started."""
        return bool(self._starting)

    def unavailable_reason(self, waited_s: float) -> str | None:
        """Returns why there are no devices, once waiting any longer is of no use; else None."""
        if self.devices or self._starting:
            return None
        failures = [self._failure(place) for place in self._places]
        if failures and None not in failures:
            return "; ".join(map(str, failures))
        wanted = self._requested or best_backend(())
        if self._hardware and self._looked and not (self._places or wanted.num_gpus):
            return f"none of its devices is {self._hardware}"
        if waited_s < wanted.patience_s:
            return None
        missing = f"no node with a {wanted.noun} joined it within {waited_s / 60:.0f} minutes"
        return "; ".join(self.faults) or missing

    def lose(self, device: PoolDevice, reason: str) -> None:
        """Takes a device that is gone out of service; its place is tried again after a while."""
        self._failures[device.place] = (time.monotonic(), f"{device.info.name}: {reason}")
        super().lose(device, reason)

    def release(self) -> None:
        """Ends all actors; `grow` starts them again."""
        self._settled = self._requested
        for task in self._starting.values():
            task.cancel()
        super().release()

    def _may_have(self, report: NodeReport) -> bool:
        """Returns whether a node may have devices of the hardware that is asked for."""
        is_cpu = self._hardware.startswith("cpu")  # what a node's GPUs are, only they can say
        return not is_cpu or self._hardware.startswith(report.hardware)

    def _failure(self, place: Place) -> str | None:
        """Returns why no actor could be started at a place, until it is tried again."""
        failed_at, reason = self._failures.get(place, (-math.inf, ""))
        return reason if time.monotonic() < failed_at + _RETRY_SECONDS else None

    def _settle(self, best: DeviceBackend) -> DeviceBackend:
        """Returns the kind that measures for as long as the pool is in use; clients rely on it."""
        self._settled = self._settled or best
        if self._requested is None and best.kind != self._settled.kind:
            self.report(
                f"the pool measures on {self._settled.noun}s, so {best.noun}s are not used: end "
                f"the pool (experiments/pool.py stop) and request them with --devices {best.kind}"
            )
        return self._settled

    async def _report_on(self, node_ids: Sequence[str]) -> None:
        here = ray.get_runtime_context().get_node_id()
        if here in node_ids:  # this process, a worker like any other, knows as much
            self._reports[here] = this_machine(here)
        others = [node_id for node_id in node_ids if node_id != here]
        for node_id, answer in zip(others, reports_of(others), strict=True):
            try:
                self._reports[node_id] = await asyncio.wait_for(answer, _REPORT_SECONDS)
            except (TimeoutError, RayError) as error:
                self.report(f"node {node_id[:8]} cannot be looked at: {first_line(error)}")

    async def _start(self, backend: DeviceBackend, place: Place) -> PoolDevice | None:
        actor: Any = ray.remote(**backend.ray_options(place))(DeviceProcess)
        handle = actor.remote(backend, place)
        try:
            answer = handle.call.remote("describe")
            info, versions = await asyncio.wait_for(answer, _START_SECONDS)
        except (TimeoutError, RayError) as error:
            reason = f"{place.name} cannot be used: {first_line(error)}"
            self._failures[place] = (time.monotonic(), reason)
            self.faults.append(reason)
            ray.kill(handle)
            return None
        except asyncio.CancelledError:  # the devices are released
            ray.kill(handle)
            raise
        self._failures.pop(place, None)
        if self._hardware and not is_hardware(self._hardware, info.hardware):
            self._others.add(place)
            ray.kill(handle)
            return None
        return PoolDevice(place, handle, info, versions)

    def _started(self, place: Place, task: asyncio.Task[PoolDevice | None]) -> None:
        del self._starting[place]
        device = None if task.cancelled() else task.result()
        if device is None:
            self._changed()
        else:
            self.add(device)


def is_declared(node: Node) -> bool:
    """Returns whether a node has the resource `benchmark`."""
    return bool(node["Resources"].get(RESOURCE, 0) > 0)


def nodes_that_measure(nodes: Iterable[Node]) -> dict[str, Node]:
    """Returns the live nodes that declare `benchmark`, by id; all live ones if none does."""
    alive = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
    return {name: node for name, node in alive.items() if is_declared(node)} or alive


def reports_of(node_ids: Iterable[str]) -> list[Any]:
    """Has each node report on itself; returns Ray's references to the reports."""
    probe = ray.remote(num_cpus=0)(this_machine)
    return [probe.options(**on_node(node_id)).remote(node_id) for node_id in node_ids]


def first_line(error: BaseException) -> str:
    """Returns an error's message in one line of limited length."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    if lines and "creation task" in lines[0]:  # Ray puts the actor's own error last
        own = f"{UserError.__module__}.{UserError.__name__}: "  # which explains itself
        return lines[-1].removeprefix(own)[:300]
    return f"{type(cause).__name__}: {lines[0][:300]}" if lines else type(cause).__name__
