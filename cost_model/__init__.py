"""Cost models that are trained on measurements, with calibrated uncertainty.

May import `benchmark` and `workload`. Exports the model (`CostModel`: a `ComputeCostModel` and
links), the oracle over it (`EstimatedCosts`), corrections by measured tables (`TableResiduals`),
step time under uncertainty (`StepPredictor`), explanations (`slowest_by_phase`), training data
(`CostDataset`), checkpoints, and models of other machines (`Machines`, `on_machine`). The module
`pricing.placement_state` prices plans that are being built.
"""

from typing import TYPE_CHECKING

from autoshard.workload.lazy import lazy_exports

if TYPE_CHECKING:
    from autoshard.cost_model.learning.probed_machine import on_machine
    from autoshard.cost_model.models.checkpoint import (
        CheckpointError,
        OtherHardware,
        load_model,
        save_model,
    )
    from autoshard.cost_model.models.machines import Machines
    from autoshard.cost_model.models.model import CostModel, Provenance
    from autoshard.cost_model.networks.compute import ComputeCostModel, Prices, Uncertainty
    from autoshard.cost_model.networks.dataset import (
        CostDataset,
        DataError,
        Selection,
        read_costs,
        split,
    )
    from autoshard.cost_model.pricing.explanation import PhaseCost, PieceCost, slowest_by_phase
    from autoshard.cost_model.pricing.oracle import EstimatedCosts, OutsideTraining
    from autoshard.cost_model.pricing.prediction import StepPrediction, StepPredictor
    from autoshard.cost_model.uncertainty.residuals import TableResiduals
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "CheckpointError",
    "ComputeCostModel",
    "CostDataset",
    "CostModel",
    "DataError",
    "EstimatedCosts",
    "Machines",
    "OtherHardware",
    "OutsideTraining",
    "PhaseCost",
    "PieceCost",
    "Prices",
    "Provenance",
    "Selection",
    "StepPrediction",
    "StepPredictor",
    "TableResiduals",
    "Uncertainty",
    "load_model",
    "on_machine",
    "read_costs",
    "save_model",
    "slowest_by_phase",
    "split",
]
