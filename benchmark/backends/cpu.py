"""CPU cores: each has one pinned process, and is shared with other processes of the machine."""

import itertools
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.benchmark.backends.base import (
    CLAIM_PATIENCE_S,
    DeviceBackend,
    Iteration,
    Node,
    OperatorPlacement,
    Place,
    Stopwatch,
    TimedOperator,
)
from autoshard.benchmark.machine.containers import cpu_quota, throttled_seconds
from autoshard.benchmark.machine.device_lock import claimed
from autoshard.benchmark.machine.hardware import (
    NodeReport,
    SystemReport,
    cpu_fingerprint,
    cpu_report,
    free_memory_bytes,
    last_level_cache_bytes,
    with_threads,
)
from autoshard.benchmark.machine.process import keep_freed_memory, release_freed_memory

if TYPE_CHECKING:
    import torch

# Parts of a core's memory that its process may keep beside shards: freed pages, and the flush.
KEPT_SHARE, _FLUSH_SHARE = 24, 32
DISTURBED_SHARE = 0.15  # share of an iteration's time taken by others
_FIRST_FLUSH = 2**17  # elements of 8 bytes: enough to learn the speed of reading
# Forward passes before the one that counts. What ran before the reference changes the time of its
# first forward pass by up to 40 %; after two of them by 4 %.
REFERENCE_WARM_UPS = 2
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class CpuBackend(DeviceBackend):
    """A CPU core, or several. No CPU of Ray is requested: small machines need theirs for trainers.

    Args:
        threads: Cores of a device, each of which has a thread.
    """

    kind, noun = "cpu", "CPU core"
    max_ranks, patience_s, is_shared = math.inf, 120.0, True
    throttle = "the container's CPU quota: raise the quota or leave more of it to the pool"
    operator = OperatorPlacement("HOST", "CPU", "NONE")
    collectives = "gloo"
    probe_bytes = 2**21
    reference_samples = 128

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    @property
    def device(self) -> "torch.device":
        """torch's CPU device, which stands for all cores."""
        import torch

        return torch.device("cpu")

    def places(
        self,
        nodes: Mapping[str, Node],  # noqa: ARG002
        reports: Sequence[NodeReport],
        taken: Iterable[Place],
    ) -> list[Place]:
        """Returns free cores; each goes to the Ray node of its machine that has the fewest."""
        taken = list(taken)
        units = {place.unit for place in taken}
        load = Counter(place.node_id for place in taken)
        machines: dict[str, list[NodeReport]] = defaultdict(list)
        for report in reports:
            machines[report.machine_id].append(report)
        places = []
        for machine, nodes_there in sorted(machines.items()):
            cores = sorted({core for report in nodes_there for core in report.cores})
            memory = {report.node_id: share_memory(cores, report) for report in nodes_there}
            for of_device in zip(*[iter(cores)] * self._threads, strict=False):
                able = [report for report in nodes_there if set(of_device) <= set(report.cores)]
                if not able:
                    continue
                node = min(able, key=lambda report: (load[report.node_id], report.node_id))
                core, last = of_device[0], of_device[-1]
                name = f"cpu{core}@{node.host}" if core == last else f"cpu{core}-{last}@{node.host}"
                share = sum(memory[node.node_id][core] for core in of_device)
                place = Place(self.kind, machine, core, node.node_id, name, share, of_device)
                if place.unit not in units:
                    load[node.node_id] += 1
                    places.append(place)
        return places

    def fingerprint(self) -> str:
        """Returns model, vector instructions and cache of the CPU, and threads if several."""
        return with_threads(cpu_fingerprint(), self._threads)

    def system_report(self) -> SystemReport:
        """Returns what the system says of the core."""
        import torch

        kernels = torch.backends.cpu.get_cpu_capability()
        return replace(cpu_report(self._cores[0]), kernels=kernels)

    def bind(self, place: Place) -> None:
        """Pins this process to its cores, with as many threads for torch."""
        import torch

        self._cores, self._memory_bytes = place.cores or (place.number,), place.memory_bytes
        os.sched_setaffinity(0, self._cores)
        torch.set_num_threads(len(self._cores))
        self._kept_bytes = self._memory_bytes // KEPT_SHARE
        keep_freed_memory(self._kept_bytes)
        self._has_quota = cpu_quota() is not None

    @contextmanager
    def claim(
        self,
        label: str,
        patience_s: float = CLAIM_PATIENCE_S,
        waiting: Callable[[str], None] | None = None,
    ) -> Iterator[None]:
        """Holds the cores against other pools of this machine."""
        with ExitStack() as held:
            for core in self._cores:
                held.enter_context(claimed(f"core {core}", label, patience_s, waiting))
            yield

    @property
    def memory_bytes(self) -> int:
        """The core's share of the machine's memory; nothing is kept between measurements."""
        return self._memory_bytes

    def probe_memory_bytes(self) -> int:
        """Returns the machine's free memory, at most the core's share."""
        return min(self._memory_bytes, free_memory_bytes())

    def flush(self, freed_bytes: int) -> None:
        """Returns freed pages to the system if they exceed what is kept for later shards."""
        if freed_bytes > self._kept_bytes:
            release_freed_memory()

    def throttled_seconds(self) -> float:
        """Returns for how long the container's CPU quota has stopped its processes so far."""
        return throttled_seconds() if self._has_quota else 0.0

    def stopwatch(
        self, flush: bool = True, references: Sequence[TimedOperator] = ()
    ) -> "CpuStopwatch":
        """Returns a stopwatch of the core."""
        cache_bytes = last_level_cache_bytes(self._cores[0])
        max_bytes = self._memory_bytes // _FLUSH_SHARE if flush else 0
        return CpuStopwatch(self._cores, min(cache_bytes, max_bytes), references)

    def process_group(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        """Returns a process group of gloo, over the network through which Ray reaches this node.

        By itself, gloo takes the address of the host's name, which on many systems is a loopback.
        """
        import ray
        import torch.distributed as dist

        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        if "GLOO_SOCKET_IFNAME" in os.environ:
            options._devices = [gloo.create_default_device()]
        else:
            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, rank, ranks, options)


def share_memory(cores: Sequence[int], report: NodeReport) -> dict[int, int]:
    """Returns bytes for each core of a machine: equal shares, limited by the core's NUMA node.

    Pages are on the node of the thread that first writes to them, and an actor stays on its core.
    Beyond its node's memory it would measure the slower memory of others.
    """
    homes = {cpu: node for node in report.numa if node.memory_bytes for cpu in node.cpus}
    crowds = Counter(homes[core].number for core in cores if core in homes)
    near = {
        core: homes[core].memory_bytes // crowds[homes[core].number]
        if core in homes
        else report.memory_bytes
        for core in cores
    }
    shares: dict[int, int] = {}
    free = report.memory_bytes
    for core in sorted(cores, key=lambda core: near[core]):
        shares[core] = min(near[core], free // (len(cores) - len(shares)))
        free -= shares[core]
    return shares


class CpuStopwatch(Stopwatch):
    """Times the calling thread, which must be pinned to `cores`.

    The clock is the thread's CPU time, so time that other processes take on the core is excluded.
    With several cores it is the wall clock, since the thread also waits for others.

    Args:
        cores: Numbers of the cores.
        cache_bytes: Bytes to read to clear the last-level cache; 0 to leave it alone.
        references: Operators to run beside iterations, in turn.
    """

    def __init__(
        self, cores: Sequence[int], cache_bytes: int = 0, references: Sequence[TimedOperator] = ()
    ) -> None:
        super().__init__()
        import torch

        self._cores = cores
        self._clock_ns = time.thread_time_ns if len(cores) == 1 else time.perf_counter_ns
        # Reading evicts as well as writing and takes half the time.
        self._flush = torch.empty(cache_bytes // 8, dtype=torch.float64)
        self._touched = 0  # number of its elements that were written: these have pages of their own
        self._per_ms = 0.0  # elements read in a millisecond
        self._references = itertools.cycle(references)
        self._seen = _core_seconds(cores)

    def iteration(self, subject: TimedOperator) -> Iteration:
        """Times one forward and backward pass of the thread."""
        start_wall, start = time.perf_counter_ns(), self._clock_ns()
        output = subject.forward()
        between = self._clock_ns()
        output.backward(subject.gradient)
        end, end_wall = self._clock_ns(), time.perf_counter_ns()
        wall_ms = (end_wall - start_wall) / 1e6
        return Iteration(
            forward_ms=(between - start) / 1e6,
            backward_ms=(end - between) / 1e6,
            wall_ms=wall_ms,
            disturbed=wall_ms - (end - start) / 1e6 > DISTURBED_SHARE * wall_ms,
        )

    def reference(self) -> Iteration | None:
        """Times the next reference, after warm-up runs."""
        following = next(self._references, None)
        if following is None:
            return None
        start = time.perf_counter_ns()
        for _ in range(REFERENCE_WARM_UPS):
            following.forward()
        found = self.iteration(following)
        return replace(found, wall_ms=(time.perf_counter_ns() - start) / 1e6)

    def clear_cache(self, max_ms: float) -> bool:
        """Reads as much as the cache holds, or as the time allows; returns whether it was all."""
        whole = self._flush.numel()
        wanted = whole
        if math.isfinite(max_ms):
            wanted = min(whole, int(self._per_ms * max_ms) or _FIRST_FLUSH)
        if not wanted:
            return True
        if wanted > self._touched:  # pages that were never written are one page of zeros
            self._flush[self._touched : wanted].fill_(1.0)
            self._touched = wanted
        start = time.thread_time_ns()
        self._flush[:wanted].sum()
        self._per_ms = wanted / max((time.thread_time_ns() - start) / 1e6, 1e-3)
        return wanted == whole

    def foreign_load(self) -> float:
        """Returns the share of the core's time that others took: busy and stolen time beyond our
        own.

        The kernel counts in ticks, so short spans give 0.
        """
        before, self._seen = self._seen, _core_seconds(self._cores)
        wall, busy, own = (now - then for now, then in zip(self._seen, before, strict=True))
        return min(1.0, max(0.0, (busy - own - 2 * _TICK_S) / wall)) if wall > 0 else 0.0

    def mark(self) -> tuple[int, int]:
        """Returns nanoseconds of the wall clock and of this thread's CPU time."""
        return time.perf_counter_ns(), time.thread_time_ns()

    def between(self, marks: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        """Returns ms from each mark to the next, and this thread's share of them."""
        return [((b - a) / 1e6, (d - c) / 1e6) for (a, c), (b, d) in pairwise(marks)]


def _core_seconds(cores: Sequence[int]) -> tuple[float, float, float]:
    """Returns wall, busy and stolen time of cores, and CPU time of this process, in s."""
    wall, own, busy = time.monotonic() * len(cores), time.process_time(), 0
    names = {f"cpu{core}" for core in cores}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _, _, irq, soft, steal = map(int, ticks[:8])
            busy += user + nice + system + irq + soft + steal
    return wall, busy * _TICK_S or own, own
