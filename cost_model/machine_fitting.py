"""Fits the effects of a machine to a few of its shards."""

from torch import Tensor

from autoshard.cost_model.compute import ComputeCostModel
from autoshard.cost_model.compute_training import Examples
from autoshard.cost_model.ensemble import Ensemble
from autoshard.cost_model.machines import EFFECTS, unlikeliness
from autoshard.cost_model.training import TrainOptions, fit, relative_error, relative_loss

# Weight of the prior against the mean loss of n shards, for shards of a residual of 0.1.
_PRIOR_WEIGHT = 3 * 0.1**2
_OPTIONS = TrainOptions(steps=200, learning_rate=0.03, weight_decay=0.0, patience=200)


def fitted_to(model: ComputeCostModel, examples: Examples) -> ComputeCostModel:
    """Returns the networks of a mean machine, with effects fitted to a machine's shards."""
    weight = _PRIOR_WEIGHT / len(examples.log_costs)
    shares = examples.weights.expand(model.ensemble.members, -1)

    def loss(learner: Ensemble) -> Tensor:
        moved = {name: learner.weights[name] - model.ensemble.weights[name] for name in EFFECTS}
        predicted = examples.log_predictions(learner)
        return relative_loss(predicted, examples.log_costs, shares) + weight * unlikeliness(moved)

    def error(learner: Ensemble) -> float:
        return relative_error(examples.log_predictions(learner), examples.log_costs)

    ensemble, _ = fit(model.ensemble, loss, error, _OPTIONS, only=EFFECTS)
    return model.with_ensemble(ensemble)
