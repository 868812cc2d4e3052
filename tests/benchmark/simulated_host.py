"""Hosts that exist in numbers only: stopwatches with a clock of their own.

What a host does to a measurement is modelled as far as it was seen on real ones:

- Others visit the core, or share it all the time: wall time passes, our CPU time does not, and some
  of the cache is theirs. A hypervisor's steal passes for our own CPU time. A quota stops us until
  its period ends.
- For moments (a neighbour on the other hyper-thread) or minutes (memory) all is slower. Kernels
  feel that alike, but not quite: the reference's forward pass more than shards', its backward pass
  less.
- What a kernel finds in the cache falls in proportion to what others have brought in since, and it
  takes several runs in a row until all of it is there again. A flush that fits into the cache
  beside all that is brought in between evicts nothing the second time.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from autoshard.benchmark.backends.base import Iteration, TimedOperator
from autoshard.benchmark.backends.cpu import DISTURBED_SHARE, REFERENCE_WARM_UPS
from autoshard.benchmark.machine.clearing import Clearing

MIB = 2**20
_FIRST_FLUSH_BYTES = MIB  # read before it is known how fast that is
_ADMITTED = 0.6  # share of a kernel's misses that are in the cache the next time
_VISITOR_BYTES = MIB // 4  # bytes that a visitor brings into the cache
_REFILL_MS = 0.02  # CPU time that a visitor costs the process that it interrupts
_QUOTA_PERIOD_MS = 100.0


@dataclass(frozen=True)
class Kernel:
    """A shard, or the reference. Times are for an empty cache and a host that is at rest.

    `saved`: by how much it is faster when all it needs is in the cache; `feels`: how much more than
    a typical shard it feels what slows the host (powers of the factor); forward and backward.
    """

    name: str
    forward_ms: float
    backward_ms: float
    touched_bytes: float
    saved: tuple[float, float]
    feels: tuple[float, float] = (1.0, 1.0)

    @property
    def total_ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms

    @property
    def subject(self) -> TimedOperator:
        """To be timed by a simulated host alone."""
        return TimedOperator(self, None)  # type: ignore[arg-type]

    def __call__(self) -> None:
        """Nothing is there to be run."""
        raise NotImplementedError


@dataclass(frozen=True)
class Slow:
    """A state that the host is in for a share of time: kernels take `factors` (two passes) longer.

    `mean_ms`: that it lasts.
    """

    share: float
    mean_ms: float
    residuals: tuple[float, float]


@dataclass(frozen=True)
class Host:
    """What a host is like.

    Args:
        steps_ms: of the shards that it typically measures, least and most.
        speed: how many times as fast as the slowest host that was seen; of reading, too.
        cache_bytes: that the system reports, and that are flushed at most.
        ours_bytes: of it, what other tenants leave to us.
        saved: by how much a shard is faster when all its rows are in the cache.
        noise: deviation of a pass (log) without any other cause.
        visit_every_ms, visit_ms: of other processes on the core.
        foreign_ms: of each turn, if another process is always there; 0 if not.
        stolen, stolen_ms: share of time that the hypervisor takes, and how long each time.
        quota: share of each period that we may run.
        moments, minutes: states in which it is slow.
        unlike: deviation of how much shards feel of that.
    """

    name: str
    steps_ms: tuple[float, float]
    speed: float = 1.0
    cache_bytes: float = 32 * MIB
    ours_bytes: float = 32 * MIB
    saved: float = 0.25
    noise: float = 0.01
    visit_every_ms: float = math.inf
    visit_ms: float = 0.1
    foreign_ms: float = 0.0
    stolen: float = 0.0
    stolen_ms: float = 2.0
    quota: float = 1.0
    moments: Slow | None = None
    minutes: Slow | None = None
    unlike: float = 0.1

    def at_rest(self) -> "Host":
        """The same without anything that disturbs."""
        return replace(
            self,
            noise=0.0,
            visit_every_ms=math.inf,
            foreign_ms=0.0,
            stolen=0.0,
            quota=1.0,
            moments=None,
            minutes=None,
        )

    def reference(self) -> Kernel:
        """As it is on the slowest host: the cache means much to its forward pass."""
        return Kernel(
            "reference", 1.5 / self.speed, 2.4 / self.speed, 3 * MIB, (0.3, 0.06), (1.4, 0.8)
        )

    def shards(self, count: int, seed: int = 0) -> list[Kernel]:
        """Shards of such a host: they touch the more bytes the longer they take."""
        rng = np.random.default_rng([seed, 7])
        kernels = []
        for number in range(count):
            total = float(np.exp(rng.uniform(*np.log(self.steps_ms))))
            forward = total * rng.uniform(0.2, 0.35)
            feels = np.exp(self.unlike * rng.standard_normal(2))
            kernels.append(
                Kernel(
                    f"shard {number}",
                    forward,
                    total - forward,
                    total * self.speed * 1.7 * MIB,
                    (self.saved, self.saved),
                    (float(feels[0]), float(feels[1])),
                )
            )
        return kernels


class SimulatedWatch:
    """A stopwatch on such a host. `full_flush`: it empties the cache whatever that takes."""

    def __init__(self, host: Host, seed: int = 0, full_flush: bool = False) -> None:
        self.host = host
        self.clearing = Clearing()
        self.iterations = 0
        self.timed_ms = 0.0  # inside iterations of subjects
        self.reference_ms = self.flush_ms = 0.0
        self._full_flush = full_flush
        self._rng = np.random.default_rng(seed)
        self._reference = host.reference()
        self._now = self._lost = 0.0  # ms: on the clock, and taken by others
        self._left: dict[str, float] = {}  # by kernel: share of what it touches that is cached
        self._since_flush = math.inf  # bytes brought in
        self._ran = 0.0  # since the foreign process had its turn
        self._seen = (0.0, 0.0)
        self._states = [state for state in (host.moments, host.minutes) if state is not None]
        self._slow = [self._rng.random() < state.share for state in self._states]
        self._flips = [self._until_flip(which) for which in range(len(self._states))]
        self._visit = self._after(host.visit_every_ms)
        self._steal = self._after(self._between_steals())

    def iteration(self, subject: TimedOperator) -> Iteration:
        """Run the kernel that the subject stands for."""
        found = self._run(subject.forward)  # type: ignore[arg-type]
        self.iterations += 1
        self.timed_ms += found.wall_ms
        return found

    def reference(self) -> Iteration:
        """Run the reference, and runs before it that do not count."""
        start = self._now
        for _ in range(REFERENCE_WARM_UPS):
            self._pass(self._reference, 0)
            self._used(self._reference)
        found = replace(self._run(self._reference), wall_ms=self._now - start)
        self.reference_ms += found.wall_ms
        return found

    def clear_cache(self, max_ms: float) -> bool:
        """Read as much as the cache holds, or as can be read in so long; True if all of it."""
        if self._full_flush:
            self._left.clear()
            return True
        rate = 1e7 * self.host.speed
        read = min(self.host.cache_bytes, max_ms * rate or _FIRST_FLUSH_BYTES)
        if read + self._since_flush > self.host.ours_bytes:
            self._bring_in(read)
        self._since_flush = 0.0
        before = self._now
        self._spend(read / rate, 0, 1.0)
        self.flush_ms += self._now - before
        return read == self.host.cache_bytes

    def foreign_load(self) -> float:
        """Share of time that others took since the last call."""
        wall, lost = self._now - self._seen[0], self._lost - self._seen[1]
        self._seen = (self._now, self._lost)
        return lost / wall if wall else 0.0

    def now(self) -> float:
        """Seconds on the simulated clock."""
        return self._now / 1e3

    def wait(self, milliseconds: float) -> None:
        """Let time pass, as between two measurements of a shard."""
        self._now += milliseconds
        self._left.clear()
        self._catch_up()

    def _run(self, kernel: Kernel) -> Iteration:
        start = self._now
        forward_ms, backward_ms = self._pass(kernel, 0), self._pass(kernel, 1)
        self._used(kernel)
        wall_ms = self._now - start
        lost = wall_ms - forward_ms - backward_ms
        return Iteration(forward_ms, backward_ms, wall_ms, lost > DISTURBED_SHARE * wall_ms)

    def _pass(self, kernel: Kernel, which: int) -> float:
        """CPU time of the forward (0) or of the backward pass (1)."""
        at_rest_ms = (kernel.forward_ms, kernel.backward_ms)[which]
        noise = math.exp(self.host.noise * self._rng.standard_normal())
        found = self._left.get(kernel.name, 0.0)
        work_ms = at_rest_ms * (1 - kernel.saved[which] * found) * noise
        return self._spend(work_ms, which, kernel.feels[which])

    def _used(self, kernel: Kernel) -> None:
        """What the kernel touched is in the cache, or some of it; others lose in proportion."""
        found = self._left.get(kernel.name, 0.0)
        self._bring_in((1 - found) * kernel.touched_bytes, besides=kernel.name)
        fits = min(1.0, self.host.ours_bytes / kernel.touched_bytes)
        self._left[kernel.name] = min(fits, found + _ADMITTED * (1 - found))

    def _bring_in(self, touched_bytes: float, besides: str = "") -> None:
        """Others lose in proportion."""
        self._since_flush += touched_bytes
        pushed = touched_bytes / self.host.ours_bytes
        for name, left in self._left.items():
            if name != besides:
                self._left[name] = max(0.0, left - pushed)

    def _spend(self, work_ms: float, which: int, feels: float) -> float:
        """Work for so long as at rest; CPU time that it took."""
        host, spent = self.host, 0.0
        while True:
            residual = math.prod(
                state.residuals[which] ** feels
                for state, slow in zip(self._states, self._slow, strict=True)
                if slow
            )
            turn = host.foreign_ms - self._ran if host.foreign_ms else math.inf
            stop = math.inf
            if host.quota < 1:
                stop = max(self._now, self._period_start() + host.quota * _QUOTA_PERIOD_MS)
            event = min(self._visit, self._steal, self._now + turn, stop, *self._flips)
            ran = min(work_ms * residual, event - self._now)
            self._now += ran
            self._ran += ran
            spent += ran
            work_ms -= ran / residual
            if work_ms <= 1e-12:
                return spent
            if event == stop:
                self._now = self._period_start() + _QUOTA_PERIOD_MS
            elif event == self._steal:
                taken = self._after(host.stolen_ms) - self._now
                spent += taken
                self._lose(taken)
                self._steal = self._after(self._between_steals())
            elif event == self._visit:
                self._lose(self._after(host.visit_ms) - self._now)
                work_ms += _REFILL_MS / host.speed
                self._bring_in(_VISITOR_BYTES)
                self._visit = self._after(host.visit_every_ms)
            elif event not in self._flips:
                self._lose(host.foreign_ms)
                work_ms += _REFILL_MS / host.speed
                self._bring_in(_VISITOR_BYTES)
                self._ran = 0.0
            self._catch_up()

    def _lose(self, milliseconds: float) -> None:
        self._now += milliseconds
        self._lost += milliseconds

    def _period_start(self) -> float:
        return self._now // _QUOTA_PERIOD_MS * _QUOTA_PERIOD_MS

    def _after(self, mean_ms: float) -> float:
        return self._now + self._rng.exponential(mean_ms) if math.isfinite(mean_ms) else math.inf

    def _between_steals(self) -> float:
        stolen = self.host.stolen
        return self.host.stolen_ms * (1 - stolen) / stolen if stolen else math.inf

    def _until_flip(self, which: int) -> float:
        state = self._states[which]
        mean = state.mean_ms
        if not self._slow[which]:
            mean *= (1 - state.share) / state.share
        return self._after(mean)

    def _catch_up(self) -> None:
        """What happened while others had the core."""
        for which in range(len(self._states)):
            while self._flips[which] <= self._now:
                self._slow[which] = not self._slow[which]
                start, self._now = self._now, self._flips[which]
                self._flips[which] = self._until_flip(which)
                self._now = start
        if self._visit <= self._now:
            self._visit = self._after(self.host.visit_every_ms)
        if self._steal <= self._now:
            self._steal = self._after(self._between_steals())
