"""What sweeps look for: each hyperparameter, where it may lie, and why there. The one place.

The published prototypes' values and ours lie inside; what was measured not to matter is left out
(see the ablation in docs/policy.md for attention and recurrent memories).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ray import tune

from autoshard.cost_model.training import TrainOptions
from autoshard.experiments.training.hyperparameters import Hyperparameters

Value = float | int
Hyper = TypeVar("Hyper", Hyperparameters, TrainOptions)


@dataclass(frozen=True)
class Range:
    """Any number from `low` to `high`; with `log` each factor is as likely as the next.

    `live`: may change while a trial trains, as population based training does.
    """

    name: str
    low: float
    high: float
    why: str
    log: bool = False
    live: bool = False

    def for_tune(self) -> Any:
        """As Tune wants it."""
        return (tune.loguniform if self.log else tune.uniform)(self.low, self.high)

    def for_mutation(self) -> Any:
        """As population based training wants it: a little more or less, or drawn anew."""
        return self.for_tune()


@dataclass(frozen=True)
class Choice:
    """One of a few numbers, in ascending order."""

    name: str
    options: tuple[Value, ...]
    why: str
    live: bool = False

    def for_tune(self) -> Any:
        """As Tune wants it."""
        return tune.choice(list(self.options))

    def for_mutation(self) -> Any:
        """As population based training wants it: the next of the options, or drawn anew."""
        return list(self.options)


Dimension = Range | Choice

POLICY_SPACE: tuple[Dimension, ...] = (
    Range("learning_rate", 1e-4, 1e-2, "Adam's; 1e-3 by hand", log=True, live=True),
    Choice("epochs", (1, 2, 3, 5, 8), "passes over what an iteration has sampled", live=True),
    Choice("minibatch", (256, 512, 1024, 2048, 4096), "steps in a gradient", live=True),
    Range("clip", 0.05, 0.4, "how far odds may move; RLlib takes 0.3", log=True, live=True),
    Range("entropy", 1e-6, 1e-2, "weight of staying undecided", log=True, live=True),
    Range("gae_lambda", 0.9, 1.0, "1 trusts returns alone; games are short", live=True),
    Range("sharpness", 30.0, 3000.0, "how strictly it starts out as cost_fused", log=True),
    Choice("hidden", (32, 64, 128), "numbers that a device is known by"),
    Choice("encoded", (16, 32, 64), "numbers that a set of tables is known by"),
)

COST_MODEL_SPACE: tuple[Dimension, ...] = (
    Range("learning_rate", 1e-3, 2e-2, "at its highest; 5e-3 by hand", log=True),
    Range("weight_decay", 1e-4, 1e-1, "pulls weights to zero", log=True),
    Choice("members", (3, 5, 8), "networks in the ensemble: more cost time in each use"),
    Choice("hidden", (16, 32, 64), "width of each network"),
    Choice("learned", (4, 8, 16, 32), "amounts a table is known by beyond its prices"),
)


def for_tune(space: Sequence[Dimension]) -> dict[str, Any]:
    """The space as Tune wants it."""
    return {dimension.name: dimension.for_tune() for dimension in space}


def within(space: Sequence[Dimension], values: dict[str, Value]) -> dict[str, Value]:
    """The point with what left its range brought back into it."""
    for dimension in space:
        if isinstance(dimension, Range) and dimension.name in values:
            value = values[dimension.name]
            values[dimension.name] = min(max(value, dimension.low), dimension.high)
    return values


def at_point(default: Hyper, values: Mapping[str, Value]) -> Hyper:
    """The hyperparameters of a point; those that are not in its space are the default's."""
    sizes: dict[str, Any] = {n: v for n, v in values.items() if hasattr(default.shape, n)}
    rest: dict[str, Any] = {n: v for n, v in values.items() if n not in sizes}
    shape: Any = replace(default.shape, **sizes)
    return replace(default, **rest, shape=shape)


def default_point(space: Sequence[Dimension]) -> dict[str, Value]:
    """Where the defaults lie in the space: what every sweep tries first."""
    default = _default(space)
    known = vars(default) | vars(default.shape)
    point: dict[str, Value] = {d.name: known[d.name] for d in space}
    return within(space, point)  # zero is not on a logarithmic scale


def command_line(space: Sequence[Dimension], values: Mapping[str, Value]) -> list[str]:
    """The options of what trains one policy or one cost model, for a point in the space."""
    shape = _default(space).shape
    options = []
    for name, value in values.items():
        path = f"shape.{name}" if hasattr(shape, name) else name
        options += [f"--hyper.{path.replace('_', '-')}", f"{value:.6g}"]
    return options


def _default(space: Sequence[Dimension]) -> Hyperparameters | TrainOptions:
    return TrainOptions() if space is COST_MODEL_SPACE else Hyperparameters()
