"""The objective of a task: which phases of a training step form which synchronized stages.

A step has four phases: forward compute, forward all-to-all, backward all-to-all, backward compute.
Devices wait for each other in an all-to-all. A stage is the time between two such points, and takes
as long as its slowest device, which may differ between stages (`workload.plans.step_price`).

Compute is that of the fused operators alone, as in the papers, or all that a device does in a step
of training (`in_training`), of which the operators are about half.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoshard.workload.errors import FieldError
from autoshard.workload.tasks.links import AnyLink, link_from_json

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


@dataclass(frozen=True)
class Objective:
    """What a plan minimises.

    Args:
        name: `step`: a step of training by a plain loop; each of the four phases is a stage.
            `pipelined`: the same by TorchRec's `TrainPipelineSparseDist`, which distributes the
            lookups of the next batch meanwhile. `operators`: the same phases of the fused operators
            alone. `compute`: forward and backward of the operators, the only stage.
        link: Network between devices; None if unknown, then all-to-alls do not count.
        dense_ms: Milliseconds of the model's dense part, in steps of training.
        copies_over: Network and number of the devices that reduce gradients of copied tables.
            Default: those of the task.
    """

    name: ObjectiveName = "operators"
    link: AnyLink | None = None
    dense_ms: float = 0.0
    copies_over: tuple[AnyLink, int] | None = None

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
    def prices_rows(self) -> bool:
        """Returns whether what blocks of rows take beside operators has a price."""
        return self.in_training or self.counts_exchanges

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
        link = None if self.link is None else self.link.to_json()
        found: dict[str, Any] = {"name": self.name, "link": link, "dense_ms": self.dense_ms}
        if self.copies_over is not None:
            found["copies_over"] = [self.copies_over[0].to_json(), self.copies_over[1]]
        return found

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Objective":
        """Returns the objective that `to_json` wrote."""
        link, over = document["link"], document.get("copies_over")
        return Objective(
            document["name"],
            None if link is None else link_from_json(link),
            document["dense_ms"],
            None if over is None else (link_from_json(over[0]), over[1]),
        )

    def __str__(self) -> str:
        over = f"all-to-alls over {self.link}" if self.counts_exchanges else "without all-to-alls"
        dense = f", {self.dense_ms:g} ms of dense part" if self.dense_ms else ""
        return f"{self.name}, {over}{dense}" if self.name != "compute" else self.name
