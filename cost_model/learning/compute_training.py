"""Trains a `ComputeCostModel` and fits its uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from autoshard.cost_model.learning.training import (
    Curves,
    Progress,
    TrainOptions,
    fit,
    member_shares,
    relative_error,
    relative_loss,
)
from autoshard.cost_model.networks.compute import ComputeCostModel, ResidualPrior, Uncertainty
from autoshard.cost_model.networks.dataset import CostDataset
from autoshard.cost_model.networks.ensemble import Ensemble
from autoshard.cost_model.networks.inputs import Memberships, PieceRows
from autoshard.cost_model.networks.network import (
    DIRECTIONS,
    KINDS,
    MIN_LOG_PRICE,
    InputScale,
    ShardNetwork,
)
from autoshard.cost_model.uncertainty.residuals import Evidence, subsample
from autoshard.workload.arrays import Floats

# Relative error of a good model (median on the shipped data: 1.9 %). Costs that are known better
# get no more weight. Values of 0 to 0.04 give similar models; without weights they are far worse
# where some costs are noisy.
_OWN_ERROR = 0.02
_SCALES, _NOISES = (0.25, 4.0), (0.005, 0.5)  # bounds of the uncertainty's parameters

# Deviation of the logarithm of a prior's deviation: it decides where shards are few.
_PRIOR_WIDTH = 1.0
# First guess and bounds of a prior's deviations.
_PRIOR = ResidualPrior(rest_ms=0.01)
_FITTED = {"own": (0.01, 0.5), "shared": (0.01, 0.5), "rest": (0.01, 0.5), "rest_ms": (1e-4, 10.0)}


@dataclass(frozen=True)
class Examples:
    """A dataset as tensors. `log_costs`: forward and backward, shape [shards, 2]."""

    inputs: Tensor
    memberships: Memberships
    log_costs: Tensor
    weights: Tensor

    @staticmethod
    def of(data: CostDataset) -> "Examples":
        """Returns the tensors of a dataset."""
        rows = PieceRows()
        memberships = rows.of_all(data.shards, data.batch_sizes)
        weights = 1 / (_OWN_ERROR**2 + data.errors**2)
        return Examples(
            rows.inputs(),
            memberships,
            torch.from_numpy(np.log(data.costs_ms)).float(),
            torch.from_numpy(weights / weights.mean()).float(),
        )

    def log_predictions(self, ensemble: Ensemble) -> Tensor:
        """Returns the log costs by each member, shape [members, shards, 2]."""
        sums = self.memberships.sums(ensemble("table", self.inputs).transpose(0, 1))
        return ensemble("fusion", sums, apart=True)


def train_compute(
    training: CostDataset,
    validation: CostDataset,
    options: TrainOptions,
    seed: int,
    progress: Progress = lambda: None,
) -> tuple[ComputeCostModel, Curves]:
    """Trains a model on `training` with early stopping on `validation`.

    Args:
        training: Shards to learn from.
        validation: Shards for early stopping and for fitting the uncertainty.
        options: Hyperparameters.
        seed: Seed of initial weights and of the bootstrap weights of members.
        progress: Called after each step.

    Returns:
        The model and its learning curves.
    """
    examples, held_out = Examples.of(training), Examples.of(validation)
    shape = options.shape
    scale = InputScale.of(examples.inputs)
    fresh = Ensemble.fresh(lambda: ShardNetwork(shape, scale), options.members, seed)
    fresh = with_initial_prices(fresh, examples, scale)
    shares = member_shares(len(training), options.members, seed) * examples.weights
    ensemble, curves = fit(
        fresh,
        lambda learner: relative_loss(
            examples.log_predictions(learner), examples.log_costs, shares
        ),
        lambda learner: relative_error(held_out.log_predictions(learner), held_out.log_costs),
        options,
        progress,
    )
    model = ComputeCostModel(shape, scale, ensemble, Uncertainty())
    return with_fitted_uncertainty([(model, validation)], model), curves


def with_fitted_uncertainty(
    trials: Sequence[tuple[ComputeCostModel, CostDataset]], model: ComputeCostModel
) -> ComputeCostModel:
    """Returns the model with uncertainty and prior fitted on held-out data of `trials`."""
    return replace(model, uncertainty=fit_uncertainty(trials), prior=fit_prior(trials))


def fit_uncertainty(
    trials: Sequence[tuple[ComputeCostModel, CostDataset]],
) -> Uncertainty:
    """Returns interval parameters fitted on held-out data.

    The noise beside the networks' disagreement is found by maximum likelihood; the widths that hold
    90 and 95 % of measurements by split conformal prediction.
    """
    errors, disagreement = np.concatenate([_misses(*trial) for trial in trials], axis=1)

    def negative_log_likelihood(logs: Floats) -> float:
        variance = (disagreement * np.exp(logs[0])) ** 2 + np.exp(2 * logs[1])
        return float(np.mean(np.log(variance) + errors**2 / variance))

    bounds = [np.log(_SCALES), np.log(_NOISES)]
    found = optimize.minimize(negative_log_likelihood, [0.0, np.log(0.03)], bounds=bounds)
    scale, noise = (float(value) for value in np.exp(found.x))
    widths = errors / np.sqrt((disagreement * scale) ** 2 + noise**2)
    width_90, width_95 = (_conformal(widths, share) for share in (0.90, 0.95))
    return Uncertainty(scale, noise, width_90, width_95)


def fit_prior(trials: Sequence[tuple[ComputeCostModel, CostDataset]]) -> ResidualPrior:
    """Returns the prior of table corrections, by maximum likelihood on held-out data.

    Errors that follow a table are its own part; errors that similar tables have in common are the
    shared part.
    """
    held_out = [Evidence.of(model, _of_one_batch(data)) for model, data in trials]

    def prior(logs: Floats) -> ResidualPrior:
        return replace(_PRIOR, **dict(zip(_FITTED, np.exp(logs).tolist(), strict=True)))

    def negative_log_likelihood(logs: Floats) -> float:
        total = sum(each.negative_log_likelihood(prior(logs)) for each in held_out)
        return total + float(np.square((logs - start) / _PRIOR_WIDTH).sum() / 2)

    start = np.log([getattr(_PRIOR, name) for name in _FITTED])
    found = optimize.minimize(
        negative_log_likelihood, start, method="Nelder-Mead", options={"maxfev": 200}
    )
    return prior(np.clip(found.x, *np.log(list(_FITTED.values())).T))


def _of_one_batch(data: CostDataset) -> CostDataset:
    batch = data.most_common_batch
    return subsample(data.subset([n for n, size in enumerate(data.batch_sizes) if size == batch]))


def _misses(model: ComputeCostModel, held_out: CostDataset) -> Floats:
    """Returns absolute errors in log space and the networks' disagreement, shape [2, shards]."""
    raw = replace(model, uncertainty=Uncertainty(scale=1.0, noise=0.0))
    prices = raw.predict(held_out.shards, held_out.batch_sizes)
    errors = np.abs(np.log(held_out.totals_ms / prices.total_ms.double().numpy()))
    return np.stack([errors, prices.deviation.double().numpy()])


def _conformal(widths: Floats, share: float) -> float:
    """Returns the quantile of widths at `share`, with the finite-sample correction."""
    rank = min(1.0, share * (len(widths) + 1) / len(widths))
    return float(np.quantile(widths, rank))


def with_initial_prices(ensemble: Ensemble, examples: Examples, scale: InputScale) -> Ensemble:
    """Returns the ensemble with initial prices by which work alone explains the costs best."""
    work = examples.memberships.sums(scale.priced_work(examples.inputs)).numpy()
    terms = np.concatenate([np.ones((len(work), 1)), work], axis=1).astype(np.float64)
    log_costs = examples.log_costs.numpy()
    fitted = np.stack([_log_prices(terms, log_costs[:, n]) for n in range(DIRECTIONS)])
    start, prices = torch.from_numpy(fitted).float()[:, :1], torch.from_numpy(fitted).float()[:, 1:]
    weights = dict(ensemble.weights)
    weights["table.log_prices"] = prices.expand(ensemble.members, -1, -1).clone()
    weights["fusion.log_start"] = start[:, 0].expand(ensemble.members, -1).clone()
    return ensemble.with_weights(weights)


def _with_unseen(log_prices: Floats, terms: Floats) -> Floats:
    """Sets prices of missing kinds: several features cost what one does, weights nothing."""
    one, several, weights = log_prices[1:].reshape(len(KINDS), -1)
    any_one, any_several, any_weights = (
        terms[:, 1:].reshape(len(terms), len(KINDS), -1).sum((0, 2)) > 0
    )
    several = several if any_several else one
    one = one if any_one else several
    weights = weights if any_weights else np.full_like(one, MIN_LOG_PRICE)
    return np.concatenate([log_prices[:1], one, several, weights])


def _log_prices(terms: Floats, log_costs: Floats) -> Floats:
    """Returns logarithms of positive prices of terms [shards, terms], by robust least squares."""

    def errors(log_prices: Floats) -> Floats:
        return np.log(terms @ np.exp(log_prices)) - log_costs

    def slopes(log_prices: Floats) -> Floats:
        parts = terms * np.exp(log_prices)
        return np.asarray(parts / parts.sum(axis=1, keepdims=True))

    lowest = np.full(terms.shape[1], MIN_LOG_PRICE)
    found = optimize.least_squares(
        errors, lowest / 4, slopes, (lowest, -lowest), loss="soft_l1", f_scale=0.1
    )
    return _with_unseen(np.asarray(found.x), terms)
