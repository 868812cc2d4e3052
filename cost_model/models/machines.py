"""`Machines`: networks that were trained on several machines, and the effects of each machine.

An effect is a weight of the networks that differs from machine to machine: levels and slopes of the
time of a table, the start of an operator, and the update of a distinct row. For a machine that
nobody measured they are fitted to a few shards, with what differs between the known machines as
their prior.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from autoshard.benchmark import ReferenceLevel
from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.ensemble import Ensemble

# Prior standard deviation of each effect, in log time; of slopes, for each deviation of the input.
_TILTS, UPDATE, _START = "table.tilts", "table.log_update_ns", "fusion.log_start"
_LEVEL_DEVIATION, _SLOPE_DEVIATION = 0.5, 0.1
_DEVIATIONS = {UPDATE: 1.5, _START: 0.5}
EFFECTS = (_TILTS, UPDATE, _START)

Effects = Mapping[str, Tensor]  # by weight, each [members, ...]: differences to the mean machine


def prior_deviations(name: str, weight: Tensor) -> Tensor:
    """Returns the prior standard deviation of each element of an effect."""
    deviations = torch.full_like(weight, _DEVIATIONS.get(name, _SLOPE_DEVIATION))
    if name == _TILTS:
        deviations[..., 0] = _LEVEL_DEVIATION
    return deviations


def prior_penalty(effects: Effects) -> Tensor:
    """Returns the sum of squared effects, in prior standard deviations."""
    squares = [(e / prior_deviations(name, e)).square().sum() for name, e in effects.items()]
    return torch.stack(squares).sum()


def with_effects(ensemble: Ensemble, effects: Effects) -> Ensemble:
    """Returns the networks of a machine with these effects."""
    changed = {name: ensemble.weights[name] + effect for name, effect in effects.items()}
    return ensemble.with_weights({**ensemble.weights, **changed})


class TrainingMachine(NamedTuple):
    """A machine of the training data, and the reference level of its costs."""

    hardware: str
    reference_level: ReferenceLevel | None


@dataclass(frozen=True, eq=False)
class Machines:
    """Networks that were trained on several machines.

    Attributes:
        mean: Networks of the mean machine.
        trained_on: The machines.
        effects: Effects by weight, each [machines, members, ...].
    """

    mean: ComputeCostModel
    trained_on: tuple[TrainingMachine, ...]
    effects: Mapping[str, Tensor]

    def find(self, hardware: str) -> int | None:
        """Returns the number of a machine of the training data; None for any other."""
        numbers = (n for n, each in enumerate(self.trained_on) if each.hardware == hardware)
        return next(numbers, None)

    def of(self, number: int) -> ComputeCostModel:
        """Returns the networks of a machine of the training data."""
        own = {name: effect[number] for name, effect in self.effects.items()}
        return self.mean.with_ensemble(with_effects(self.mean.ensemble, own))

    def mean_with_update(self, update_ns: float | None) -> ComputeCostModel:
        """Returns the networks of the mean machine if updates of a distinct row take so long."""
        if update_ns is None:
            return self.mean
        weights = dict(self.mean.ensemble.weights)
        weights[UPDATE] = weights[UPDATE].clone()
        weights[UPDATE][:, 0] = math.log(update_ns)
        return self.mean.with_ensemble(self.mean.ensemble.with_weights(weights))

    def nearest(self, model: ComputeCostModel) -> tuple[TrainingMachine, float]:
        """Returns the training machine whose effects are nearest to a model's, and the distance.

        Two machines drawn from the prior are 1 apart: the root mean square over all effects of
        their differences, in standard deviations of such a difference.
        """
        own = {name: model.ensemble.weights[name].mean(0) for name in EFFECTS}
        count = sum(effect.numel() for effect in own.values())
        distances = []
        for number in range(len(self.trained_on)):
            theirs = self.of(number).ensemble.weights
            apart = {name: own[name] - theirs[name].mean(0) for name in EFFECTS}
            distances.append(float((prior_penalty(apart) / (2 * count)).sqrt()))
        number = min(range(len(distances)), key=distances.__getitem__)
        return self.trained_on[number], distances[number]


def centred(
    mean: ComputeCostModel, machines: Sequence[TrainingMachine], effects: Sequence[Effects]
) -> Machines:
    """Returns machines with the same networks, whose effects have a mean of 0."""
    stacked = {name: torch.stack([each[name] for each in effects]) for name in EFFECTS}
    means = {name: effect.mean(0) for name, effect in stacked.items()}
    ensemble = with_effects(mean.ensemble, means)
    apart = {name: effect - means[name] for name, effect in stacked.items()}
    return Machines(mean.with_ensemble(ensemble), tuple(machines), apart)
