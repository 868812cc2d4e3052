"""The pool's one brain: a named Ray actor that hands shards to devices and keeps the store.

Requests are queues of shards. Each device has a loop of its own that takes the next shard any
request waits for, so a shard that several ask for at once is measured once. Clients collect
answers by asking again and again; one that stops asking is forgotten after a while.
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.exceptions import RayError, RayTaskError

from benchmark.devices import DeviceFleet, PoolDevice, first_line
from benchmark.exchanging import measure_exchange
from benchmark.hardware import DeviceInfo
from benchmark.measurement import (
    Exchange,
    ExchangeKey,
    Measurement,
    MeasurementError,
    MeasureSettings,
    TimingOptions,
)
from benchmark.store import MeasurementStore
from benchmark.store_file import StoreError
from workload import Shard

_log = logging.getLogger(__name__)

_MOST_DEATHS = 3  # actors that may die on a shard before the shard is blamed
_REFRESH_SECONDS = 3.0
_LEASE_SECONDS = 60.0
_BUSY_WAIT_SECONDS = 0.5
_IDLE_SECONDS = 600.0  # then the devices are given back: other jobs may want the GPUs


@dataclass
class _Request:
    """What one client waits for."""

    store: Path
    missing: int
    answers: list[tuple[int, Measurement]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    error: StoreError | None = None
    seen: float = field(default_factory=time.monotonic)


@dataclass
class _Job:
    """A shard to be measured, and who waits for it at which place of their request."""

    shard: Shard
    settings: MeasureSettings
    timing: TimingOptions
    waiting: list[tuple[str, int]] = field(default_factory=list)
    stores: set[Path] = field(default_factory=set)
    deaths: int = 0


_JobKey = tuple[str, MeasureSettings]


class PoolCoordinator:
    """See the module. All its methods run in one event loop; none of them blocks for long.

    Args:
        kind: "cpu", "cuda", or "auto" for GPUs where the cluster has any and cores elsewhere.
        most_devices: use at most so many devices; None for all.
        time_limit_s: an operator that takes longer hangs: its actor is replaced.
    """

    def __init__(self, kind: str, most_devices: int | None, time_limit_s: float) -> None:
        self._fleet = DeviceFleet(kind, most_devices)
        self._time_limit_s = time_limit_s
        self._stores: dict[Path, MeasurementStore] = {}
        self._requests: dict[str, _Request] = {}
        self._queue: OrderedDict[_JobKey, _Job] = OrderedDict()
        # What the reference takes where costs are told, by hardware and versions.
        self._quiet_ms: dict[tuple[str, str], float] = {}
        self._running: dict[_JobKey, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._work = asyncio.Condition()
        self._growing = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._exchanging = asyncio.Lock()
        self._last_used = time.monotonic()

    # --- devices --------------------------------------------------------------------------------

    async def ready(self) -> list[DeviceInfo]:
        """Start what can be started, wait for the first devices, and describe them all."""
        self._last_used = time.monotonic()
        if not self._fleet.of_main_hardware():
            await self._refresh()
        if self._keeper is None:
            self._keeper = self._spawn(self._keep_up())
        return [device.info for device in self._fleet.of_main_hardware()]

    async def node_of_devices(self) -> dict[str, str]:
        """The Ray node that each device's actor runs on."""
        return {device.info.name: device.place.node_id for device in self._fleet.devices}

    async def peak_bytes(self) -> dict[str, int]:
        """The most memory that each device's actor has ever taken."""
        devices = self._fleet.devices
        peaks = await asyncio.gather(*(device.call("peak_bytes") for device in devices))
        return {device.info.name: peak for device, peak in zip(devices, peaks, strict=True)}

    async def process_id(self) -> int:
        """The process of the pool itself."""
        return os.getpid()

    async def notices(self) -> list[str]:
        """What users should know of the devices: foreign load, mixed hardware, devices lost."""
        return self._fleet.notices()

    async def _keep_up(self) -> None:
        """Follow the cluster as nodes come and go; give the devices back when nobody asks."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            self._forget_the_silent()
            if self._requests or self._exchanging.locked():
                self._last_used = time.monotonic()
            if time.monotonic() - self._last_used > _IDLE_SECONDS:
                self._fleet.release()
            elif self._fleet.devices:
                with contextlib.suppress(RayError):  # the cluster is in motion: look again later
                    await self._refresh()

    async def _refresh(self) -> None:
        async with self._growing:
            for device in await self._fleet.grow():
                self._spawn(self._serve(device))
        async with self._work:  # loops of devices that are gone notice it now
            self._work.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background; a fault goes to the log instead of getting lost."""

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
    ) -> str:
        """Take a request; its answers are handed out by `collect`."""
        await self.ready()
        hardware, versions = self._fleet.main_hardware()
        path = Path(store_path)
        store = self._open(path)
        quiet_ms = store.quiet_ms(hardware, versions)
        if quiet_ms is not None:
            self._quiet_ms.setdefault((hardware, versions), quiet_ms)
        request = _Request(path, missing=len(shards))
        name = uuid.uuid4().hex
        self._requests[name] = request
        for index, shard in enumerate(shards):
            known = store.find(shard, settings, hardware, versions)
            if known is not None and (known.ok or not retry_failed):
                self._hand_out(request, index, known)
                continue
            key = (shard.digest, settings)
            job = self._running.get(key) or self._queue.get(key)
            if job is None:
                job = self._queue[key] = _Job(shard, settings, timing)
            job.waiting.append((name, index))
            job.stores.add(path)
            if index % 256 == 255:
                await asyncio.sleep(0)  # let devices be served while a large request is read
        async with self._work:
            self._work.notify_all()
        return name

    async def collect(self, name: str, patience_s: float) -> list[tuple[int, Measurement]] | None:
        """Answers since the last call, as soon as there are any; None if the request is unknown."""
        request = self._requests.get(name)
        if request is None:
            return None
        request.seen = time.monotonic()
        if not request.answers and request.missing:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(request.arrived.wait(), patience_s)
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
        """Forget a request; what is being measured is still kept."""
        self._requests.pop(name, None)
        for key, job in list(self._queue.items()):
            job.waiting = [place for place in job.waiting if place[0] != name]
            if not job.waiting:
                del self._queue[key]

    def _forget_the_silent(self) -> None:
        limit = time.monotonic() - _LEASE_SECONDS
        for name, request in list(self._requests.items()):
            if request.seen < limit:
                self._spawn(self.cancel(name))

    async def let_go(self, store_path: str) -> None:
        """Close a store that nobody waits for: its log is folded into the one file."""
        path = Path(store_path)
        in_use = {request.store for request in self._requests.values()}
        for jobs in (self._queue, self._running):
            in_use.update(*(job.stores for job in jobs.values()))
        if path in self._stores and path not in in_use:
            self._stores.pop(path).close()

    def _open(self, path: Path) -> MeasurementStore:
        found = self._stores.get(path)
        if found is None or not path.exists():
            found = self._stores[path] = MeasurementStore(path)
        return found

    @staticmethod
    def _hand_out(request: _Request, index: int, measurement: Measurement) -> None:
        request.answers.append((index, measurement))
        request.missing -= 1
        request.arrived.set()

    # --- measuring ------------------------------------------------------------------------------

    async def _serve(self, device: PoolDevice) -> None:
        """Give one device one job after the other for as long as it lives."""
        while device.alive:
            async with self._work:
                await self._work.wait_for(
                    lambda: not device.alive or (self._queue and self._fleet.in_use(device))
                )
                if not device.alive:
                    return
                key, job = self._queue.popitem(last=False)
                self._running[key] = job
            async with device.exclusive:
                answer = await self._measure(device, job)
            del self._running[key]
            if answer is None:
                self._queue[key] = job
                self._queue.move_to_end(key, last=False)
                async with self._work:
                    self._work.notify_all()
            else:
                self._fleet.observe(device, answer)
                self._settle(job, answer)

    async def _measure(self, device: PoolDevice, job: _Job) -> Measurement | None:
        """The answer of a device, or None if the job is to be tried again."""
        kind = (device.info.hardware, device.versions)
        arguments = (job.shard, job.settings, job.timing, self._quiet_ms.get(kind))
        try:
            return await asyncio.wait_for(device.call("measure", *arguments), self._time_limit_s)
        except TimeoutError:
            reason = f"no answer within {self._time_limit_s:g} s"
        except RayTaskError as error:
            if type(error.cause).__name__ == "DeviceBusy":
                await asyncio.sleep(_BUSY_WAIT_SECONDS)
                return None
            reason = first_line(error.cause)
        except RayError as error:  # the actor or its node is gone
            job.deaths += 1
            if job.deaths < _MOST_DEATHS:
                self._replace(device, f"died: {first_line(error)}")
                return None
            reason = f"{job.deaths} benchmark actors died while measuring it"
        self._replace(device, reason)
        return Measurement(
            job.shard,
            job.settings,
            device.info.hardware,
            device.versions,
            "failed",
            device.info.name,
            device.info.node,
            time.time(),
            reason=reason,
        )

    def _replace(self, device: PoolDevice, reason: str) -> None:
        """End an actor whose state cannot be trusted any more; another is started meanwhile."""
        self._fleet.drop(device, reason)
        self._spawn(self._refresh())

    def _settle(self, job: _Job, answer: Measurement) -> None:
        """Keep an answer in the store of everyone who waits for it, then hand it out."""
        kind = (answer.hardware, answer.versions)
        if answer.timing is not None and answer.timing.quiet_ms is not None:
            self._quiet_ms.setdefault(kind, answer.timing.quiet_ms)
        answer = answer.told_at(self._quiet_ms.get(kind))
        told = dict.fromkeys(job.stores, answer)
        faults: dict[Path, StoreError] = {}
        for path in job.stores:
            try:
                store = self._open(path)
                told[path] = answer.told_at(store.quiet_ms(*kind))
                store.put([answer])
            except StoreError as error:
                faults[path] = error
        for name, index in job.waiting:
            request = self._requests.get(name)
            if request is not None:
                request.error = faults.get(request.store, request.error)
                self._hand_out(request, index, told.get(request.store, answer))

    # --- all-to-all -----------------------------------------------------------------------------

    async def exchange(self, dims: tuple[int, ...], batch_size: int, store_path: str) -> Exchange:
        """Measure an all-to-all among `len(dims)` ranks, or read it from the store."""
        await self.ready()
        hardware, versions = self._fleet.main_hardware()
        store = self._open(Path(store_path))
        async with self._exchanging, contextlib.AsyncExitStack() as claims:
            devices = self._fleet.of_main_hardware()[: len(dims)]
            key = ExchangeKey(dims, batch_size, len(devices))
            known = store.find_exchange(key, hardware, versions)
            if known is not None:
                return known
            self._last_used = time.monotonic()
            for device in devices:
                await claims.enter_async_context(device.exclusive)
            try:
                found = await asyncio.wait_for(
                    measure_exchange(key, devices, hardware, versions), self._time_limit_s
                )
            except (TimeoutError, RayError) as error:
                reason = f"an all-to-all among {key.ranks} ranks failed: {first_line(error)}"
                for device in devices:  # ranks may hang in it for good
                    self._replace(device, reason)
                raise MeasurementError(reason) from None
            store.put_exchange(found)
            return found
