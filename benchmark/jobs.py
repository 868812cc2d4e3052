"""What clients of the pool wait for: their requests, and the jobs that answer them.

A job is one shard to be measured. Whoever asks for a shard that is waited for already joins its
job, so a shard that several ask for at once is measured once.
"""

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.measurement import Measurement, MeasureSettings, TimingOptions
from benchmark.store_file import StoreError
from workload import Shard

JobKey = tuple[str, MeasureSettings]


@dataclass
class Request:
    """What one client waits for."""

    name: str
    store: Path
    missing: int
    answers: list[tuple[int, Measurement]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    error: StoreError | None = None
    seen: float = field(default_factory=time.monotonic)
    jobs: set[JobKey] = field(default_factory=set)

    def hand_out(self, index: int, measurement: Measurement) -> None:
        """Put an answer where the client collects it."""
        self.answers.append((index, measurement))
        self.missing -= 1
        self.arrived.set()
        if not self.missing:
            self.complete.set()


@dataclass
class Job:
    """A shard to be measured, and who waits for it at which place of their request."""

    shard: Shard
    settings: MeasureSettings
    timing: TimingOptions
    waiting: list[tuple[str, int]] = field(default_factory=list)
    stores: set[Path] = field(default_factory=set)
    deaths: int = 0

    @property
    def key(self) -> JobKey:
        """Equal for jobs that one measurement answers."""
        return self.shard.digest, self.settings


class JobQueue:
    """Jobs that wait for a device, and those that have one.

    Requests take turns, so that who asks for a few shards need not wait for who asked for
    thousands; within a request jobs are done in the order of its shards.
    """

    def __init__(self) -> None:
        self._queued: dict[JobKey, Job] = {}
        self._running: dict[JobKey, Job] = {}
        self._again: deque[JobKey] = deque()
        self._turns: OrderedDict[str, deque[JobKey]] = OrderedDict()  # of requests, by name

    def __len__(self) -> int:
        """Jobs that are not answered yet."""
        return len(self._queued) + len(self._running)

    @property
    def is_empty(self) -> bool:
        """True if no job waits for a device."""
        return not self._queued

    def join(self, request: Request, index: int, job: Job) -> None:
        """Wait for this job, or for the one that is there already."""
        key = job.key
        found = self._running.get(key)
        if found is None:
            found = self._queued.setdefault(key, job)
            self._turns.setdefault(request.name, deque()).append(key)
        found.waiting.append((request.name, index))
        found.stores.add(request.store)
        request.jobs.add(key)

    def leave(self, request: Request) -> None:
        """Wait no longer; jobs that nobody waits for are forgotten, unless they run."""
        self._turns.pop(request.name, None)
        for key in request.jobs:
            job = self._running.get(key) or self._queued.get(key)
            if job is None:  # it was answered
                continue
            job.waiting = [place for place in job.waiting if place[0] != request.name]
            if not job.waiting:
                self._queued.pop(key, None)

    def take(self) -> Job:
        """The next job, for a device that is free; some job must wait for one."""
        key = self._next()
        job = self._running[key] = self._queued.pop(key)
        return job

    def _next(self) -> JobKey:
        # Keys of jobs that were taken in another request's turn, or forgotten, are passed over.
        while self._again:
            if (key := self._again.popleft()) in self._queued:
                return key
        while True:
            name, keys = self._turns.popitem(last=False)
            while keys:
                if (key := keys.popleft()) in self._queued:
                    self._turns[name] = keys
                    return key

    def put_back(self, job: Job) -> None:
        """Its device could not do it: another one shall, before all others."""
        del self._running[job.key]
        if job.waiting:
            self._queued[job.key] = job
            self._again.append(job.key)

    def finish(self, job: Job) -> None:
        """It is answered."""
        del self._running[job.key]

    def stores(self) -> set[Path]:
        """The stores that answers will be written to."""
        jobs = (self._queued, self._running)
        return {path for some in jobs for job in some.values() for path in job.stores}
