"""The options `--objective` and `--link`."""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.workload import Link, Objective, UserError
from autoshard.workload.objective import ObjectiveName


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """Objective of commands that make plans or train for them; their options inherit it."""

    objective: ObjectiveName | None = None
    """Stages of a step (default: step). step: forward, backward and both all-to-alls, each
    as long as its slowest device takes. pipelined: the slowest forward and backward together, as
    where batches overlap, and both all-to-alls. compute: the slowest forward and backward together,
    without all-to-alls."""
    link: str | None = None
    """Link of all-to-alls: bytes or bits per second of a device in one direction, and latency, such
    as 25GB/s,30us. Default: the link that the cost model learned for this number of devices; if it
    has none, and in training, all-to-alls are not priced."""

    @property
    def names_objective(self) -> bool:
        """Whether one of the options is given."""
        return self.objective is not None or self.link is not None

    def build_objective(
        self, devices: int, learned: Callable[[int], Link | None] = lambda _devices: None
    ) -> Objective:
        """Returns the objective for a number of devices; UserError if the options are not valid.

        Args:
            devices: Number of devices.
            learned: Returns the cost model's link for a number of devices, if it has one.
        """
        name: ObjectiveName = self.objective or "step"
        if self.link is None:
            return Objective(name, None if name == "compute" else learned(devices))
        if name == "compute":
            raise UserError(
                f"--link {self.link} is not used by --objective compute, which has no all-to-alls: "
                "leave one of them out"
            )
        if devices == 1:
            raise UserError("--link connects devices, and there is one: leave it out")
        return Objective(name, Link.parse(self.link))
