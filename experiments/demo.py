#!/usr/bin/env python
"""A demo of a few minutes: measure, calibrate, train a policy, compare its plans."""

import sys
from dataclasses import dataclass
from pathlib import Path

from autoshard.cost_model import DataError
from autoshard.experiments import collect_costs, compare, ppo_shard, train_cost_model
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.inputs import check_folder
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.sharders import USUAL_HEURISTICS
from autoshard.workload.bounds import check_bounds

_TABLES = "synthetic:400:1:small"
_BATCH_SIZE = 1024  # batch size of the small profile of synthetic tables
# Shares of the remaining seconds when a part begins. After the last part, time is left to finish
# measurements, to draw and to log.
_COLLECTING_SHARE, _TRAINING_SHARE, _COMPARING_SHARE = 0.3, 0.45, 0.85
_VERIFYING_SHARE = 0.25  # share of the time to compare, for measurements by autoshard_verified
_MIN_COMPARING_S = 60.0  # in any case, because the comparison is the purpose of the demo
_SHIPPED = "cpu"


@dataclass(frozen=True)
class DemoConfig:
    """Measure, calibrate, train a policy and compare plans, each for a short time."""

    out: Path = Path("demo")
    """Folder for the store, the cost model, the policy, the plans and the MLflow runs."""
    iterations: int = 10
    """Maximum number of PPO iterations."""
    num_tasks: int = 3
    """Number of tasks (60 tables, 4 devices) to begin the comparison with."""
    precision: float = 0.01
    """Largest half width of the 95 % intervals of ratios to the best heuristic, at which measuring
    ends before the time limit."""
    seconds: float = 270.0
    """Time limit in seconds. A slow machine measures fewer shards, trains for fewer iterations and
    compares plans with wider intervals."""


def main(config: DemoConfig) -> None:
    """Measures, calibrates, trains and compares; uses the measurements of earlier demos."""
    budget = Budget(config.seconds)
    check_folder(config.out, "--out")
    check_bounds(config, at_least={"iterations": 1, "num_tasks": 1}, more_than={"precision": 0})
    config.out.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{(config.out / 'mlflow.db').resolve()}"
    store, model, policy = (config.out / name for name in ("costs.db", "cost_model", "policy"))
    with ray_cluster():
        seconds = _begin("1. measure random shards", budget, _COLLECTING_SHARE)
        collect_costs.main(
            collect_costs.CollectConfig(
                tables=_TABLES,
                num_shards=60,
                max_tables=24,
                batch_size=(_BATCH_SIZE,),
                store=store,
                seconds=seconds,
                json=config.out / "collected.json",
                mlflow_uri=uri,
            )
        )
        _begin("2. calibrate the shipped cost model to this machine")
        cost_model = _calibrated(store, model, uri)
        seconds = _begin("3. train a sharding policy with PPO", budget, _TRAINING_SHARE)
        ppo_shard.main(
            PPOShardConfig(
                tables=_TABLES,
                cost_model=cost_model,
                iterations=config.iterations,
                seconds=seconds,
                check_every=5,
                test_seconds=0,  # the comparison measures
                out=policy,
                store=store,
                force=True,
                mlflow_uri=uri,
            )
        )
        title = "4. measure its plans beside those of heuristics"
        seconds = _begin(title, budget, _COMPARING_SHARE, _MIN_COMPARING_S)
        cli.say(
            f"plans and pictures will be in {config.out / 'plans'}/; browse all runs with: "
            f"{Path(sys.executable).with_name('mlflow')} ui --backend-store-uri {uri}"
        )
        compare.main(
            compare.CompareConfig(
                tables=_TABLES,
                num_tasks=config.num_tasks,
                sharders=",".join((*USUAL_HEURISTICS, "autoshard", "autoshard_verified")),
                policy=policy,
                measure=True,
                precision=config.precision,
                seconds=seconds,
                verify_seconds=_VERIFYING_SHARE * seconds / config.num_tasks,
                store=store,
                out=config.out / "plans",
                json=config.out / "compare.json",
                mlflow_uri=uri,
            )
        )


def _begin(
    title: str, budget: Budget | None = None, share: float = 0.0, min_s: float = 1.0
) -> float:
    """Prints the title of a part, and returns its time limit in seconds."""
    seconds = 0.0 if budget is None else max(min_s, round(share * budget.left_s()))
    cli.console.rule(f"{title}, {seconds:g} s at most" if seconds else title, align="left")
    return seconds


def _calibrated(store: Path, out: Path, mlflow_uri: str) -> str:
    """Returns the shipped cost model, calibrated if there are enough measurements."""
    try:
        train_cost_model.main(
            train_cost_model.TrainConfig(
                store=(store,), out=out, calibrate=Path(_SHIPPED), force=True, mlflow_uri=mlflow_uri
            )
        )
    except DataError as error:
        cli.note(f"the shipped model is used as it is: {error}")
        return _SHIPPED
    return str(out)


if __name__ == "__main__":
    cli.run_command(main, DemoConfig)
