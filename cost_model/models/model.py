"""`CostModel`: a compute model, links, and their provenance."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from autoshard.benchmark import MachineProbe, ReferenceLevel
from autoshard.cost_model.models.machines import Machines
from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.step.overhead import StepOverhead
from autoshard.workload import Objective, OperatorOptions, UserError
from autoshard.workload.data_sheets import DataSheet
from autoshard.workload.tasks.links import AnyLink

if TYPE_CHECKING:
    from autoshard.cost_model.networks.dataset import CostDataset

_OTHER_OPERATOR = 0.1  # relative deviation of costs of other weights, or with another optimizer


@dataclass(frozen=True)
class Provenance:
    """Training data of a model, and the reference level of its costs.

    `figures` are metrics on unseen tables.
    """

    hardware: str
    versions: str
    operator: OperatorOptions
    batch_sizes: tuple[int, ...]
    num_shards: int
    reference_level: ReferenceLevel | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(data: "CostDataset", figures: Mapping[str, float] | None = None) -> "Provenance":
        """Returns the provenance of a model that is trained on this dataset."""
        return Provenance(
            hardware=data.hardware,
            versions=data.versions,
            operator=data.operator,
            batch_sizes=tuple(sorted(set(data.batch_sizes))),
            num_shards=len(data),
            reference_level=data.reference_level,
            figures=figures or {},
        )


@dataclass(frozen=True)
class CostModel:
    """A cost model for one kind of hardware.

    Args:
        compute: Prices shards.
        provenance: What the model was trained on.
        links: Links fitted to measured all-to-alls by number of ranks; empty if none were measured.
        machines: Networks of several machines, from which those of another one are made.
        probe: Probe of the machine that `compute` is for, if that is all that is known of it.
        overhead: What training takes beside operators; None if unknown.
        overheads: The same on single machines, by hardware, where more is known of it.
        in_training: Whether prices are those of training, not of operators alone.
        input_link: Network by which training receives its inputs, and number of ranks; None if it
            does not count.
        data_sheet: Data sheet of the GPU that `compute` is for, if that is all that is known of it.
    """

    compute: ComputeCostModel
    provenance: Provenance
    links: Mapping[int, AnyLink] = field(default_factory=dict)
    machines: Machines | None = None
    probe: MachineProbe | None = None
    overhead: StepOverhead | None = None
    in_training: bool = False
    data_sheet: DataSheet | None = None
    overheads: Mapping[str, StepOverhead] = field(default_factory=dict)
    input_link: tuple[AnyLink, int] | None = None

    @property
    def kind(self) -> str:
        """Kind of the devices: cpu or cuda."""
        return self.provenance.hardware.partition(":")[0]

    @cached_property
    def counted_overhead(self) -> StepOverhead | None:
        """What training takes beside operators on this machine; None if it does not count."""
        known = self.overheads.get(self.provenance.hardware, self.overhead)
        if known is None or not self.in_training:
            return None
        return known if self.input_link is None else known.with_inputs_over(*self.input_link)

    def overheads_at(
        self, hardware: str, level: ReferenceLevel | None
    ) -> Mapping[str, StepOverhead]:
        """Returns `overheads` with a machine's own, by its reference level if it was not measured.

        Args:
            hardware: Full name of the machine's hardware.
            level: Times of the reference operator there; None if unknown.
        """
        if self.overhead is None or hardware in self.overheads:
            return self.overheads
        return {**self.overheads, hardware: self.overhead.at_level(level)}

    def for_objective(self, objective: Objective, ranks: int = 1) -> "CostModel":
        """Returns the model whose costs are those that an objective counts.

        Args:
            objective: What counts. A pipeline receives inputs while it computes, so that their time
                does not count.
            ranks: Number of devices that exchange inputs; with one, none are exchanged.

        Raises:
            UserError: Steps of training count, and the model does not know what they take.
        """
        if objective.in_training and self.overhead is None:
            raise UserError(
                f"the cost model does not know what training takes beside operators, which "
                f"objective {objective.name} counts: plan for operators"
            )
        link = objective.link if objective.name == "step" else None
        over = None if link is None or ranks == 1 else (link, ranks)
        return replace(self, in_training=objective.in_training, input_link=over)

    def on_hardware(self, hardware: str) -> "CostModel | None":
        """Returns the model for hardware that it was trained on; None for any other."""
        if hardware == self.provenance.hardware:
            return self
        number = None if self.machines is None else self.machines.find(hardware)
        if self.machines is None or number is None:
            return None
        level = self.machines.trained_on[number].reference_level
        known = replace(self.provenance, hardware=hardware, reference_level=level)
        return replace(self, compute=self.machines.of(number), provenance=known)

    def for_operator(self, operator: OperatorOptions) -> "CostModel":
        """Returns the model for an operator that it was not trained on, with less certain costs.

        Costs of tables are taken to be alike: plans depend on how they compare.
        """
        if operator == self.provenance.operator:
            return self
        known, prior = self.compute.uncertainty, self.compute.prior
        compute = replace(
            self.compute,
            uncertainty=replace(known, noise=math.hypot(known.noise, _OTHER_OPERATOR)),
            prior=replace(prior, own=math.hypot(prior.own, _OTHER_OPERATOR)),
        )
        return replace(
            self, compute=compute, provenance=replace(self.provenance, operator=operator)
        )

    @property
    def levels_ms(self) -> dict[str, float]:
        """Time of the reference operator to which costs are normalised, by hardware."""
        level = self.provenance.reference_level
        if level is None:
            return {}
        return {self.provenance.hardware: level.both_ms}

    def hardware_mismatch(self, hardware: str) -> str | None:
        """Returns a one-line warning if the hardware differs from the model's; else None."""
        if hardware == self.provenance.hardware:
            return None
        return (
            f"the cost model was trained on {self.provenance.hardware}, this is {hardware}: plans "
            "remain useful, but predicted ms may be off; calibrate it with 50 measured shards"
        )
