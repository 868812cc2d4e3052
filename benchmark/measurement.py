"""What was measured: one shard, on one kind of hardware, by one version of the libraries."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from workload import OperatorOptions, Shard, ShardCost, UserError

Status = Literal["ok", "refused", "failed"]


class MeasurementError(UserError):
    """A cost was asked for that could not be measured."""


@dataclass(frozen=True)
class MeasureSettings:
    """What a cost depends on besides the shard and the device: part of the store's key."""

    batch_size: int
    operator: OperatorOptions = field(default_factory=OperatorOptions)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch size must be at least 1, got {self.batch_size}")


@dataclass(frozen=True)
class TimingOptions:
    """How hard to try: until the median is known to `precision`, or a cap is reached."""

    precision: float = 0.02
    max_iterations: int = 64
    max_seconds: float = 10.0


@dataclass(frozen=True)
class Timing:
    """Medians over undisturbed iterations.

    `spread` is the relative half width of the 95 % interval of forward plus backward;
    `foreign_load` the share of the device's time that other processes took meanwhile. Costs are
    told as on a machine on which the reference operator takes `quiet_ms`; None: as they were read.
    """

    forward_ms: float
    backward_ms: float
    spread: float
    iterations: int
    disturbed: int
    foreign_load: float
    operator_seconds: float
    quiet_ms: float | None = None
    visits: int = 1
    error: float = math.nan

    @property
    def total_ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms

    def told_at(self, quiet_ms: float | None) -> "Timing":
        """The same, told as on a machine on which the reference takes so long."""
        if quiet_ms is None or self.quiet_ms is None or quiet_ms == self.quiet_ms:
            return self
        factor = quiet_ms / self.quiet_ms
        return replace(
            self,
            forward_ms=self.forward_ms * factor,
            backward_ms=self.backward_ms * factor,
            quiet_ms=quiet_ms,
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

    @property
    def ok(self) -> bool:
        """True if there is a cost."""
        return self.timing is not None

    @property
    def total_ms(self) -> float:
        """Forward and backward together; NaN without a cost."""
        return math.nan if self.timing is None else self.timing.total_ms

    def told_at(self, quiet_ms: float | None) -> "Measurement":
        """The same, told as on a machine on which the reference takes so long."""
        if self.timing is None:
            return self
        return replace(self, timing=self.timing.told_at(quiet_ms))

    def cost(self) -> ShardCost:
        """The cost; MeasurementError if it could not be measured."""
        if self.timing is None:
            raise MeasurementError(
                f"a shard of {len(self.shard)} tables could not be measured on {self.device}: "
                f"{self.reason}"
            )
        return ShardCost(self.timing.forward_ms, self.timing.backward_ms, self.timing.spread)


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
