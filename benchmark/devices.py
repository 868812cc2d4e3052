"""Finding the cluster's devices and keeping one actor on each of them.

Which nodes may be measured on `places` decides; what an actor asks of Ray, and how it takes its
device, is up to the backend of the kind of device.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from autoshard.benchmark.backends import best_backend, requested_backend
from autoshard.benchmark.backends.base import DeviceBackend, Place
from autoshard.benchmark.fleet import Fleet, PoolDevice
from autoshard.benchmark.hardware import NodeReport
from autoshard.benchmark.places import RESOURCE, is_declared, nodes_that_measure, reports_of
from autoshard.benchmark.process import at_usual_priority

# Limits for hangs alone: an actor is up within seconds, on a crowded machine within tens of them.
_START_SECONDS = 300.0
_REPORT_SECONDS = 60.0
_RETRY_SECONDS = 60.0  # before a place where no actor could be started is tried again
_MAX_WISHED = 256  # GPUs: a longer list only keeps the autoscaler busy
_TRACE = 0.001  # of a node's `benchmark`: enough to say that only such nodes will do


class DeviceProcess:
    """The actor on a device. It alone loads torch and fbgemm; whoever starts it stays light."""

    def __init__(self, backend: DeviceBackend, place: Place) -> None:
        at_usual_priority()
        from autoshard.benchmark.actor import DeviceBenchmark

        self._benchmark = DeviceBenchmark(backend, place)

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the device's benchmark answers."""
        return getattr(self._benchmark, method)(*arguments)


class DeviceFleet(Fleet):
    """All devices of one kind in the cluster.

    Args:
        kind: one of `KINDS`.
        most_devices: use at most so many devices; None for all.
    """

    def __init__(self, kind: str, max_devices: int | None) -> None:
        super().__init__()
        self._asked = requested_backend(kind)
        self._settled = self._asked  # what "auto" has come to, as long as devices are held
        self._most = max_devices
        self._reports: dict[str, NodeReport] = {}
        self._places: list[Place] = []  # known and free of actors
        self._starting: dict[Place, asyncio.Task[PoolDevice | None]] = {}
        self._failures: dict[Place, tuple[float, str]] = {}
        self._only_declared = False
        self._wished: list[dict[str, float]] | None = None

    async def grow(self) -> None:
        """Give up devices of nodes that no longer measure; start actors where there are none."""
        nodes = nodes_that_measure(_nodes())
        self._only_declared = any(map(is_declared, nodes.values()))
        for device in list(self.devices):
            if device.place.node_id not in nodes:
                self.drop(
                    device,
                    f"only nodes with the resource {RESOURCE!r} are measured on"
                    if self._only_declared
                    else "its node left the cluster",
                )
        await self._report_on([node_id for node_id in nodes if node_id not in self._reports])
        backend = self._settle(best_backend(nodes.values()))
        reports = [self._reports[node_id] for node_id in nodes if node_id in self._reports]
        taken = [*(device.place for device in self.devices), *self._starting]
        self._places = backend.places(nodes, reports, taken)
        places = [place for place in self._places if self._failure(place) is None]
        if self._most is not None:
            places = places[: max(0, self._most - len(self.devices) - len(self._starting))]
        for place in places:  # in the background: one that is slow to start holds up nobody
            task = self._starting[place] = asyncio.create_task(self._start(backend, place))
            task.add_done_callback(partial(self._started, place))

    def request_devices(self, count: int) -> None:
        """Ask Ray's autoscaler, if there is one, for GPUs that are still to come."""
        if self._asked is None or not self._asked.num_gpus:
            return
        count = min(count, _MAX_WISHED if self._most is None else self._most)
        bundle = {"GPU": float(self._asked.num_gpus)}
        bundle |= {RESOURCE: _TRACE} if self._only_declared else {}
        wished = [bundle] * count
        if wished != self._wished:
            request_resources(bundles=wished)
            self._wished = wished

    @property
    def is_settling(self) -> bool:
        """True while devices are being started."""
        return bool(self._starting)

    def unavailable_reason(self, waited_s: float) -> str | None:
        """Why there are no devices, once there is no use in waiting any longer; else None."""
        if self.devices or self._starting:
            return None
        failures = [self._failure(place) for place in self._places]
        if failures and None not in failures:
            return "; ".join(map(str, failures))
        asked = self._asked or best_backend(())
        if waited_s < asked.patience_s:
            return None
        missing = f"no node with a {asked.noun} joined it within {waited_s / 60:.0f} minutes"
        return "; ".join(self.faults) or missing

    def release(self) -> None:
        """End all actors; `grow` starts them again."""
        self._settled = self._asked
        for task in self._starting.values():
            task.cancel()
        super().release()

    def _failure(self, place: Place) -> str | None:
        """Why no actor could be started there, as long as it is not to be tried again."""
        failed_at, reason = self._failures.get(place, (-math.inf, ""))
        return reason if time.monotonic() < failed_at + _RETRY_SECONDS else None

    def _settle(self, best: DeviceBackend) -> DeviceBackend:
        """The kind that measures for as long as the pool is in use: whoever asks relies on it."""
        self._settled = self._settled or best
        if self._asked is None and best.kind != self._settled.kind:
            self.report(
                f"the pool began to measure on {self._settled.noun}s, so {best.noun}s are left "
                "aside: end the pool (experiments/pool.py stop) and ask for them with "
                f"--devices {best.kind}"
            )
        return self._settled

    async def _report_on(self, node_ids: Sequence[str]) -> None:
        for node_id, answer in zip(node_ids, reports_of(node_ids), strict=True):
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
        except asyncio.CancelledError:  # the devices are given back
            ray.kill(handle)
            raise
        self._failures.pop(place, None)
        return PoolDevice(place, handle, info, versions)

    def _started(self, place: Place, task: asyncio.Task[PoolDevice | None]) -> None:
        del self._starting[place]
        device = None if task.cancelled() else task.result()
        if device is None:
            self._changed()
        else:
            self.add(device)


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def first_line(error: BaseException) -> str:
    """What an error says, in one line that fits a report."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    if lines and "creation task" in lines[0]:  # Ray tells last what the actor's own error was
        return lines[-1][:300]
    return f"{type(cause).__name__}: {lines[0][:300]}" if lines else type(cause).__name__
