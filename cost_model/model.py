"""`CostModel`: compute and links together, and where the knowledge comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.benchmark import ReferenceLevel
from autoshard.cost_model.compute import ComputeCostModel
from autoshard.workload import Link, OperatorOptions

if TYPE_CHECKING:
    from autoshard.cost_model.dataset import CostDataset


@dataclass(frozen=True)
class Provenance:
    """What a model was trained on. `figures`: how well it did on tables it had never seen.

    Its costs are told as on a machine on which the reference operator takes `quiet`.
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
        """That of a model which learned from this dataset."""
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
    """What is known of one kind of hardware.

    Args:
        compute: prices shards.
        provenance: what it was learned from.
        links: that are near to measured all-to-alls, by the number of ranks, where any were.
    """

    compute: ComputeCostModel
    provenance: Provenance
    links: Mapping[int, Link] = field(default_factory=dict)

    def hardware_mismatch(self, hardware: str) -> str | None:
        """One line for users whose hardware is another than the model's; None if it is the same."""
        if hardware == self.provenance.hardware:
            return None
        return (
            f"the cost model was trained on {self.provenance.hardware}, this is {hardware}: order "
            "and balance will be near, milliseconds may not; calibrate it with 50 measured shards"
        )
