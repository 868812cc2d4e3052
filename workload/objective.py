"""The objective of a task: which phases of a training step count, and where devices wait.

A step has four phases: forward compute, forward all-to-all, backward all-to-all, backward compute.
In an all-to-all devices wait for each other. A stage is what lies between two such points; it takes
as long as its slowest device, which need not be the same in all stages (`workload.step_price`).
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autoshard.workload.errors import FieldError, UserError

ObjectiveName = Literal["step", "pipelined", "compute"]

PHASES = ("forward", "backward", "forward all-to-all", "backward all-to-all")
_FORWARD, _BACKWARD, _FORWARD_EXCHANGE, _BACKWARD_EXCHANGE = range(len(PHASES))
_EXCHANGES = (_FORWARD_EXCHANGE, _BACKWARD_EXCHANGE)
# Phases of each stage: a device goes through them without waiting for the others.
_STAGES: Mapping[ObjectiveName, tuple[tuple[int, ...], ...]] = {
    "step": ((_FORWARD,), (_BACKWARD,), (_FORWARD_EXCHANGE,), (_BACKWARD_EXCHANGE,)),
    "pipelined": ((_FORWARD, _BACKWARD), (_FORWARD_EXCHANGE,), (_BACKWARD_EXCHANGE,)),
    "compute": ((_FORWARD, _BACKWARD),),
}
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

    def __str__(self) -> str:
        return f"{self.bytes_s / 1e9:g} GB/s, {1e6 * self.latency_s:g} us"


@dataclass(frozen=True)
class Objective:
    """What a plan minimises.

    Args:
        name: `step`: all four phases one after the other, each as long as its slowest device;
            `pipelined`: the slowest forward and backward together, as where batches overlap, and
            the all-to-alls; `compute`: the slowest forward and backward together.
        link: What all-to-alls go over; None where it is unknown: they do not count.
    """

    name: ObjectiveName = "step"
    link: Link | None = None

    def __post_init__(self) -> None:
        if self.name not in _STAGES:
            raise FieldError("objective", f"must be one of {', '.join(_STAGES)}, got {self.name!r}")

    @property
    def counts_exchanges(self) -> bool:
        """Whether all-to-alls are part of it."""
        return self.link is not None and self.name != "compute"

    def exchanges(self, ranks: int) -> int:
        """How many all-to-alls of so many devices are part of it."""
        return len(_EXCHANGES) if self.counts_exchanges and ranks > 1 else 0

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The phases of each stage that counts, by their numbers in PHASES."""
        known = [s for s in _STAGES[self.name] if self.counts_exchanges or s[0] not in _EXCHANGES]
        return tuple(known)

    @property
    def computes_apart(self) -> bool:
        """Whether forward and backward are two stages, each with a slowest device of its own."""
        return (_FORWARD,) in self.stages

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
