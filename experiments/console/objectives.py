"""The options `--objective`, `--link`, `--inter-node-link`, `--devices-per-node`, `--dense-ms`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from autoshard.experiments.console import cli
from autoshard.workload import Link, Network, Objective, UserError, documents
from autoshard.workload.tasks.links import AnyLink
from autoshard.workload.tasks.objective import ObjectiveName

if TYPE_CHECKING:  # heavy, and options are read before
    from autoshard.cost_model import CostModel


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """Objective of commands that make plans or train for them; their options inherit it."""

    objective: ObjectiveName | None = None
    """What a plan minimises (default: step). step: a training step of a plain loop: all that each
    device does in the forward pass, as long as the slowest takes, the same of the backward pass,
    and both all-to-alls. pipelined: the same with TorchRec's TrainPipelineSparseDist. operators:
    forward, backward and all-to-alls of the embedding operators alone, as in the papers. compute:
    the slowest forward and backward of operators together, without all-to-alls."""
    link: str | None = None
    """Link of all-to-alls: bytes or bits per second of a device in one direction and latency, and,
    if they are other ones, those of all-reduces and reduce-scatters, such as 25GB/s,30us or
    25GB/s,30us,20GB/s,50us. Default: the link that the cost model learned for this number of
    devices; if it has none, and in training, all-to-alls are not priced."""
    inter_node_link: str | None = None
    """Link between nodes, as --link, which then is the link inside a node: a device's share where
    devices of a node share a network card."""
    devices_per_node: int | None = None
    """Devices of each node: devices 0 to N - 1 are the first node, and so on. Default, with a GPU
    as --hardware: those of its data sheet."""
    dense_ms: float | None = None
    """Milliseconds that the dense part of your model adds to a step. Plans do not depend on it, but
    predicted steps and their ratios do. Default: 0."""

    @property
    def names_objective(self) -> bool:
        """Whether one of the options is given."""
        given = (self.objective, self.link, self.inter_node_link, self.devices_per_node)
        return any(option is not None for option in (*given, self.dense_ms))

    def for_devices(self, number: int) -> Self:
        """Returns the options for a number of devices; a single one has no link."""
        if number > 1:
            return self
        return replace(self, link=None, inter_node_link=None, devices_per_node=None)

    def priced(
        self, model: "CostModel", devices: int | None, learn_link: bool = True
    ) -> "CostModel":
        """Returns the model whose costs the objective counts; says if it has none of training.

        Args:
            model: Cost model.
            devices: Number of devices that exchange inputs over the link. None where tasks differ
                in devices or links: then inputs are not counted.
            learn_link: As for `build_objective`.
        """
        return self.priced_kinds([model], devices, learn_link)[0]

    def priced_kinds(
        self, models: "Sequence[CostModel]", devices: int | None, learn_link: bool = True
    ) -> "list[CostModel]":
        """Returns the models of several kinds of devices as `priced` does; says each note once."""
        notes: list[str] = []
        found: list[CostModel] = []
        for model in models:
            wanted = Objective(self.objective or "step")
            if wanted.in_training and model.overhead is None:
                notes.append(
                    "the cost model does not know what training takes beside the operators: plans "
                    "are priced by --objective operators"
                    + (", and --dense-ms does not count" if self.dense_ms else "")
                )
                wanted = Objective("operators")
            if wanted.name == "pipelined" and self.dense_ms is None:
                notes.append(
                    "--dense-ms is not given: the dense part is taken to last at least as long as "
                    "the exchange of inputs, which it hides in a pipelined step"
                )
            priced = model.for_objective(wanted)
            if devices is not None:
                objective = self.build_objective(devices, priced, learn_link)
                if (uneven := self.nodes_note(priced, devices, objective.link)) is not None:
                    notes.append(uneven)
                priced = priced.for_objective(objective, devices)
            found.append(priced)
        for note in dict.fromkeys(notes):
            cli.note(note)
        return found

    def nodes_note(self, model: "CostModel", devices: int, link: AnyLink | None) -> str | None:
        """Returns which link is assumed if devices do not fill the nodes of their data sheet."""
        sheet = model.data_sheet
        if self.link or link is None or sheet is None or not sheet.uneven(devices):
            return None
        return (
            f"{devices} devices do not fill nodes of {sheet.gpus_per_node}, as their data sheet "
            f"has them: all exchanges are priced by the network between nodes, {link}; if your "
            "nodes are full, give --link, --inter-node-link and --devices-per-node"
        )

    def build_objective(
        self, devices: int, model: "CostModel | None" = None, learn_link: bool = True
    ) -> Objective:
        """Returns the objective for a number of devices; UserError if the options are not valid.

        Args:
            devices: Number of devices.
            model: What `priced` returned; by default the objective is as the options name it.
            learn_link: Whether the model's link counts if no other is given.
        """
        name: ObjectiveName = self.objective or "step"
        if self.dense_ms is not None:
            if not Objective(name).in_training:
                raise UserError(
                    f"--dense-ms is a part of training, which --objective {name} does not count: "
                    "leave it out, or take --objective step"
                )
            if not 0 <= self.dense_ms < float("inf"):
                raise UserError(f"--dense-ms must be at least 0, got {self.dense_ms:g}")
        if self.link is not None:
            if name == "compute":
                raise UserError(
                    f"--link {self.link} is not used by --objective compute, which has no "
                    "all-to-alls: leave one of them out"
                )
            if devices == 1:
                raise UserError("--link connects devices, and there is one: leave it out")
        found = Objective(name, self._network(devices))
        if model is None:
            return replace(found, dense_ms=self.dense_ms or 0.0)
        if found.in_training and not model.in_training:
            found = replace(found, name="operators")
        if found.in_training:
            found = replace(found, dense_ms=self.dense_ms or 0.0)
        if self.link is None and learn_link and name != "compute":
            found = replace(found, link=model.links.get(devices))
        return found

    def _network(self, devices: int) -> AnyLink | None:
        """Returns the network that the options describe; UserError if some are missing."""
        link = None if self.link is None else Link.parse(self.link)
        nodes = (self.inter_node_link, self.devices_per_node)
        if nodes == (None, None):
            return link
        if link is None or self.inter_node_link is None or self.devices_per_node is None:
            raise UserError(
                "--inter-node-link and --devices-per-node need each other, and --link for the "
                "inside of a node: give all three"
            )
        if self.devices_per_node < 1:
            raise UserError(f"--devices-per-node must be at least 1, got {self.devices_per_node}")
        network = Network(link, Link.parse(self.inter_node_link), self.devices_per_node)
        with documents.naming(f"--devices-per-node {self.devices_per_node}"):
            network.nodes(devices)  # raises where they are not full
        return network
