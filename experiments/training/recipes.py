"""Published systems as recipes: what of a training makes it that system, by our own code.

A recipe is a configuration to begin with, and those of its settings that may not be others. It is
made from the paper's description: their games, rewards and learners in our terms, on our network
and our cost model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from autoshard.experiments.training.config import PPOShardConfig, RecipeName
from autoshard.experiments.training.hyperparameters import Hyperparameters
from autoshard.sharders.policy_network import PolicyShape
from autoshard.workload import UserError
from autoshard.workload.bounds import check_bounds

_OF_ALL = (
    "families",
    "objective",
    "goal",
    "learner",
    "hyper.shape.sharpness",
    "hyper.shape.halves",
)
_SHAPE = PolicyShape(sharpness=0.0, halves=False)  # no greedy to start from, tables stay whole


@dataclass(frozen=True)
class Recipe:
    """A published system.

    Args:
        settings: what a training begins with that names no other option.
        fixed: settings that make it that system.
        more_than: settings that must be above what is told here.
    """

    settings: PPOShardConfig
    fixed: tuple[str, ...]
    more_than: Mapping[str, float]


RECIPES: dict[RecipeName, Recipe] = {
    # A policy gradient with a critic and an entropy bonus; a plan is worth its balance, that is the
    # least over the greatest cost of a device. The paper measures each plan, which takes hours on
    # two cores (--reward measured does it): by default a cost model rewards that has learned from
    # shards measured before.
    "autoshard": Recipe(
        PPOShardConfig(
            recipe="autoshard",
            reward="estimated",
            objective="compute",
            goal="balance",
            learner="critic",
            iterations=60,
            hyper=Hyperparameters(entropy=0.001, shape=_SHAPE),
        ),
        _OF_ALL,
        {"hyper.entropy": 0},
    ),
    # Around and around: ten plans of the policy are measured, the cost network learns from all that
    # was, the policy learns in the game that it estimates, ten games of a task at a time, by
    # REINFORCE with their mean as the baseline.
    "dreamshard": Recipe(
        PPOShardConfig(
            recipe="dreamshard",
            reward="estimated",
            objective="compute",
            collect=10,
            learner="reinforce",
            iterations=100,
            games=40,
            check_every=10,
            hyper=Hyperparameters(learning_rate=3e-3, entropy=0.001, rivals=10, shape=_SHAPE),
        ),
        ("reward", *_OF_ALL),
        {"collect": 0, "hyper.entropy": 0},
    ),
}


def begun_with(config: PPOShardConfig) -> PPOShardConfig:
    """What a command line is to begin with that names this configuration's recipe, if any."""
    return PPOShardConfig() if config.recipe is None else RECIPES[config.recipe].settings


def check_recipe(config: PPOShardConfig) -> None:
    """UserError if settings contradict the recipe."""
    if config.recipe is None:
        return
    recipe = RECIPES[config.recipe]
    for name in recipe.fixed:
        asked, fixed = (attrgetter(name)(some) for some in (config, recipe.settings))
        if asked != fixed:
            raise UserError(
                f"--recipe {config.recipe} goes {_option(name, fixed)}: leave out "
                f"{_option(name, asked).removeprefix('with ')}, or the recipe"
            )
    check_bounds(config, more_than=recipe.more_than)


def _option(name: str, value: object) -> str:
    """As it is typed, or not."""
    *parts, last = name.replace("_", "-").split(".")
    if value is None:
        return f"without --{'.'.join([*parts, last])}"
    if isinstance(value, bool):
        return "with --" + ".".join([*parts, last if value else f"no-{last}"])
    return f"with --{'.'.join([*parts, last])} {value}"
