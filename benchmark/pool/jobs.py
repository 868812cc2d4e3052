"""Requests of the pool's clients, and the queue of jobs that answer them.

A job is one measurement of one shard. Several requests for the same shard share a job.
"""

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

from autoshard.benchmark.measurement import Measurement, MeasureSettings, Order, TimingOptions
from autoshard.benchmark.store.file import StoreError
from autoshard.workload import Shard

JobKey = tuple[str, MeasureSettings]

MAX_INTERLEAVED = 8  # shards on a device: with more, a round's flush saves little more time


@dataclass
class Request:
    """The state of a client's request."""

    name: str
    store: Path
    missing: int
    repeats: int = 1  # measurements of each shard
    answers: list[tuple[int, Measurement]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    error: StoreError | None = None
    seen: float = field(default_factory=time.monotonic)
    jobs: set[JobKey] = field(default_factory=set)

    def hand_out(self, index: int, measurement: Measurement) -> None:
        """Adds an answer for the client to collect."""
        self.answers.append((index, measurement))
        self.missing -= 1
        self.arrived.set()
        if not self.missing:
            self.complete.set()


@dataclass
class Job:
    """A shard to be measured, with the requests that wait for it and their index of it."""

    shard: Shard
    settings: MeasureSettings
    timing: TimingOptions
    waiting: list[tuple[str, int]] = field(default_factory=list)
    stores: set[Path] = field(default_factory=set)
    crashes: int = 0
    alone: bool = False  # something went wrong while it was interleaved with others

    @property
    def key(self) -> JobKey:
        """Equal for jobs that one measurement answers."""
        return self.shard.digest, self.settings

    @property
    def order(self) -> Order:
        """The job as a device gets it."""
        return Order(self.shard, self.settings, self.timing)


class JobQueue:
    """Jobs that wait for a device, and jobs in progress.

    Requests take turns, so that small ones need not wait for large ones; within a request, jobs are
    in the order of its shards.
    """

    def __init__(self) -> None:
        self._queued: dict[JobKey, Job] = {}
        self._running: dict[JobKey, Job] = {}
        self._again: deque[JobKey] = deque()
        # Queued jobs by name of the request.
        self._turns: OrderedDict[str, deque[JobKey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queued) + len(self._running)

    def join(self, request: Request, index: int, job: Job) -> None:
        """Adds a job, or joins the one that is there for the same measurement."""
        key = job.key
        found = self._running.get(key)
        if found is None:
            found = self._queued.setdefault(key, job)
            self._turns.setdefault(request.name, deque()).append(key)
        found.waiting.append((request.name, index))
        found.stores.add(request.store)
        request.jobs.add(key)

    def leave(self, request: Request) -> None:
        """Removes a request; jobs without any request are dropped unless in progress."""
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
        """Number of jobs that wait for a device."""
        return len(self._queued)

    def take(self, max_jobs: int) -> list[Job]:
        """Returns the next jobs for a free device; a job that is `alone` comes singly."""
        taken: list[Job] = []
        while len(taken) < max_jobs and self._queued:
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
        # Keys of jobs that another request took, or that were dropped, are skipped.
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
        """Puts a job back that its device could not do; it comes before all others."""
        del self._running[job.key]
        if job.waiting:
            self._queued[job.key] = job
            self._again.append(job.key)

    def finish(self, job: Job) -> None:
        """Removes a job that is answered."""
        del self._running[job.key]

    def stores(self) -> set[Path]:
        """Returns the stores that answers will be written to."""
        jobs = [*self._queued.values(), *self._running.values()]
        return {path for job in jobs for path in job.stores}


def repeats_of(known: Measurement) -> int:
    """Returns how often a shard was measured so far."""
    return 0 if known.timing is None else known.timing.repeats
