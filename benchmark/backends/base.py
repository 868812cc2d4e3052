"""The interface of a kind of device.

It loads neither torch nor Ray: the pool's coordinator asks a backend where devices are, and stays
light.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from autoshard.benchmark.machine.clearing import Clearing
from autoshard.benchmark.machine.hardware import NodeReport, SystemReport
from autoshard.benchmark.machine.process import peak_bytes

if TYPE_CHECKING:
    import torch

    from autoshard.workload import Shard

# Longer than most measurements, so that two pools take turns on a device; short beside the minutes
# after which a device counts as hanging.
CLAIM_PATIENCE_S = 2.0
_SHARES = 10_000  # of a GPU: Ray counts no smaller ones

Node = Mapping[str, Any]  # an entry of `ray.nodes()`


@dataclass(frozen=True)
class Place:
    """The location of a device.

    Args:
        kind: Kind of device.
        owner: Scope of `number`: the machine of a core, the Ray node of a GPU.
        number: Number of the device.
        node_id: Ray node whose actor uses the device.
        name: Name of the device in reports.
        memory_bytes: Memory for shards; 0 if the device itself reports it.
        cores: Cores of a CPU device that has several; empty if it is the one of its number.
    """

    kind: str
    owner: str
    number: int
    node_id: str
    name: str
    memory_bytes: int = 0
    cores: tuple[int, ...] = ()

    @property
    def unit(self) -> tuple[str, str, int]:
        """Identity of the device: no two actors of a pool share it."""
        return self.kind, self.owner, self.number


class OperatorPlacement(NamedTuple):
    """Where fbgemm's operator is and runs, and what it checks, by the names in its enumerations.

    Costs of CPUs are without bounds checks, whose time is part of the overhead of training; on GPUs
    they are checked as TorchRec does.
    """

    location: str
    compute: str
    bounds_check: str


@dataclass(frozen=True)
class TimedOperator:
    """An operator to be timed. `forward` runs the forward pass and returns its output."""

    forward: Callable[[], Any]
    gradient: "torch.Tensor"


@dataclass(frozen=True)
class Iteration:
    """Times of one forward and backward pass; `wall_ms` is the time that it kept the device.

    `disturbed`: other processes took much of its time. It counts nevertheless: the clock excludes
    that time, and what remains is slowed like the reference beside it.
    """

    forward_ms: float
    backward_ms: float
    wall_ms: float
    disturbed: bool = False


class Stopwatch(ABC):
    """Runs and times single iterations on a device."""

    def __init__(self) -> None:
        self.clearing = Clearing()

    @abstractmethod
    def iteration(self, subject: TimedOperator) -> Iteration:
        """Returns the times of one forward and backward pass."""

    def reference(self) -> Iteration | None:
        """Returns the times of one run of the reference; None where there is none."""
        return None

    def clear_cache(self, max_ms: float) -> bool:  # noqa: ARG002
        """Clears the cache for at most `max_ms`; returns whether all of it is clear.

        By default iterations clear it themselves.
        """
        return True

    @abstractmethod
    def foreign_load(self) -> float:
        """Returns the share of the device that other processes took since the last call."""

    def now(self) -> float:
        """Returns seconds of a monotonic clock."""
        return time.monotonic()

    def hold(self, times: int = 1) -> None:  # noqa: B027 - by default nothing is launched ahead
        """Keeps the device waiting while what follows is launched, `times` as long as usual."""

    def is_ahead(self, mark: Any) -> bool:  # noqa: ARG002
        """Returns whether the device has yet to reach a mark: all since then was launched ahead."""
        return True

    @abstractmethod
    def mark(self) -> Any:
        """Returns a mark that the device reaches after all work submitted before."""

    @abstractmethod
    def between(self, marks: Sequence[Any]) -> list[tuple[float, float]]:
        """Returns ms from each mark to the next, and how much of it this process had the device."""


class DeviceBackend(ABC):
    """A kind of device.

    Members below `bind` are for the process that uses one device, after `bind`.
    """

    kind: ClassVar[str]  # as options, fingerprints and stores name it
    noun: ClassVar[str]  # as messages name one
    max_ranks: ClassVar[float]  # ranks that one device can run at the same time
    patience_s: ClassVar[float]  # for which a pool waits for its first device
    is_shared: ClassVar[bool]  # other processes, and other ranks, may run on it
    reference_samples: int  # batch of the reference operator: short, and long enough
    num_gpus: ClassVar[int] = 0  # Ray GPUs that an actor holds
    lookup_bytes: ClassVar[int] = 0  # that an operator takes for each lookup while it runs
    probe_bytes: ClassVar[int]  # of rows in one pass of a probe: enough to keep the device busy
    max_width: ClassVar[int | None] = None  # columns of a table that the operator accepts
    throttle: ClassVar[str]  # what may stop or slow the device, and how to mend it, for notices
    operator: OperatorPlacement
    collectives: str  # torch.distributed's name of the library that connects ranks

    @property
    @abstractmethod
    def device(self) -> "torch.device":
        """The device, as this process sees it."""

    def is_on(self, nodes: Iterable[Node]) -> bool:  # noqa: ARG002
        """Returns whether any of these nodes has such a device, by Ray's resources."""
        return True

    @abstractmethod
    def places(
        self, nodes: Mapping[str, Node], reports: Sequence[NodeReport], taken: Iterable[Place]
    ) -> list[Place]:
        """Returns the devices of these nodes that are not taken."""

    def is_here(self) -> bool:
        """Returns whether this machine has such a device."""
        return True

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns the hardware; costs are comparable where it is equal."""

    def system_report(self) -> SystemReport:
        """Returns what the system says of the device."""
        return SystemReport()

    def ray_options(self, place: Place, ranks: int = 1) -> dict[str, Any]:
        """Returns the options of a Ray actor for this device, or for one of its `ranks`."""
        share = int(_SHARES * self.num_gpus / ranks) / _SHARES
        return {"num_cpus": 0, "num_gpus": share, **on_node(place.node_id)}

    @abstractmethod
    def bind(self, place: Place) -> None:
        """Binds this process to the device."""

    def name_of(self, place: Place) -> str:
        """Returns the name of the device that measurements keep."""
        return place.name

    @abstractmethod
    def claim(
        self,
        label: str,
        patience_s: float = CLAIM_PATIENCE_S,
        waiting: Callable[[str], None] | None = None,
    ) -> AbstractContextManager[None]:
        """Holds the device while the block runs, against other clusters of this machine.

        Args:
            label: Description of the holder, for messages of others.
            patience_s: Seconds to wait for another holder before DeviceBusy.
            waiting: Called with what is waited for, if that takes more than a second.
        """

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory for shards."""

    def free_bytes(self) -> int:
        """Returns the memory that shards may take now."""
        return self.memory_bytes

    def probe_memory_bytes(self) -> int:
        """Returns the memory that nobody uses now, of which a probe may take a share."""
        return self.free_bytes()

    def peak_bytes(self) -> int:
        """Returns the peak memory of this process on the device."""
        return peak_bytes()

    def reset_peak(self) -> None:  # noqa: B027 - peaks of processes stay
        """Resets what `peak_bytes` returns, where the device can."""

    def is_lost(self) -> bool:
        """Returns whether the device is gone, so that no fault is that of what ran on it."""
        return False

    @abstractmethod
    def flush(self, freed_bytes: int) -> None:
        """Returns memory to the system, of which `freed_bytes` have just been freed."""

    def batch(
        self, shard: "Shard", batch_size: int, seed: int
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns indices and offsets of a shard's batch on the device, as FBGEMM takes them."""
        import torch

        from autoshard.workload import shard_batch

        drawn = shard_batch(shard, batch_size, seed)
        return torch.from_numpy(drawn.indices), torch.from_numpy(drawn.offsets)

    def throttled_seconds(self) -> float:
        """Returns for how long `throttle` has stopped or slowed this process so far."""
        return 0.0

    def state(self) -> str:
        """Returns what the device reports of its state, such as its clock; empty if nothing."""
        return ""

    @abstractmethod
    def stopwatch(self, flush: bool = True, references: Sequence[TimedOperator] = ()) -> Stopwatch:
        """Returns a stopwatch.

        Args:
            flush: Whether it clears the cache between iterations.
            references: Operators to run beside iterations, in turn.
        """

    @abstractmethod
    def process_group(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        """Returns a process group of torch.distributed for one rank of possibly several here."""

    def synchronize(self) -> None:  # noqa: B027 - by default calls are synchronous
        """Waits until the device has done all submitted work."""


def on_node(node_id: str) -> dict[str, Any]:
    """Returns the options that keep an actor or a task of Ray on this node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
