"""What a plan would cost: networks that learned from measurements, and know how well they know.

May import `benchmark` and `workload`. Hands out the model (`CostModel`, of `ComputeCostModel` and
links), the oracle over it (`EstimatedCosts`), plans that are being made
(`placement_state`), what was measured of tables (`TableResiduals`), what a plan is worth
where costs are not sure (`StepPredictor`), why it takes as long as it does (`slowest_by_phase`),
what it learns from (`CostDataset`), its training, calibration and checkpoints.
"""

from typing import TYPE_CHECKING

from autoshard.workload.lazy import lazy_exports

if TYPE_CHECKING:
    from autoshard.cost_model.checkpoint import (
        CheckpointError,
        OtherHardware,
        load_model,
        save_model,
    )
    from autoshard.cost_model.compute import ComputeCostModel, Prices, Uncertainty
    from autoshard.cost_model.dataset import CostDataset, DataError, Selection, read_costs, split
    from autoshard.cost_model.explanation import PhaseCost, PieceCost, slowest_by_phase
    from autoshard.cost_model.model import CostModel, Provenance
    from autoshard.cost_model.oracle import EstimatedCosts, OutsideTraining
    from autoshard.cost_model.step_prediction import StepPrediction, StepPredictor
    from autoshard.cost_model.table_residuals import TableResiduals
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "CheckpointError",
    "ComputeCostModel",
    "CostDataset",
    "CostModel",
    "DataError",
    "EstimatedCosts",
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
    "read_costs",
    "save_model",
    "slowest_by_phase",
    "split",
]
