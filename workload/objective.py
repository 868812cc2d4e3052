"""What plans are judged by: the waits of a step, each as long as its slowest device.

A step has four phases: forward compute, forward all-to-all, backward all-to-all, backward compute.
In an all-to-all devices wait for each other, so a plan costs the sum over the waits of what the
slowest device spends in each, and that need not be the same device in all of them.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from autoshard.workload.errors import FieldError, UserError

if TYPE_CHECKING:  # heavy, and not needed here
    from torch import Tensor

Floats = npt.NDArray[np.float64]
Array = TypeVar("Array", Floats, "Tensor")
ObjectiveName = Literal["step", "pipelined", "compute"]

PHASES = ("forward", "backward", "forward all-to-all", "backward all-to-all")
_FORWARD, _BACKWARD, _FORWARD_EXCHANGE, _BACKWARD_EXCHANGE = range(len(PHASES))
_EXCHANGES = (_FORWARD_EXCHANGE, _BACKWARD_EXCHANGE)
# Which phases a device goes through without waiting for the others.
_WAITS: Mapping[ObjectiveName, tuple[tuple[int, ...], ...]] = {
    "step": ((_FORWARD,), (_BACKWARD,), (_FORWARD_EXCHANGE,), (_BACKWARD_EXCHANGE,)),
    "pipelined": ((_FORWARD, _BACKWARD), (_FORWARD_EXCHANGE,), (_BACKWARD_EXCHANGE,)),
    "compute": ((_FORWARD, _BACKWARD),),
}
_ELEMENT_BYTES = 4  # of what a table hands out, in fp32 whatever its weights are in
_MS = 1e3
_SPEED = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(B|bit)/s\s*")
_LATENCY = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """What connects the devices: each sends to all others, and receives from them, at this speed.

    Args:
        bytes_s: bytes a second of each device, one way.
        latency_s: seconds that an all-to-all takes before anything flows.
    """

    bytes_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_s < float("inf"):
            raise FieldError("bytes_s", f"must be more than 0, got {self.bytes_s}")
        if not 0 <= self.latency_s < float("inf"):
            raise FieldError("latency_s", f"must be at least 0, got {self.latency_s}")

    @staticmethod
    def parse(text: str) -> "Link":
        """Of `25GB/s,30us`: bytes or bits a second, and the latency, which may be left out."""
        speed, _, latency = text.partition(",")
        fast, late = _SPEED.fullmatch(speed), _LATENCY.fullmatch(latency or "0s")
        if fast is None or late is None:
            raise UserError(
                f"a link is told by its speed and latency, such as 25GB/s,30us or 100Gbit/s, "
                f"got {text!r}"
            )
        number, prefix, unit = fast.groups()
        bytes_s = float(number) * _PREFIXES[prefix] / (8 if unit == "bit" else 1)
        return Link(bytes_s, float(late[1]) * _SECONDS[late[2]])

    def slope_ms(self, batch_size: int, ranks: int) -> float:
        """Milliseconds of each column that one device sends to another, or receives from it."""
        return _MS * _ELEMENT_BYTES * batch_size / ranks / self.bytes_s

    @property
    def latency_ms(self) -> float:
        """Milliseconds before anything flows."""
        return _MS * self.latency_s

    def __str__(self) -> str:
        return f"{self.bytes_s / 1e9:g} GB/s, {1e6 * self.latency_s:g} us"


def exchange_ms(
    columns: Array,
    all_columns: Array | float,
    ranks: Array | float,
    slope_ms: Array | float,
    latency_ms: Array | float,
) -> Array:
    """What a device spends in one all-to-all, forward or backward alike.

    It sends its columns of the others' samples and receives the others' columns of its own; both
    ways at once, so the longer counts.

    Args:
        columns: that the device computes.
        all_columns: that all devices compute.
        ranks: devices.
        slope_ms: as `Link.slope_ms`.
        latency_ms: as `Link.latency_ms`.
    """
    sent, received = columns * (ranks - 1), all_columns - columns
    longer = (sent + received + abs(sent - received)) / 2  # for numpy and torch alike
    return latency_ms + slope_ms * longer


@dataclass(frozen=True)
class Objective:
    """What a plan is to have little of.

    Args:
        name: `step`: all four phases one after the other, each as long as its slowest device;
            `pipelined`: the slowest forward and backward together, as where batches overlap, and
            the all-to-alls; `compute`: the slowest forward and backward together.
        link: what all-to-alls go over; None: unknown, they do not count.
    """

    name: ObjectiveName = "step"
    link: Link | None = None

    def __post_init__(self) -> None:
        if self.name not in _WAITS:
            raise FieldError("objective", f"must be one of {', '.join(_WAITS)}, got {self.name!r}")

    @property
    def counts_exchanges(self) -> bool:
        """Whether all-to-alls are part of it."""
        return self.link is not None and self.name != "compute"

    def exchanges(self, ranks: int) -> int:
        """How many all-to-alls of so many devices are part of it."""
        return len(_EXCHANGES) if self.counts_exchanges and ranks > 1 else 0

    @property
    def waits(self) -> tuple[tuple[int, ...], ...]:
        """Phases, by their numbers in PHASES, that a device goes through before it waits."""
        known = [w for w in _WAITS[self.name] if self.counts_exchanges or w[0] not in _EXCHANGES]
        return tuple(known)

    @property
    def computes_apart(self) -> bool:
        """Whether forward and backward may be held up by different devices."""
        return (_FORWARD,) in self.waits

    def exchange_ms(self, columns: Floats, batch_size: int) -> Floats:
        """What each device spends in one all-to-all, forward or backward: of [..., devices] that
        compute so many columns. Nothing where it is not counted.
        """
        ranks = columns.shape[-1]
        if self.link is None or not self.exchanges(ranks):
            return np.zeros_like(columns, dtype=float)
        slope, latency = self.link.slope_ms(batch_size, ranks), self.link.latency_ms
        columns = np.asarray(columns, dtype=float)
        return exchange_ms(columns, columns.sum(-1, keepdims=True), ranks, slope, latency)

    def column_ms(self, batch_size: int, ranks: int) -> float:
        """Milliseconds that a device sends each of its columns for, in one all-to-all.

        An all-to-all takes as long, beside its latency, as the device with the most columns sends:
        nobody receives for longer, for all others together have no more than each as many.
        """
        if self.link is None or not self.exchanges(ranks):
            return 0.0
        return (ranks - 1) * self.link.slope_ms(batch_size, ranks)

    def phases_ms(self, forward: Floats, backward: Floats, exchange: Floats) -> Floats:
        """All phases of devices, [..., PHASES], where either all-to-all takes `exchange`."""
        return np.stack(np.broadcast_arrays(forward, backward, exchange, exchange), axis=-1)

    def waits_ms(self, phases: Floats) -> Floats:
        """What each device spends before each wait [..., waits], of its phases [..., PHASES]."""
        return np.stack([phases[..., list(wait)].sum(-1) for wait in self.waits], axis=-1)

    def plan_ms(self, phases: Floats) -> Floats:
        """What a plan costs [...] whose devices spend [..., devices, PHASES]."""
        return np.asarray(self.waits_ms(phases).max(-2).sum(-1))

    def to_json(self) -> dict[str, Any]:
        """For a JSON document."""
        return {"name": self.name, "link": None if self.link is None else asdict(self.link)}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Objective":
        """What `to_json` wrote."""
        link = document["link"]
        return Objective(document["name"], None if link is None else Link(**link))

    def __str__(self) -> str:
        over = f"all-to-alls over {self.link}" if self.counts_exchanges else "without all-to-alls"
        return f"{self.name}, {over}" if self.name != "compute" else self.name
