"""Trains `Machines` on the measurements of several machines, and tests them by leaving one out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import optimize, stats
from torch import Tensor

from autoshard.cost_model.learning.calibration_design import most_informative
from autoshard.cost_model.learning.compute_training import (
    Examples,
    fit_prior,
    fit_uncertainty,
    with_initial_prices,
)
from autoshard.cost_model.learning.machine_fitting import fitted_to
from autoshard.cost_model.learning.training import (
    Progress,
    TrainOptions,
    fit,
    member_shares,
    relative_error,
    relative_loss,
)
from autoshard.cost_model.models.machines import (
    EFFECTS,
    UPDATE,
    Effects,
    Machines,
    TrainingMachine,
    centred,
    prior_penalty,
    with_effects,
)
from autoshard.cost_model.networks.compute import ComputeCostModel, ResidualPrior, Uncertainty
from autoshard.cost_model.networks.dataset import CostDataset, split
from autoshard.cost_model.networks.ensemble import Ensemble
from autoshard.cost_model.networks.inputs import Memberships
from autoshard.cost_model.networks.network import INPUTS, InputScale, ShardNetwork

KNOWN_SHARDS = 12  # of a machine left out, in place of those of a probe, which most hosts lack
_PREFIX = "machines."  # of weights of the ensemble while it is trained
_EXPLAINING = ("log_features", "log_distinct_rows", "log_lookups", "log_looked_up_bytes")
_LEAST_UPDATE_NS = 5.0
_PRIOR_WEIGHT = 3e-5  # of effects, against the mean loss of shards


def train_machines(
    machines: Sequence[CostDataset],
    options: TrainOptions,
    seed: int,
    progress: Progress = lambda: None,
) -> Machines:
    """Trains networks on several machines, with early stopping on their validation tables.

    Args:
        machines: Measurements of each machine, which count alike.
        options: Hyperparameters.
        seed: Seed of initial weights and of the bootstrap weights of members.
        progress: Called after each step.
    """
    parts = [split(data) for data in machines]
    training = [Examples.of(part["train"]) for part in parts]
    held_out = [Examples.of(part["validation"]) for part in parts]
    shape = replace(options.shape, effects=True)
    together = _joined(training)
    scale = InputScale.of(together.inputs)
    ensemble = Ensemble.fresh(lambda: ShardNetwork(shape, scale), options.members, seed)
    ensemble = with_initial_prices(ensemble, together, scale)
    updates = [inferred_update_ns(examples).log() for examples in training]
    usual = torch.stack(updates).mean(0)
    ensemble.weights[UPDATE] = usual.expand(options.members, -1).clone()
    effects = {
        f"{_PREFIX}{number}.{name}": torch.zeros_like(ensemble.weights[name])
        for number in range(len(machines))
        for name in EFFECTS
    }
    for number, update in enumerate(updates):
        effects[f"{_PREFIX}{number}.{UPDATE}"] += update - usual
    shares = [
        member_shares(len(examples.log_costs), options.members, seed) * examples.weights
        for examples in training
    ]

    def loss(learner: Ensemble) -> Tensor:
        total = torch.zeros(())
        for number, (examples, share) in enumerate(zip(training, shares, strict=True)):
            own = _effects(learner, number)
            predicted = examples.log_predictions(with_effects(learner, own))
            total = total + relative_loss(predicted, examples.log_costs, share)
            total = total + _PRIOR_WEIGHT * prior_penalty(own)
        return total / len(training)

    def error(learner: Ensemble) -> float:
        errors = []
        for number, examples in enumerate(held_out):
            own = with_effects(learner, _effects(learner, number))
            errors.append(relative_error(examples.log_predictions(own), examples.log_costs))
        return float(np.mean(errors))

    start = ensemble.with_weights({**ensemble.weights, **effects})
    found, _ = fit(start, loss, error, options, progress)
    own = [_effects(found, number) for number in range(len(machines))]
    kept = {name: w for name, w in found.weights.items() if not name.startswith(_PREFIX)}
    mean = ComputeCostModel(shape, scale, found.with_weights(kept), Uncertainty())
    trained_on = [TrainingMachine(data.hardware, data.reference_level) for data in machines]
    return centred(mean, trained_on, own)


@dataclass(frozen=True)
class LeftOut:
    """A machine that was left out of training, and its networks by a few of its shards.

    Attributes:
        hardware: Fingerprint.
        model: Networks of the others, fitted to `KNOWN_SHARDS` of the machine's shards.
        data: Its other shards.
    """

    hardware: str
    model: ComputeCostModel
    data: CostDataset

    def figures(self) -> dict[str, float]:
        """Returns measured over predicted (median), its deviation in log time, and Kendall's tau.

        They are of the shards that `usual_shards` selects.
        """
        data = usual_shards(self.data)
        predicted_ms = self.model.predict(data.shards, data.batch_sizes).total_ms.double().numpy()
        errors = np.log(data.totals_ms / predicted_ms)
        return {
            "num_shards": len(data),
            "measured_over_predicted": float(np.exp(np.median(errors))),
            "deviation": float(errors.std()),
            "kendall_tau": float(stats.kendalltau(data.totals_ms, predicted_ms).statistic),
        }

    def text(self) -> str:
        """Returns the figures as one line."""
        figures = self.figures()
        return (
            f"measured / predicted {figures['measured_over_predicted']:.2f}, deviation "
            f"{figures['deviation']:.3f}, Kendall tau {figures['kendall_tau']:.3f} "
            f"({figures['num_shards']} shards)"
        )


def train_and_leave_out(
    machines: Sequence[CostDataset],
    options: TrainOptions,
    seed: int,
    progress: Progress = lambda: None,
) -> tuple[Machines, list[LeftOut]]:
    """Trains networks on all machines, and on all but one for each.

    What the latter miss on the machine left out is the uncertainty and the prior of the former:
    that of a machine that was not measured. The prior is the median of those of the machines left
    out: on some, one measurement deviates by more than it states, which looks like residuals.
    """
    left_out = []
    for number, data in enumerate(machines):
        others = [each for n, each in enumerate(machines) if n != number]
        mean = train_machines(others, options, seed, progress).mean
        chosen = most_informative(mean, data, data, KNOWN_SHARDS)
        known = fitted_to(mean, Examples.of(data.subset(chosen)))
        rest = data.subset(sorted({*range(len(data))} - {*chosen}))
        left_out.append(LeftOut(data.hardware, known, rest))
    found = train_machines(machines, options, seed, progress)
    trials = [(each.model, each.data) for each in left_out]
    prior = ResidualPrior.median([fit_prior([trial]) for trial in trials])
    mean = replace(found.mean, uncertainty=fit_uncertainty(trials), prior=prior)
    return replace(found, mean=mean), left_out


def usual_shards(data: CostDataset) -> CostDataset:
    """Returns the shards at the most common batch whose tables have one feature.

    Those of several are few, and kernels treat them in another way on each processor.
    """
    batch = data.most_common_batch
    return data.subset(
        [
            number
            for number, shard in enumerate(data.shards)
            if data.batch_sizes[number] == batch
            and all(piece.table.features == 1 for piece in shard.pieces)
        ]
    )


def _effects(learner: Ensemble, number: int) -> Effects:
    return {name: learner.weights[f"{_PREFIX}{number}.{name}"] for name in EFFECTS}


def inferred_update_ns(examples: Examples) -> Tensor:
    """Returns the time that the update of a distinct row takes on the machine of these shards.

    Least squares of backward times on tables, distinct rows, lookups and bytes, none of which is
    negative. On two machines it was within a third of what their probes measured.

    Returns:
        Nanoseconds for tables of one and of several features, shape [2].
    """
    inputs = examples.inputs.double()
    features, distinct, lookups, looked_up = (inputs[:, INPUTS.index(name)] for name in _EXPLAINING)
    several = (features > 0).double()
    rows = distinct.expm1()
    work = [torch.ones_like(rows), rows * (1 - several), rows * several, lookups.expm1()]
    terms = examples.memberships.sums(torch.stack([*work, looked_up.expm1()], 1)).numpy()
    backward_ms = examples.log_costs[:, 1].double().exp().numpy()
    prices, _ = optimize.nnls(terms / backward_ms[:, None], np.ones(len(terms)))
    return torch.from_numpy(prices[1:3] * 1e6).float().clamp_min(_LEAST_UPDATE_NS)


def _joined(machines: Sequence[Examples]) -> Examples:
    """Returns the examples of all machines as if they were of one."""
    rows, offsets, inputs, shards = [], [], 0, 0
    for examples in machines:
        held = examples.memberships
        rows.append(held.rows + inputs)
        offsets.append(held.offsets + shards)
        inputs += len(examples.inputs)
        shards += len(held.rows)
    return Examples(
        torch.cat([examples.inputs for examples in machines]),
        Memberships(torch.cat(rows), torch.cat(offsets)),
        torch.cat([examples.log_costs for examples in machines]),
        torch.cat([examples.weights for examples in machines]),
    )
