"""The pool's actor: schedules shards on devices and writes the store.

Requests are queues of shards. A free device gets the next shards of any request, in constant time.
Clients poll for answers; a request whose client stops polling is cancelled after a while.
"""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from autoshard.benchmark.machine.hardware import DeviceInfo, machine_id
from autoshard.benchmark.machine.process import at_usual_priority
from autoshard.benchmark.measurement import (
    Exchange,
    MeasuredCollective,
    Measurement,
    MeasureSettings,
    TimingOptions,
)
from autoshard.benchmark.pool import exchanges as exchanging
from autoshard.benchmark.pool.fleet import Fleet, PoolDevice, PoolError
from autoshard.benchmark.pool.jobs import MAX_INTERLEAVED, Job, JobQueue, Request, repeats_of
from autoshard.benchmark.pool.metrics import PoolMetrics, PoolState
from autoshard.benchmark.pool.serving import Server
from autoshard.benchmark.probe.report import MachineProbe
from autoshard.benchmark.store.file import StoreError
from autoshard.benchmark.store.measurements import MeasurementStore
from autoshard.workload import Shard

_log = logging.getLogger(__name__)

_REFRESH_SECONDS = 3.0  # between two looks at the cluster
_LEASE_SECONDS = 60.0  # without polling, after which a request is cancelled
_SETTLE_SECONDS = 20.0  # longest wait of one call; clients call again while devices are starting
_GATHER_SECONDS = 0.05  # for which answers are gathered into one reply: replies are expensive
_IDLE_SECONDS = 600.0  # after which devices are released, for other jobs


class PoolCoordinator:
    """Coordinates a pool. All methods run in one event loop, and none blocks for long.

    Args:
        fleet: Devices of the pool.
        time_limit_s: Seconds after which an operator counts as hanging and its actor is replaced.
    """

    def __init__(self, fleet: Fleet, time_limit_s: float) -> None:
        at_usual_priority()
        self._fleet = fleet
        self._time_limit_s = time_limit_s
        self._stores: dict[Path, MeasurementStore] = {}
        self._requests: dict[str, Request] = {}
        self._jobs = JobQueue()
        self._free: deque[PoolDevice] = deque()  # devices that measure and have no job
        self._tasks: set[asyncio.Task[None]] = set()
        self._refresh_task: asyncio.Task[None] | None = None
        self._refresh_event = asyncio.Event()  # set to look at the cluster at once
        self._fleet_changed = asyncio.Event()
        self._settled = False  # all devices of the first look have come or failed
        self._exchanging, self._probing = asyncio.Lock(), asyncio.Lock()
        self._last_used = time.monotonic()
        self._metrics = PoolMetrics()
        self._expected_shards = (0, 0.0)  # what a waiting client will request, and until when
        self._server = Server(fleet, time_limit_s, self._refresh_event.set)
        fleet.watch(self._follow_fleet)

    # --- devices --------------------------------------------------------------------------------

    async def ready(self, shards: int, waited_s: float = 0.0) -> DeviceInfo | None:
        """Starts devices and waits a while for them; returns one if there are any.

        Args:
            shards: Number of shards that the client is about to request.
            waited_s: How long the client has waited so far.

        Raises:
            PoolError: Waiting any longer is of no use; the message says why.
        """
        self._last_used = time.monotonic()
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = self._spawn(self._refresh_loop())
        if not self._settled:
            await self._wait_until_started(shards, waited_s)
        return next((device.info for device in self._fleet.measuring()), None)

    async def _wait_until_started(self, shards: int, waited_s: float) -> None:
        began = time.monotonic()
        deadline = began + _SETTLE_SECONDS
        now_waiting, until = self._expected_shards
        still_waiting = now_waiting if until > began else 0
        self._expected_shards = (max(shards, still_waiting), deadline)
        self._refresh_event.set()
        while not self._settled and (left := deadline - time.monotonic()) > 0:
            waits_s = waited_s + time.monotonic() - began
            if (reason := self._fleet.unavailable_reason(waits_s)) is not None:
                raise PoolError(f"the cluster has no device to measure on: {reason}")
            self._fleet_changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fleet_changed.wait(), left)

    async def devices(self) -> list[DeviceInfo]:
        """Returns the devices that measure."""
        return [device.info for device in self._fleet.measuring()]

    async def make(self) -> tuple[str, str]:
        """Returns hardware and library versions of the devices that measure."""
        return self._fleet.main_make

    async def hand_over(self) -> str:
        """Releases the devices for others until the pool is asked again; returns what prevents it.

        That is empty if they are released.
        """
        if len(self._jobs) or self._exchanging.locked() or self._probing.locked():
            return f"it measures, and {len(self._jobs)} shards wait"
        self._last_used = -math.inf
        self._fleet.release()
        return ""

    async def cancel_device_requests(self) -> None:
        """Withdraws requests to the autoscaler, which would outlive the pool."""
        self._fleet.request_devices(0)

    async def node_sizes(self) -> list[int]:
        """Returns the number of devices of each node, the largest first."""
        return list(map(len, exchanging.devices_of_nodes(self._fleet.measuring())))

    async def peak_bytes(self) -> dict[str, int]:
        """Returns the peak memory of each device's actor."""
        devices = self._fleet.devices
        peaks = await asyncio.gather(*(device.call("peak_bytes") for device in devices))
        return {device.info.name: peak for device, peak in zip(devices, peaks, strict=True)}

    async def cpu_seconds(self) -> float:
        """Returns the CPU time of the pool's actor."""
        return time.process_time()

    async def state(self) -> PoolState:
        """Returns what the pool does now, and what it has done so far."""
        return self._metrics.update(self._fleet, self._jobs.waiting)

    async def machine(self) -> str:
        """Returns the machine of the pool's actor, which holds its stores."""
        return machine_id()

    async def notices(self) -> list[str]:
        """Returns notices about devices: foreign load, mixed hardware, lost devices."""
        return self._fleet.notices()

    def _follow_fleet(self) -> None:
        """Reacts to devices that have come, gone or failed to start."""
        fleet = self._fleet
        self._settled = bool(fleet.devices) and (self._settled or not fleet.is_settling)
        self._free = deque(device for device in fleet.measuring() if not device.busy)
        self._metrics.update(fleet, self._jobs.waiting)
        self._fleet_changed.set()
        self._assign_jobs()

    async def _refresh_loop(self) -> None:
        """Follows the cluster as nodes come and go; releases the devices when the pool is idle."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._refresh_event.wait(), _REFRESH_SECONDS)
            self._refresh_event.clear()
            self._metrics.update(self._fleet, self._jobs.waiting)
            self._cancel_abandoned()
            if self._requests or self._exchanging.locked() or self._probing.locked():
                self._last_used = time.monotonic()
            with contextlib.suppress(RayError):  # the cluster is changing: look again later
                announced, until = self._expected_shards
                waiting = announced if until > time.monotonic() else 0
                self._fleet.request_devices(max(len(self._jobs), waiting))
                if time.monotonic() - self._last_used > _IDLE_SECONDS:
                    self._fleet.release()
                else:
                    await self._fleet.grow()
                    self._fleet_changed.set()  # there may be no devices, which is known now

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a task in the background; its exceptions are logged."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a task of the pool ended", exc_info=error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    # --- requests -------------------------------------------------------------------------------

    async def submit(
        self,
        shards: list[Shard],
        settings: MeasureSettings,
        timing: TimingOptions,
        store_path: str,
        retry_failed: bool,
        repeats: int = 1,
    ) -> str:
        """Takes a request and returns its name, for `collect`.

        `repeats` is the number of measurements that each shard needs, including stored ones.
        """
        await self.ready(len(shards))
        self._expected_shards = (0, 0.0)
        hardware, versions = self._fleet.main_make
        path = Path(store_path)
        store = self._open(path)
        request = Request(uuid.uuid4().hex, path, len(shards), repeats)
        self._requests[request.name] = request
        for index, shard in enumerate(shards):
            known = store.find(shard, settings, hardware, versions)
            if known is not None and (
                repeats_of(known) >= repeats if known.ok else not retry_failed
            ):
                request.hand_out(index, known)
            else:
                self._jobs.join(request, index, Job(shard, settings, timing))
            if index % 256 == 255:
                self._assign_jobs()
                await asyncio.sleep(0)  # serve others while a large request is read
        self._assign_jobs()
        return request.name

    async def collect(self, name: str, patience_s: float) -> list[tuple[int, Measurement]] | None:
        """Returns answers since the last call, once there are any; None for unknown requests."""
        request = self._requests.get(name)
        if request is None:
            return None
        request.seen = time.monotonic()
        if not request.answers and request.missing:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(request.arrived.wait(), patience_s)
        if request.answers and request.missing:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(request.complete.wait(), _GATHER_SECONDS)
        request.seen = time.monotonic()
        if request.error is not None:
            await self.cancel(name)
            raise request.error
        answers, request.answers = request.answers, []
        request.arrived.clear()
        if not request.missing:
            self._requests.pop(name, None)
        return answers

    async def cancel(self, name: str) -> None:
        """Cancels a request; shards in progress are stored nevertheless."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._jobs.leave(request)

    def _cancel_abandoned(self) -> None:
        limit = time.monotonic() - _LEASE_SECONDS
        for name, request in list(self._requests.items()):
            if request.seen < limit:
                self._spawn(self.cancel(name))

    async def close_store(self, store_path: str) -> None:
        """Closes a store that no request uses, so that its log is folded into the file."""
        path = Path(store_path)
        in_use = {request.store for request in self._requests.values()} | self._jobs.stores()
        if path in self._stores and path not in in_use:
            self._stores.pop(path).close()

    def _open(self, path: Path) -> MeasurementStore:
        found = self._stores.get(path)
        if found is None or not path.exists():
            found = self._stores[path] = MeasurementStore(path)
        return found

    # --- measuring ------------------------------------------------------------------------------

    def _assign_jobs(self) -> None:
        """Assigns jobs to each free device, while there are any."""
        while self._free and self._jobs.waiting:
            device = self._free.popleft()
            device.busy = True
            self._metrics.busy(1)
            # Fewer towards the end, so that devices finish at about the same time.
            share = math.ceil(self._jobs.waiting / max(1, len(self._fleet.measuring())))
            self._spawn(self._serve(device, self._jobs.take(min(MAX_INTERLEAVED, share))))

    async def _serve(self, device: PoolDevice, jobs: list[Job]) -> None:
        """Runs jobs on a device, and then assigns new ones."""
        try:
            async with device.exclusive:
                answers = await self._server.measure(device, jobs)
        finally:
            device.busy = False
            self._metrics.busy(-1)
            if self._fleet.in_use(device):
                self._free.append(device)
        for job, answer in zip(jobs, answers, strict=True):
            if answer is None:
                self._jobs.put_back(job)
            else:
                self._jobs.finish(job)
                self._metrics.answered(answer.ok)
                self._fleet.observe(device, answer)
                self._settle(job, answer)
        self._assign_jobs()

    def _settle(self, job: Job, answer: Measurement) -> None:
        """Stores a measurement for all requests that wait for it, and answers them."""
        merged = dict.fromkeys(job.stores, answer)
        faults: dict[Path, StoreError] = {}
        for path in job.stores:
            try:
                store = self._open(path)
                store.put([answer])
                known = store.find(job.shard, job.settings, answer.hardware, answer.versions)
                merged[path] = replace(known or answer, reused=False)
            except StoreError as error:
                faults[path] = error
        for name, index in job.waiting:
            request = self._requests.get(name)
            if request is None:
                continue
            known = merged.get(request.store, answer)
            fault = request.error = faults.get(request.store, request.error)
            if known.ok and repeats_of(known) < request.repeats and fault is None:
                # At the end of the queue, so that repeat measurements are far apart.
                self._jobs.join(request, index, Job(job.shard, job.settings, job.timing))
            else:
                request.hand_out(index, known)

    async def probe(self, store_path: str, seconds: float) -> MachineProbe | None:
        """Returns the store's probe of the devices that measure, which is run if there is none.

        None if it cannot be run now.
        """
        await self.ready(1)
        path = Path(store_path)
        async with self._probing:
            found = self._open(path).find_probe(self._fleet.main_make[0])
            if found is None and (device := next(iter(self._fleet.measuring()), None)) is not None:
                async with device.exclusive:
                    found = await self._server.probe(device, seconds)
                if found is not None:
                    self._open(path).put_probe(found)
            return found

    # --- collectives ----------------------------------------------------------------------------

    async def exchange(
        self,
        dims: tuple[int, ...],
        batch_size: int,
        nodes: int | None,
        collective: MeasuredCollective,
        store_path: str,
    ) -> Exchange:
        """Measures a collective among `len(dims)` ranks, or reads it from the store.

        `nodes` as for `devices_of_ranks`.
        """
        await self.ready(len(dims))
        hardware, versions = self._fleet.main_make
        store = self._open(Path(store_path))
        async with self._exchanging, contextlib.AsyncExitStack() as claims:
            devices = exchanging.devices_of_ranks(self._fleet.measuring(), len(dims), nodes)
            key = exchanging.key_of(dims, batch_size, devices, collective)
            known = store.find_exchange(key, hardware, versions)
            if known is not None:
                return known
            self._last_used = time.monotonic()
            for device in devices:
                await claims.enter_async_context(device.exclusive)
            found = await self._server.exchange(key, devices, hardware, versions)
            store.put_exchange(found)
            return found
