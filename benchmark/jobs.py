"""What clients of the pool wait for: their requests, and the jobs that answer them.

A job is one shard to be visited once. Whoever asks for a shard that is waited for already joins its
job, so a shard that several ask for at once is measured once.
"""

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

from autoshard.benchmark.measurement import Measurement, MeasureSettings, Order, TimingOptions
from autoshard.benchmark.store_file import StoreError
from autoshard.workload import Shard

JobKey = tuple[str, MeasureSettings]

# Shards that a device measures by turns. What is done once a round (a flush) is a small part of it
# by then; with more, answers only come later.
MAX_INTERLEAVED = 8


@dataclass
class Request:
    """What one client waits for."""

    name: str
    store: Path
    missing: int
    repeats: int = 1  # that each shard is to have
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
    alone: bool = False  # something went wrong while it was measured by turns with others

    @property
    def key(self) -> JobKey:
        """Equal for jobs that one visit answers."""
        return self.shard.digest, self.settings

    @property
    def order(self) -> Order:
        """What a device is told."""
        return Order(self.shard, self.settings, self.timing)


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

    @property
    def waiting(self) -> int:
        """Jobs that wait for a device."""
        return len(self._queued)

    def take(self, most: int) -> list[Job]:
        """The next jobs, for a device that is free to do so many by turns.

        Some job must wait. One that is to be alone is taken alone.
        """
        taken: list[Job] = []
        while len(taken) < most and self._queued:
            key = self._next()
            if self._queued[key].alone and taken:
                self._again.appendleft(key)
                break
            job = self._running[key] = self._queued.pop(key)
            taken.append(job)
            if job.alone:
                break
        return taken

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
