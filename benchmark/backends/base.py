"""What the rest of the code asks of a kind of device.

Importing this loads neither torch nor Ray: the pool's coordinator asks a backend where devices are,
and stays light.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from autoshard.benchmark.clearing import Clearing
from autoshard.benchmark.hardware import NodeReport
from autoshard.benchmark.process import peak_bytes

if TYPE_CHECKING:
    import torch

# Longer than most measurements, so that two pools take turns at a device; short beside the minutes
# after which a device counts as hanging, and the shard may be handed to another device meanwhile.
CLAIM_PATIENCE_S = 2.0

Node = Mapping[str, Any]  # an entry of `ray.nodes()`


@dataclass(frozen=True)
class Place:
    """Where a device is.

    Args:
        kind: of device.
        owner: in which `number` is unique: the machine of a core, the Ray node of a GPU.
        number: of the device.
        node_id: the Ray node whose actor uses the device.
        name: of the device in reports.
        memory_bytes: that shards may take; 0 where the device itself reports its memory.
    """

    kind: str
    owner: str
    number: int
    node_id: str
    name: str
    memory_bytes: int = 0

    @property
    def unit(self) -> tuple[str, str, int]:
        """What no two actors of a pool share."""
        return self.kind, self.owner, self.number


class OperatorPlacement(NamedTuple):
    """Where fbgemm's operator lies and runs, by the names in its enumerations."""

    location: str
    compute: str


@dataclass(frozen=True)
class TimedOperator:
    """An operator to be timed. `forward` runs the forward pass and returns its output."""

    forward: Callable[[], Any]
    gradient: "torch.Tensor"


@dataclass(frozen=True)
class Iteration:
    """One forward and backward pass; `wall_ms` is the time that it kept the device.

    `disturbed`: others took much of its time. It counts all the same: the clock leaves out what
    they took, and what is left they slow down no more than the reference beside it.
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
        """Clears the cache for at most `most_ms`; returns whether all of it is clear, as it is by
        default, where iterations clear it themselves.
        """
        return True

    @abstractmethod
    def foreign_load(self) -> float:
        """Returns the share of the device that other processes took since the last call."""

    def now(self) -> float:
        """Returns the seconds of a clock that only goes forward."""
        return time.monotonic()

    @abstractmethod
    def mark(self) -> Any:
        """Returns a mark that the device reaches once it has done what it was given before."""

    @abstractmethod
    def between(self, marks: Sequence[Any]) -> list[tuple[float, float]]:
        """Returns ms from each mark to the next, and how many of them the device was ours."""


class DeviceBackend(ABC):
    """All that is known of a kind of device.

    What is below `bind` is for the process that uses one device, after `bind`.
    """

    kind: ClassVar[str]  # as options, fingerprints and stores name it
    noun: ClassVar[str]  # as messages name one
    max_ranks: ClassVar[float]  # that one device can run at the same time
    patience_s: ClassVar[float]  # how long a pool waits for its first device
    # Whether others may slow the device down, so that costs are compared with a reference's.
    is_shared: ClassVar[bool]
    num_gpus: ClassVar[int] = 0  # of Ray's, that an actor on one holds
    operator: OperatorPlacement
    collectives: str  # torch.distributed's name of the library that connects ranks

    @property
    @abstractmethod
    def device(self) -> "torch.device":
        """The device, as this process sees it."""

    def is_on(self, nodes: Iterable[Node]) -> bool:  # noqa: ARG002
        """Returns whether Ray says that any of these nodes has such a device."""
        return True

    @abstractmethod
    def places(
        self, nodes: Mapping[str, Node], reports: Sequence[NodeReport], taken: Iterable[Place]
    ) -> list[Place]:
        """Returns where devices are that are not taken."""

    def is_here(self) -> bool:
        """Returns whether this machine has such a device."""
        return True

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns the hardware; costs are comparable where it is equal."""

    def ray_options(self, place: Place) -> dict[str, Any]:
        """Returns what an actor asks of Ray to be on this device."""
        return {"num_cpus": 0, "num_gpus": self.num_gpus, **on_node(place.node_id)}

    @abstractmethod
    def bind(self, place: Place) -> None:
        """Makes this process the one that uses the device."""

    def claim(
        self,
        label: str,  # noqa: ARG002
        patience_s: float = CLAIM_PATIENCE_S,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Holds the device while the block runs; Ray holds it already by default.

        Args:
            label: who holds it, for others that wait in vain.
            patience_s: how long to wait for another holder before DeviceBusy.
        """
        return nullcontext()

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """What shards may take in total."""

    def free_bytes(self) -> int:
        """Returns what shards may take now."""
        return self.memory_bytes

    def peak_bytes(self) -> int:
        """Returns the most memory of the device that this process has ever taken."""
        return peak_bytes()

    @abstractmethod
    def flush(self, freed_bytes: int) -> None:
        """Gives memory back, of which so much has just been freed, as far as that is of use."""

    def throttled_seconds(self) -> float:
        """Returns for how long a CPU quota has stopped this process so far."""
        return 0.0

    @abstractmethod
    def stopwatch(self, flush: bool = True, references: Sequence[TimedOperator] = ()) -> Stopwatch:
        """Returns a stopwatch.

        Args:
            flush: whether it clears the cache between iterations.
            references: operators to run beside iterations, in turn, on a device that is shared.
        """

    @abstractmethod
    def process_group(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        """Returns one rank's group of torch.distributed, beside those of other ranks here."""

    def synchronize(self) -> None:  # noqa: B027 - by default a call returns when all is done
        """Waits until the device has done what it was given."""


def on_node(node_id: str) -> dict[str, Any]:
    """Returns the options that keep an actor or a task of Ray on this node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
