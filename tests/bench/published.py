"""Measured plans for families of tasks, compared with published systems."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autoshard.envs.task_families import FAMILIES
from autoshard.experiments import ppo_shard
from autoshard.experiments.training.config import RecipeName
from autoshard.experiments.training.recipes import RECIPES
from bench.metric import Metric
from bench.policy import compared, paired
from bench.workbench import say

_TRAINING_SECONDS, _MEASURING_SECONDS = 300.0, 240.0  # per recipe; per family, at most
_MAX_ITERATIONS = 10_000  # more than the seconds allow
_TASKS = 6
_RECIPES_ON = "large"  # family of the recipes' training tables
_FAMILIES = (_RECIPES_ON, "directions")  # other families gain less, or need the memory of a cluster
_OURS = ("cost_fused", "policy", "autoshard")


def published_metrics(folder: Path) -> list[Metric]:
    """Compares the policy with cost_fused, and autoshard with the recipes on their training
    distribution.
    """
    recipes = {f"{name}_recipe": _trained(folder, name) for name in RECIPES}
    return [metric for family in _FAMILIES for metric in _metrics(folder, family, recipes)]


def _metrics(folder: Path, family: str, recipes: dict[str, Path]) -> Iterator[Metric]:
    say(f"plans for {FAMILIES[family].text}")
    known = recipes if family == _RECIPES_ON else {}
    scores = compared(
        folder, family, _OURS, _MEASURING_SECONDS, family=f"{family}:loose", num_tasks=_TASKS,
        policies=",".join(f"{name}={path}" for name, path in known.items()) or None,
    )  # fmt: skip
    yield paired(scores, "policy", "cost_fused", "at most 0.97", family)
    yield paired(scores, "autoshard", "cost_fused", family=family)
    for name in known:
        yield paired(scores, "autoshard", name, "at most 0.95", family)


def _trained(folder: Path, recipe: RecipeName) -> Path:
    say(f"training by the recipe {recipe}")
    out = folder / recipe
    ppo_shard.main(
        replace(
            RECIPES[recipe],
            tables=FAMILIES[_RECIPES_ON].source,
            num_tables="60-100",
            num_devices="4-8",
            iterations=_MAX_ITERATIONS,
            seconds=_TRAINING_SECONDS,
            test_seconds=0,
            out=out,
            mlflow_uri=f"sqlite:///{folder / 'mlflow.db'}",
        )
    )
    return out
