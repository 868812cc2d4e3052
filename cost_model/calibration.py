"""Few-shot calibration of a cost model to another machine, batch size or type of weights.

These change what each kind of work costs and how shards fuse, and hardly what makes tables differ.
So only the prices of work and the fusion layers are trained, from a few dozen shards, with a
penalty on their distance from the original weights.
"""

from dataclasses import replace

import torch

from autoshard.cost_model.compute import ComputeCostModel
from autoshard.cost_model.compute_training import Examples, with_fitted_uncertainty
from autoshard.cost_model.dataset import CostDataset, DataError
from autoshard.cost_model.ensemble import Ensemble
from autoshard.cost_model.model import CostModel, Provenance
from autoshard.cost_model.training import TrainOptions, fit, relative_error, relative_loss

MAX_CALIBRATION_SHARDS = 50
MIN_CALIBRATION_SHARDS = 10
_FOLDS = 5
_LEARNED = ("table.log_prices", "fusion.")
_PENALTY = 1e-3  # times the squared distance from the original weights
_OPTIONS = TrainOptions(steps=200, learning_rate=0.03, weight_decay=0.0, patience=200)


def calibrate(model: CostModel, data: CostDataset, extend_range: bool = True) -> CostModel:
    """Returns the model adapted to the operator, hardware and batch size of a few measured shards.

    Uncertainty is fitted by five-fold cross-validation. Links are dropped if the hardware differs.

    Args:
        model: Model to adapt.
        data: At least `MIN_CALIBRATION_SHARDS` shards.
        extend_range: Whether tables like those of `data` count as in-distribution from then on.
    """
    if len(data) < MIN_CALIBRATION_SHARDS:
        raise DataError(
            f"{len(data)} shards are too few to calibrate with: measure {MIN_CALIBRATION_SHARDS}"
        )
    numbers = range(len(data))
    trials = []
    for fold in range(_FOLDS):
        kept = data.subset([n for n in numbers if n % _FOLDS != fold])
        held_out = data.subset([n for n in numbers if n % _FOLDS == fold])
        trials.append((adapted(model.compute, kept, extend_range), held_out))
    compute = with_fitted_uncertainty(trials, adapted(model.compute, data, extend_range))
    same = data.hardware == model.provenance.hardware
    return CostModel(compute, Provenance.of(data), model.links if same else {})


def adapted(
    model: ComputeCostModel, data: CostDataset, extend_range: bool = True
) -> ComputeCostModel:
    """Returns the model with prices and fusion fitted to these shards."""
    examples = Examples.of(data)
    if extend_range:
        model = model.with_input_range(examples.inputs)
    before = {name: weight.clone() for name, weight in model.ensemble.weights.items()}

    def loss(learner: Ensemble) -> torch.Tensor:
        moved = sum(
            (weight - before[name]).square().sum()
            for name, weight in learner.weights.items()
            if weight.requires_grad
        )
        shares = examples.weights.expand(learner.members, -1)
        fitted = relative_loss(examples.log_predictions(learner), examples.log_costs, shares)
        return fitted + _PENALTY * moved

    def error(learner: Ensemble) -> float:
        return relative_error(examples.log_predictions(learner), examples.log_costs)

    ensemble, _ = fit(model.ensemble, loss, error, _OPTIONS, only=_LEARNED)
    return replace(model, ensemble=ensemble)
