"""What plans are to have little of, on the command line: `--objective step --link 25GB/s,30us`."""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.workload import Link, Objective, UserError
from autoshard.workload.objective import ObjectiveName

_DEFAULT: ObjectiveName = "step"


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """Two options of commands that make or train for plans: their configs inherit them."""

    objective: ObjectiveName | None = None
    """What a step is, by default step. step: forward, backward and both all-to-alls, each as long
    as its slowest device takes; pipelined: the slowest forward and backward together, as where
    batches overlap, and the all-to-alls; compute: the slowest forward and backward together."""
    link: str | None = None
    """What all-to-alls go over: bytes or bits a second of a device, one way, and the latency, such
    as 25GB/s,30us. By default what the cost model learned of so many devices; else they do not
    count."""

    @property
    def names_objective(self) -> bool:
        """Whether any of the two is given."""
        return self.objective is not None or self.link is not None

    def check_objective(self, devices: int) -> None:
        """UserError unless both make sense for so many devices."""
        self.wanted(devices, lambda _devices: None)

    def wanted(self, devices: int, learned: Callable[[int], Link | None]) -> Objective:
        """The objective for so many devices; UserError if the options make no sense.

        `learned` tells the link of so many devices as far as a cost model knows it.
        """
        name = self.objective or _DEFAULT
        if self.link is None:
            return Objective(name, None if name == "compute" else learned(devices))
        if name == "compute":
            raise UserError(
                "--link is what all-to-alls go over, and with --objective compute they do not "
                "count: leave one of them out"
            )
        if devices == 1:
            raise UserError("--link connects devices, and there is one: leave it out")
        return Objective(name, Link.parse(self.link))
