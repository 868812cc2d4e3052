"""Selects the shards that are most informative about a machine, to calibrate with them."""

from collections.abc import Sequence

import numpy as np
import torch

from autoshard.cost_model.models.machines import EFFECTS, prior_deviations, with_effects
from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.dataset import CostDataset
from autoshard.workload import Shard
from autoshard.workload.arrays import Floats

_ERROR = 0.1  # of the networks, beside the effects: shards that are alike tell little more than one
_STEP = 0.1  # of an effect for its slope, in prior deviations


def most_informative(
    model: ComputeCostModel, candidates: CostDataset, target: CostDataset, count: int
) -> list[int]:
    """Returns the numbers of candidates that leave the least uncertainty of other shards' costs.

    Costs are linear in the effects of a machine, nearly enough: each candidate, forward and
    backward, reduces their variance. They are chosen one after the other.

    Args:
        model: Networks of the mean machine, whose prior is what is known before.
        candidates: Shards to choose from; costs are not looked at.
        target: Shards whose costs are to be known.
        count: Number of shards to choose.
    """
    tell = slopes(model, candidates.shards, candidates.batch_sizes)  # [n, 2, effects]
    asked = slopes(model, target.shards, target.batch_sizes).mean(1)  # [m, effects]
    wanted = asked.T @ asked / len(asked)
    covariance = np.eye(tell.shape[-1])
    chosen: list[int] = []
    for _ in range(min(count, len(tell))):
        known = tell @ covariance  # [n, 2, effects]
        inner = np.linalg.inv(known @ tell.transpose(0, 2, 1) + _ERROR**2 * np.eye(2))
        gains = np.einsum("nij,nie,ef,njf->n", inner, known, wanted, known)
        gains[chosen] = -np.inf
        best = int(gains.argmax())
        chosen.append(best)
        covariance -= known[best].T @ inner[best] @ known[best]
    return chosen


@torch.no_grad()
def slopes(model: ComputeCostModel, shards: Sequence[Shard], batch_sizes: Sequence[int]) -> Floats:
    """Returns how log costs of shards change with each effect of a machine.

    Returns:
        Slopes in prior deviations, shape [shards, 2, effects].
    """
    before = _log_costs(model, shards, batch_sizes)
    found = []
    for name in EFFECTS:
        deviations = prior_deviations(name, model.ensemble.weights[name])
        for number in range(deviations[0].numel()):
            moved = torch.zeros_like(deviations)
            moved.flatten(1)[:, number] = _STEP * deviations.flatten(1)[:, number]
            other = model.with_ensemble(with_effects(model.ensemble, {name: moved}))
            found.append((_log_costs(other, shards, batch_sizes) - before) / _STEP)
    return np.stack(found, axis=-1)


def _log_costs(
    model: ComputeCostModel, shards: Sequence[Shard], batch_sizes: Sequence[int]
) -> Floats:
    prices = model.predict(shards, batch_sizes)
    return np.asarray(torch.stack([prices.forward_ms, prices.backward_ms], 1).double().log())
