"""Fits the effects of a machine to a few of its shards."""

from torch import Tensor

from autoshard.cost_model.learning.compute_training import Examples
from autoshard.cost_model.learning.training import TrainOptions, fit, relative_loss
from autoshard.cost_model.models.machines import EFFECTS, prior_penalty
from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.ensemble import Ensemble

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
        return relative_loss(predicted, examples.log_costs, shares) + weight * prior_penalty(moved)

    ensemble, _ = fit(
        model.ensemble, loss, lambda learner: loss(learner).item(), _OPTIONS, only=EFFECTS
    )
    return model.with_ensemble(ensemble)
