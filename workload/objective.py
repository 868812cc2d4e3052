"""The objective of a task: which phases of a training step form which synchronized stages.

A step has four phases: forward compute, forward all-to-all, backward all-to-all, backward compute.
Devices wait for each other in an all-to-all. A stage is the time between two such points, and takes
as long as its slowest device, which may differ between stages (`workload.step_price`).

Compute is that of the fused operators alone, as in the papers, or all that a device does in a step
of training (`in_training`), of which the operators are about half.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autoshard.workload.errors import FieldError, UserError

ObjectiveName = Literal["step", "pipelined", "operators", "compute"]

PHASES = ("forward", "backward", "forward all-to-all", "backward all-to-all")
_FORWARD, _BACKWARD, _FORWARD_EXCHANGE, _BACKWARD_EXCHANGE = range(len(PHASES))
_EXCHANGES = (_FORWARD_EXCHANGE, _BACKWARD_EXCHANGE)
# Phases of each stage: a device goes through them without waiting for the others.
_EACH_PHASE = ((_FORWARD,), (_BACKWARD,), (_FORWARD_EXCHANGE,), (_BACKWARD_EXCHANGE,))
_STAGES: Mapping[ObjectiveName, tuple[tuple[int, ...], ...]] = {
    "step": _EACH_PHASE,
    "pipelined": _EACH_PHASE,
    "operators": _EACH_PHASE,
    "compute": ((_FORWARD, _BACKWARD),),
}
_TRAINING: frozenset[ObjectiveName] = frozenset({"step", "pipelined"})
_SPEED = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(B|bit)/s\s*")
_LATENCY = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """The network between devices; each device sends and receives at this speed.

    Args:
        bytes_s: Bandwidth of each device, in bytes per second and direction.
        latency_s: Start-up time of an all-to-all, in seconds.
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
        """Parses `25GB/s,30us`: bytes or bits per second, and optionally the latency."""
        speed, _, latency = text.partition(",")
        fast, late = _SPEED.fullmatch(speed), _LATENCY.fullmatch(latency or "0s")
        if fast is None or late is None:
            raise UserError(
                "a link is given by bandwidth and latency, such as 25GB/s,30us or 100Gbit/s, "
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
        name: `step`: a step of training by a plain loop; each of the four phases is a stage.
            `pipelined`: the same by TorchRec's `TrainPipelineSparseDist`, which distributes the
            lookups of the next batch meanwhile. `operators`: the same phases of the fused operators
            alone. `compute`: forward and backward of the operators, the only stage.
        link: Network of all-to-alls; None if unknown, then all-to-alls do not count.
        dense_ms: Milliseconds of the model's dense part, in steps of training.
    """

    name: ObjectiveName = "operators"
    link: Link | None = None
    dense_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in _STAGES:
            raise FieldError("objective", f"must be one of {', '.join(_STAGES)}, got {self.name!r}")
        if not 0 <= self.dense_ms < float("inf"):
            raise FieldError("dense_ms", f"must be at least 0, got {self.dense_ms}")

    @property
    def in_training(self) -> bool:
        """Returns whether all that a device does in training counts, not operators alone."""
        return self.name in _TRAINING

    @property
    def counts_exchanges(self) -> bool:
        """Returns whether all-to-alls count."""
        return self.link is not None and self.name != "compute"

    def exchanges(self, ranks: int) -> int:
        """Returns the number of all-to-alls that count, with so many devices."""
        return len(_EXCHANGES) if self.counts_exchanges and ranks > 1 else 0

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Returns the phases of each stage that counts, as indices into PHASES."""
        known = [s for s in _STAGES[self.name] if self.counts_exchanges or s[0] not in _EXCHANGES]
        return tuple(known)

    @property
    def computes_apart(self) -> bool:
        """Returns whether forward and backward compute are separate stages."""
        return (_FORWARD,) in self.stages

    def to_json(self) -> dict[str, Any]:
        """Returns the objective as a JSON object."""
        link = None if self.link is None else asdict(self.link)
        return {"name": self.name, "link": link, "dense_ms": self.dense_ms}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Objective":
        """Returns the objective that `to_json` wrote; what earlier versions wrote is of operators.

        Their `step` had its meaning of today's `operators`, and no `dense_ms`.
        """
        link, name = document["link"], document["name"]
        if "dense_ms" not in document and name in _TRAINING:
            name = "operators"
        return Objective(
            name, None if link is None else Link(**link), document.get("dense_ms", 0.0)
        )

    def __str__(self) -> str:
        over = f"all-to-alls over {self.link}" if self.counts_exchanges else "without all-to-alls"
        dense = f", {self.dense_ms:g} ms of dense part" if self.dense_ms else ""
        return f"{self.name}, {over}{dense}" if self.name != "compute" else self.name
