"""Published systems as configurations of our training.

Rewards and learners are those of the paper, on our network and our cost model.
"""

from operator import attrgetter

from autoshard.experiments.training.config import Hyperparameters, PPOShardConfig, RecipeName
from autoshard.sharders.policy.network import PolicyShape
from autoshard.workload import UserError
from autoshard.workload.bounds import check_bounds

# Options that a recipe fixes, because they define the system.
_FIXED = (
    "families", "objective", "goal", "learner", "hyper.shape.sharpness", "hyper.shape.kinds",
)  # fmt: skip
_POSITIVE = ("collect", "hyper.entropy")  # must be positive if the recipe's are
_SHAPE = PolicyShape(sharpness=0.0, kinds=())  # no greedy initialisation, whole tables

RECIPES: dict[RecipeName, PPOShardConfig] = {
    # A policy gradient with a critic and an entropy bonus; a plan is worth its balance, the least
    # over the greatest cost of a device. The paper measures each plan, which takes hours on two
    # cores (--reward measured does it); by default a trained cost model rewards.
    "autoshard": PPOShardConfig(
        recipe="autoshard",
        reward="estimated",
        objective="compute",
        goal="balance",
        learner="critic",
        iterations=60,
        hyper=Hyperparameters(entropy=0.001, shape=_SHAPE),
    ),
    # In rounds: ten plans of the policy are measured, the cost network learns from all of them,
    # and the policy learns from its estimates: ten episodes of a task at a time, by REINFORCE with
    # their mean return as the baseline.
    "dreamshard": PPOShardConfig(
        recipe="dreamshard",
        reward="estimated",
        objective="compute",
        collect=10,
        learner="reinforce",
        iterations=100,
        num_envs=40,
        check_every=10,
        hyper=Hyperparameters(learning_rate=3e-3, entropy=0.001, group_size=10, shape=_SHAPE),
    ),
}


def recipe_defaults(config: PPOShardConfig) -> PPOShardConfig:
    """Returns the default options for this configuration's recipe, if any."""
    return PPOShardConfig() if config.recipe is None else RECIPES[config.recipe]


def check_recipe(config: PPOShardConfig) -> None:
    """Raises UserError if options contradict the recipe."""
    if config.recipe is None:
        return
    recipe = RECIPES[config.recipe]
    for name in (*_FIXED, *(("reward",) if recipe.collect else ())):
        given, fixed = attrgetter(name)(config), attrgetter(name)(recipe)
        if given != fixed:
            raise UserError(
                f"--recipe {config.recipe} goes {_option(name, fixed)}: leave out "
                f"{_option(name, given).removeprefix('with ')}, or the recipe"
            )
    check_bounds(config, more_than={n: 0 for n in _POSITIVE if attrgetter(n)(recipe) > 0})


def _option(name: str, value: object) -> str:
    """Returns an option as it is typed."""
    option = f"--{name.replace('_', '-')}"
    if value is None:
        return f"without {option}"
    if isinstance(value, tuple):
        value = " ".join(value)
    return f"with {option} {value}".rstrip()
