"""The search space of sweeps: each hyperparameter and its range.

The published prototypes' values and ours are inside. Hyperparameters without a measured effect are
left out (see the ablation in docs/policy.md for attention and recurrent memories).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import tune
from ray.tune.search.sample import Categorical, Domain, Float

from autoshard.experiments.training.config import Hyperparameters

Value = float | int
Space = Mapping[str, Domain]

_SPACE: Space = {
    "learning_rate": tune.loguniform(1e-4, 1e-2),  # Adam's rate; tuned by hand: 1e-3
    "epochs": tune.choice([1, 2, 3, 5, 8]),  # passes over the samples of an iteration
    "minibatch": tune.choice([256, 512, 1024, 2048, 4096]),  # steps in a gradient
    "clip": tune.loguniform(0.05, 0.4),  # clip of the probability ratio; RLlib's default: 0.3
    "entropy": tune.loguniform(1e-6, 1e-2),  # weight of the entropy bonus
    "gae_lambda": tune.uniform(0.9, 1.0),  # 1 uses returns alone; episodes are short
    "sharpness": tune.loguniform(30.0, 3000.0),  # how closely the initial policy follows cost_fused
    "hidden": tune.choice([32, 64, 128]),  # features of a device
    "encoded": tune.choice([16, 32, 64]),  # features of a set of tables
}
_OF_SHAPE = frozenset(("sharpness", "hidden", "encoded"))  # fixed for a network


def search_space(population_based: bool) -> Space:
    """Returns the hyperparameters to search; population based training cannot change shapes."""
    return {n: d for n, d in _SPACE.items() if not population_based or n not in _OF_SHAPE}


def mutations(space: Space) -> dict[str, Any]:
    """Returns the space for population based training, which takes lists for categories."""
    return {n: list(d.categories) if isinstance(d, Categorical) else d for n, d in space.items()}


def within(space: Space, values: dict[str, Value]) -> dict[str, Value]:
    """Returns the point with its values clipped to their ranges."""
    for name, domain in space.items():
        if isinstance(domain, Float) and name in values:
            values[name] = min(max(values[name], domain.lower), domain.upper)
    return values


def default_point(space: Space) -> dict[str, Value]:
    """Returns the point of the default hyperparameters, which every sweep tries first."""
    default = Hyperparameters()
    known = vars(default) | vars(default.shape)
    return within(space, {name: known[name] for name in space})  # a log scale has no zero


def hyperparameters(values: Mapping[str, Value]) -> Hyperparameters:
    """Returns the hyperparameters of a point, with defaults for the others."""
    default = Hyperparameters()
    of_shape: dict[str, Any] = {n: v for n, v in values.items() if n in _OF_SHAPE}
    others: dict[str, Any] = {n: v for n, v in values.items() if n not in _OF_SHAPE}
    return replace(default, **others, shape=replace(default.shape, **of_shape))


def command_line(values: Mapping[str, Value]) -> list[str]:
    """Returns the training options of a point."""
    options = []
    for name, value in values.items():
        path = f"shape.{name}" if name in _OF_SHAPE else name
        options += [f"--hyper.{path.replace('_', '-')}", f"{value:.6g}"]
    return options
