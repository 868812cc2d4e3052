"""Few-shot calibration: a model of one machine that tells the costs of another.

Another machine, batch size or type of weights changes what each kind of work costs and how shards
fuse, and hardly what makes tables differ. So the prices of work and the fusion are learned anew
from a few dozen shards, and held near where they were; what is known of tables stays.
"""

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
_HOLD = 1e-3  # of the squared distance from where a weight was
_OPTIONS = TrainOptions(steps=200, learning_rate=0.03, weight_decay=0.0, patience=200)


def calibrate(model: CostModel, data: CostDataset, extend_range: bool = True) -> CostModel:
    """The model adapted to the operator, hardware and batch of a few measured shards.

    With `acquaint` tables like those are no strangers to it any more.

    How far to trust it is found by leaving out a fifth of them at a time. Its links are dropped
    where the hardware is another.
    """
    if len(data) < MIN_CALIBRATION_SHARDS:
        raise DataError(
            f"{len(data)} shards are too few to calibrate with: measure {MIN_CALIBRATION_SHARDS}"
        )
    numbers = range(len(data))
    trials = []
    for fold in range(_FOLDS):
        kept = data.subset([n for n in numbers if n % _FOLDS != fold])
        left = data.subset([n for n in numbers if n % _FOLDS == fold])
        trials.append((adapted(model.compute, kept, extend_range), left))
    compute = with_fitted_uncertainty(trials, adapted(model.compute, data, extend_range))
    same = data.hardware == model.provenance.hardware
    return CostModel(compute, Provenance.of(data), model.links if same else {})


def adapted(
    model: ComputeCostModel, data: CostDataset, extend_range: bool = True
) -> ComputeCostModel:
    """The model with prices and fusion fitted to these shards, trusted as before."""
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
        return fitted + _HOLD * moved

    def error(learner: Ensemble) -> float:
        return relative_error(examples.log_predictions(learner), examples.log_costs)

    ensemble, _ = fit(model.ensemble, loss, error, _OPTIONS, only=_LEARNED)
    return model.with_ensemble(ensemble)
