"""What plans of families of tasks measure, beside those of the published recipes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autoshard.envs.task_families import FAMILIES
from autoshard.experiments import ppo_shard
from autoshard.experiments.training.config import RecipeName
from autoshard.experiments.training.recipes import RECIPES
from bench.figure import Figure
from bench.policy import compared, paired
from bench.workbench import say

_TRAINING_SECONDS, _MEASURING_SECONDS = 300.0, 240.0  # of a recipe; of a family, at most
_MOST = 10_000  # iterations: the seconds are over before
_TASKS = 6
_RECIPES_ON = "large"  # whose tables they are trained on
_FAMILIES = (_RECIPES_ON, "directions")  # others gain less, or need a cluster's memory
_OURS = ("cost_fused", "policy", "autoshard")


def published_figures(folder: Path) -> list[Figure]:
    """The policy over the greedy by cost; `autoshard` over the recipes, on tables of the kind that
    these were trained on.
    """
    recipes = {f"{name}_recipe": _trained(folder, name) for name in RECIPES}
    return [figure for family in _FAMILIES for figure in _figures(folder, family, recipes)]


def _figures(folder: Path, family: str, recipes: dict[str, Path]) -> Iterator[Figure]:
    say(f"plans for {FAMILIES[family].told}")
    known = recipes if family == _RECIPES_ON else {}
    scores = compared(
        folder, family, _OURS, _MEASURING_SECONDS, family=f"{family}:loose", num_tasks=_TASKS,
        policies=",".join(f"{name}={path}" for name, path in known.items()) or None,
    )  # fmt: skip
    told = f"{family}: step, policy over cost_fused"
    yield paired(told, "at most 0.97", scores["policy"], scores["cost_fused"])
    told = f"{family}: step, autoshard over cost_fused"
    yield paired(told, "", scores["autoshard"], scores["cost_fused"])
    for name in known:
        told = f"{family}: step, autoshard over {name}"
        yield paired(told, "at most 0.95", scores["autoshard"], scores[name])


def _trained(folder: Path, recipe: RecipeName) -> Path:
    say(f"training by the recipe {recipe}")
    out = folder / recipe
    ppo_shard.main(
        replace(
            RECIPES[recipe],
            tables=FAMILIES[_RECIPES_ON].source,
            num_tables="60-100",
            num_devices="4-8",
            iterations=_MOST,
            seconds=_TRAINING_SECONDS,
            test_seconds=0,
            out=out,
            mlflow_uri=f"sqlite:///{folder / 'mlflow.db'}",
        )
    )
    return out
