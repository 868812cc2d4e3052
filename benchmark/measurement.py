"""Measurements: the cost of a shard, on one kind of hardware, by one version of libraries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, NamedTuple, TypeVar

from autoshard.workload import OperatorOptions, Shard, ShardCost, UserError
from autoshard.workload.arrays import Floats
from autoshard.workload.bounds import MAX_BATCH_SIZE
from autoshard.workload.tables.operators import FLOAT_BYTES

Status = Literal["ok", "refused", "failed"]
MeasuredCollective = Literal["all_to_all", "reduce_scatter", "all_reduce"]


class MeasurementError(UserError):
    """A requested cost could not be measured."""


TIMING_METHOD = 3  # version of the timing method: raised whenever a change affects costs
HALF_WIDTH_95 = 1.96  # half width of a 95 % interval, in standard errors
Number = TypeVar("Number", float, Floats)


class Directions(NamedTuple):
    """A quantity of the forward pass, of the backward pass, and of both together."""

    forward: float
    backward: float
    both: float

    @staticmethod
    def of(
        both: float, forward: float | None = None, backward: float | None = None
    ) -> "Directions":
        """Returns the quantity. A direction that is None, for unknown, is like both."""
        forward, backward = (both if value is None else value for value in (forward, backward))
        return Directions(forward, backward, both)


_UNKNOWN = Directions.of(math.nan)


@dataclass(frozen=True)
class MeasureSettings:
    """Settings that a cost depends on besides shard and device: part of the store's key."""

    batch_size: int
    operator: OperatorOptions = field(default_factory=OperatorOptions)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            most = f"and at most {MAX_BATCH_SIZE}"
            raise UserError(f"batch size must be at least 1 {most}, got {self.batch_size}")
        # Costs depend on weights and optimizer alone, not on what training takes beside.
        alone = OperatorOptions(self.operator.weights, self.operator.optimizer)
        object.__setattr__(self, "operator", alone)

    def needed_bytes(self, shard: Shard) -> int:
        """Returns the bytes that building and running the operator takes."""
        return self.operator.memory(shard.pieces, self.batch_size).total


@dataclass(frozen=True)
class TimingOptions:
    """Effort of a measurement: it ends once the median is known to `precision`, or at a cap.

    Args:
        precision: Relative half width of the 95 % interval of forward plus backward. At 0.025,
            iterations leave a deviation of 1.3 %, about as much as between repeat measurements.
        max_iterations: Maximum number of iterations. Noise of 6 % an iteration, the most that was
            seen on a host, needs 40 for the precision above.
        max_seconds: Maximum time for each shard. Long iterations average over noise by themselves,
            so a few suffice.
    """

    precision: float = 0.025
    max_iterations: int = 64
    max_seconds: float = 30.0


class Order(NamedTuple):
    """A shard to be measured once, and how."""

    shard: Shard
    settings: MeasureSettings
    timing: TimingOptions


class DeviceLost(Exception):  # noqa: N818 - a state of affairs; what ran on it is at no fault
    """The device is gone while it measured."""


class ShardFault(Exception):  # noqa: N818 - the shard's, not the caller's
    """An operator failed and left its process in an unreliable state.

    Args:
        number: Number of the operator or order among those measured together.
        reason: Reason in one line.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number = number
        self.reason = reason

    @staticmethod
    def of(number: int, error: Exception) -> "ShardFault":
        """Returns the fault of an operator that raised an error, whatever that is."""
        if isinstance(error, ShardFault):
            return error
        lines = str(error).splitlines() or [""]
        return ShardFault(number, f"{type(error).__name__}: {lines[0][:300]}")


@dataclass(frozen=True)
class ReferenceLevel:
    """Times of one run of the reference operator, forward and backward.

    Only ratios of levels matter, and only of the same timing `method`.
    """

    forward_ms: float
    backward_ms: float
    method: int = TIMING_METHOD

    @property
    def both_ms(self) -> float:
        """Forward plus backward time, to which whole training steps are normalised."""
        return self.forward_ms + self.backward_ms

    def over(self, forward: Number, backward: Number) -> tuple[Number, Number]:
        """Returns the factors that normalise forward and backward costs to this level.

        Neighbours slow the reference's forward pass, whose rows stay in the L2 cache, 1.4 times as
        much (log) as a shard's, and its backward pass 0.8 times as much. Geometric means of both,
        with these weights, are slowed like shards.

        Args:
            forward: Forward time of the reference beside the shard, in ms.
            backward: Its backward time.
        """
        of_forward, of_backward = self.forward_ms / forward, self.backward_ms / backward
        return of_forward**0.5 * of_backward**0.5, of_forward**0.1 * of_backward**0.9

    @staticmethod
    def typical(levels: Sequence["ReferenceLevel"]) -> "ReferenceLevel":
        """Returns the median of levels of one method."""
        return ReferenceLevel(
            median(level.forward_ms for level in levels),
            median(level.backward_ms for level in levels),
            levels[0].method,
        )


def method_of(versions: str) -> int:
    """Returns the timing method, which library versions in measurements end with."""
    number = versions.rpartition("timing ")[2]
    return int(number) if number.isdigit() else TIMING_METHOD


@dataclass(frozen=True)
class Timing:
    """Medians over the iterations of a measurement, or the mean of repeat measurements.

    Args:
        forward_ms: Forward time of the fused operator.
        backward_ms: Backward time.
        spread: Relative half width of the 95 % interval over iterations; the mean over repeats.
        iterations: Number of iterations that count.
        disturbed: Number of these that lost much of their time to other processes.
        foreign_load: Share of the device's time that other processes took.
        operator_seconds: Time that measuring kept the device.
        reference_level: Level that costs are normalised to; None: as read.
        repeats: Number of repeat measurements.
        error: Relative standard error, including differences of repeats.
    """

    forward_ms: float
    backward_ms: float
    spread: Directions
    iterations: int
    disturbed: int
    foreign_load: float
    operator_seconds: float
    reference_level: ReferenceLevel | None = None
    repeats: int = 1
    error: Directions = _UNKNOWN

    @property
    def total_ms(self) -> float:
        """Forward plus backward."""
        return self.forward_ms + self.backward_ms

    @property
    def ms(self) -> Directions:
        """All times."""
        return Directions(self.forward_ms, self.backward_ms, self.total_ms)

    def normalized_to(self, level: ReferenceLevel | None) -> "Timing":
        """Returns the timing at another reference level; unchanged for None or another method."""
        if (
            level is None
            or self.reference_level is None
            or level.method != self.reference_level.method
        ):
            return self
        own = self.reference_level
        forward, backward = level.over(own.forward_ms, own.backward_ms)
        return replace(
            self,
            forward_ms=self.forward_ms * forward,
            backward_ms=self.backward_ms * backward,
            reference_level=level,
        )


@dataclass(frozen=True)
class Measurement:
    """The result for one shard. Without `timing` it was refused or failed, for `reason`."""

    shard: Shard
    settings: MeasureSettings
    hardware: str
    versions: str
    status: Status
    device: str
    node: str
    measured_at: float
    timing: Timing | None = None
    reason: str = ""
    reused: bool = False
    throttled: float = 0.0  # share of the time that a limit stopped or slowed it; not stored
    device_state: str = ""  # clock, power and limits of a GPU at its end, as far as known

    @property
    def ok(self) -> bool:
        """True if there is a cost."""
        return self.timing is not None

    @property
    def total_ms(self) -> float:
        """Forward plus backward; NaN without a cost."""
        return math.nan if self.timing is None else self.timing.total_ms

    def normalized_to(self, level: ReferenceLevel | None) -> "Measurement":
        """Returns the measurement at another reference level."""
        if self.timing is None:
            return self
        return replace(self, timing=self.timing.normalized_to(level))

    def cost(self) -> ShardCost:
        """Returns the cost; MeasurementError if it could not be measured."""
        if self.timing is None:
            raise MeasurementError(
                f"a shard of {len(self.shard)} tables could not be measured on {self.device}: "
                f"{self.reason}"
            )
        half_width = HALF_WIDTH_95 * self.timing.error.both
        return ShardCost(self.timing.forward_ms, self.timing.backward_ms, half_width)


@dataclass(frozen=True)
class ExchangeKey:
    """A collective among ranks, of which rank r has `dims[r]` columns for the whole batch.

    Args:
        dims: Columns of each rank; for other collectives than all-to-alls, all have as many.
        batch_size: Samples of the batch.
        devices: Number of devices.
        nodes: Number of the node of each rank, from 0 in order of ranks; empty if it is the same,
            because what goes over a network must not pass for what stays inside a machine.
        collective: all_to_all: of pooled outputs. reduce_scatter: of partial sums of rows, with an
            all-gather backward. all_reduce: of gradients of copies, backward alone.
    """

    dims: tuple[int, ...]
    batch_size: int
    devices: int
    nodes: tuple[int, ...] = ()
    collective: MeasuredCollective = "all_to_all"

    def __post_init__(self) -> None:
        if self.collective != "all_to_all" and len(set(self.dims)) > 1:
            raise ValueError(f"{self.what} has as many columns on all ranks, got {self.dims}")

    @property
    def what(self) -> str:
        """The collective in words."""
        article = "a" if self.collective == "reduce_scatter" else "an"
        return f"{article} {self.collective.replace('_', '-')}"

    @property
    def ranks(self) -> int:
        """Number of ranks; on fewer `devices` some share one."""
        return len(self.dims)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of each rank that an all-reduce sums up."""
        return FLOAT_BYTES * self.batch_size * self.dims[0]

    @property
    def devices_per_node(self) -> int | None:
        """Ranks of each node, which have consecutive numbers; None on one node, or otherwise."""
        if not self.nodes:
            return None
        size = self.nodes.count(0)
        even = tuple(rank // size for rank in range(self.ranks))
        return size if self.nodes == even and self.ranks % size == 0 else None


@dataclass(frozen=True)
class Exchange:
    """Milliseconds that each rank spent in the forward and in the backward collective."""

    key: ExchangeKey
    hardware: str
    versions: str
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    spread: float
    iterations: int
    measured_at: float


@dataclass(frozen=True)
class ExchangePart:
    """The part of an exchange for one device: its ranks, and where all ranks meet."""

    key: ExchangeKey
    ranks: tuple[int, ...]
    host: str
    port: int
    name: str
    iterations: int


@dataclass(frozen=True)
class RankTimes:
    """Milliseconds of each iteration on one rank."""

    rank: int
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
