"""What was measured: one shard, on one kind of hardware, by one version of the libraries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, NamedTuple

from autoshard.workload import OperatorOptions, Shard, ShardCost, UserError

Status = Literal["ok", "refused", "failed"]


class MeasurementError(UserError):
    """A cost was asked for that could not be measured."""


# How costs are taken: raised whenever that changes what they read.
TIMING_METHOD = 3
HALF_WIDTH_95 = 1.96  # of a 95 % interval, in standard errors


@dataclass(frozen=True)
class MeasureSettings:
    """What a cost depends on besides the shard and the device: part of the store's key."""

    batch_size: int
    operator: OperatorOptions = field(default_factory=OperatorOptions)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch size must be at least 1, got {self.batch_size}")

    def needed_bytes(self, shard: Shard) -> int:
        """Bytes that building and running the operator takes: what must fit before it is tried."""
        return self.operator.memory(shard.pieces, self.batch_size).total


@dataclass(frozen=True)
class TimingOptions:
    """How hard to try in one visit: until the median is known to `precision`, or a cap is reached.

    Args:
        precision: relative half width of the 95 % interval of forward plus backward. At 0.025
            iterations leave a deviation of 1.3 %, about as much as what visits differ by besides.
        max_iterations: at most so many. Noise of 6 % an iteration, as on the noisiest host that
            was seen, needs 40 for the precision above.
        max_seconds: at most so long for each shard. What takes seconds an iteration is known from
            a few: noise of moments is averaged within each.
    """

    precision: float = 0.025
    max_iterations: int = 64
    max_seconds: float = 30.0


class Order(NamedTuple):
    """A shard to be measured once, and how."""

    shard: Shard
    settings: MeasureSettings
    timing: TimingOptions


class ShardFault(Exception):  # noqa: N818 - the shard's, not the caller's
    """An operator failed, and left its process in a state that cannot be trusted.

    Args:
        number: of the order.
        reason: in one line.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number = number
        self.reason = reason


@dataclass(frozen=True)
class ReferenceLevel:
    """What one run of the reference takes, forward and backward. Only ratios of levels matter, and
    only of the same reference: `method` is the way of timing that it belongs to.
    """

    forward_ms: float
    backward_ms: float
    method: int = TIMING_METHOD

    @staticmethod
    def typical(levels: Sequence["ReferenceLevel"]) -> "ReferenceLevel":
        """The median of levels of one method."""
        return ReferenceLevel(
            median(level.forward_ms for level in levels),
            median(level.backward_ms for level in levels),
            levels[0].method,
        )


def method_of(versions: str) -> int:
    """The way of timing that library versions, as measurements name them, end with."""
    number = versions.rpartition("timing ")[2]
    return int(number) if number.isdigit() else TIMING_METHOD


@dataclass(frozen=True)
class Timing:
    """Medians over the iterations of a visit, or the mean of several visits.

    Args:
        forward_ms: of the fused operator.
        backward_ms: the same.
        spread: relative half width of the 95 % interval of forward plus backward, as the
            iterations of a visit (in the mean) tell it.
        iterations: that count.
        disturbed: those of them that lost much of their time to others.
        foreign_load: share of the device's time that others took meanwhile.
        operator_seconds: that timed work kept the device.
        quiet: costs are told as on a machine on which the reference takes so long; None: as read.
        visits: that the cost is the mean of.
        error: relative standard error of forward plus backward, with what visits differ by.
    """

    forward_ms: float
    backward_ms: float
    spread: float
    iterations: int
    disturbed: int
    foreign_load: float
    operator_seconds: float
    reference_level: ReferenceLevel | None = None
    repeats: int = 1
    error: float = math.nan

    @property
    def total_ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms

    def normalized_to(self, level: ReferenceLevel | None) -> "Timing":
        """The same, told as on a machine on which the reference takes so long.

        A level of another reference says the same, a quiet machine, and leaves it as it is.
        """
        if (
            level is None
            or self.reference_level is None
            or level.method != self.reference_level.method
        ):
            return self
        return replace(
            self,
            forward_ms=self.forward_ms * (level.forward_ms / self.reference_level.forward_ms),
            backward_ms=self.backward_ms * (level.backward_ms / self.reference_level.backward_ms),
            reference_level=level,
        )


@dataclass(frozen=True)
class Measurement:
    """The answer for one shard. Without `timing` it was refused or failed, for `reason`."""

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
    throttled: float = 0.0  # share of the visit's time that a CPU quota stopped it; not kept

    @property
    def ok(self) -> bool:
        """True if there is a cost."""
        return self.timing is not None

    @property
    def total_ms(self) -> float:
        """Forward and backward together; NaN without a cost."""
        return math.nan if self.timing is None else self.timing.total_ms

    def normalized_to(self, level: ReferenceLevel | None) -> "Measurement":
        """The same, told as on a machine on which the reference takes so long."""
        if self.timing is None:
            return self
        return replace(self, timing=self.timing.normalized_to(level))

    def cost(self) -> ShardCost:
        """The cost; MeasurementError if it could not be measured."""
        if self.timing is None:
            raise MeasurementError(
                f"a shard of {len(self.shard)} tables could not be measured on {self.device}: "
                f"{self.reason}"
            )
        half_width = HALF_WIDTH_95 * self.timing.error
        return ShardCost(self.timing.forward_ms, self.timing.backward_ms, half_width)


@dataclass(frozen=True)
class ExchangeKey:
    """An all-to-all: `dims[r]` columns are computed on rank r for the whole batch."""

    dims: tuple[int, ...]
    batch_size: int
    devices: int

    @property
    def ranks(self) -> int:
        """Ranks that take part; on fewer `devices` some share one."""
        return len(self.dims)


@dataclass(frozen=True)
class Exchange:
    """Milliseconds that each rank spent in the forward and in the backward all-to-all."""

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
    """What one device does of an exchange: the ranks it plays and where all ranks meet."""

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
