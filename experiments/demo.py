#!/usr/bin/env python
"""The tour of a few minutes: measure, learn, train a policy, compare its plans with heuristics'."""

from dataclasses import dataclass
from pathlib import Path

from experiments import cli, collect_costs, compare, ppo_shard, train_cost_model
from experiments.joining import ray_cluster
from experiments.outputs import check_folder
from experiments.ppo_config import PPOShardConfig
from workload import UserError

_TABLES = "synthetic:400:1:small"
_BATCH_SIZE = 1024  # what the small profile of synthetic tables is made for
_HEURISTICS = "random,dim,size,lookup,size_lookup"


@dataclass(frozen=True)
class DemoConfig:
    """From a fresh machine to a measured plan: everything that autoshard does, briefly."""

    out: Path = Path("demo")
    """Folder for the store, the models, the policy, the plans and MLflow's runs."""
    iterations: int = 10
    """Of PPO."""
    num_tasks: int = 3
    """Tasks of 60 tables, for 4 devices, to begin comparing plans on."""
    precision: float = 0.01
    """Plans are measured until the 95 % interval of each sharder's ratio to the best heuristic is
    within plus and minus this,"""
    seconds: float = 90.0
    """or until so many seconds are spent on comparing; the table says with which intervals."""


def main(config: DemoConfig) -> None:
    """Collect, calibrate, train, compare. What an earlier tour has measured is used again."""
    check_folder(config.out, "--out")
    if min(config.iterations, config.num_tasks) < 1:
        raise UserError("--iterations and --num-tasks must be at least 1")
    if not min(config.precision, config.seconds) > 0:
        raise UserError("--precision and --seconds must be more than 0")
    config.out.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{(config.out / 'mlflow.db').resolve()}"
    store, model, policy = (config.out / name for name in ("costs.db", "cost_model", "policy"))
    with ray_cluster():
        cli.console.rule("1. measure random shards", align="left")
        collect_costs.main(
            collect_costs.CollectConfig(
                tables=_TABLES,
                num_shards=60,
                max_tables=24,
                batch_size=_BATCH_SIZE,
                store=store,
                json=config.out / "collected.json",
                mlflow_uri=uri,
            )
        )
        cli.console.rule("2. calibrate the shipped cost model to this machine", align="left")
        train_cost_model.main(
            train_cost_model.TrainConfig(
                store=(store,), out=model, calibrate=Path("cpu"), force=True, mlflow_uri=uri
            )
        )
        cli.console.rule("3. train a sharding policy with PPO", align="left")
        ppo_shard.main(
            PPOShardConfig(
                tables=_TABLES,
                cost_model=str(model),
                iterations=config.iterations,
                check_every=5,
                out=policy,
                store=store,
                force=True,
                mlflow_uri=uri,
            )
        )
        cli.console.rule("4. measure its plans beside those of heuristics", align="left")
        cli.console.print(
            f"plans and pictures will be in {config.out / 'plans'}/; browse all runs with: make "
            f"mlflow STORE={uri}",
            soft_wrap=True,
        )
        compare.main(
            compare.CompareConfig(
                tables=_TABLES,
                num_tasks=config.num_tasks,
                sharders=f"{_HEURISTICS},autoshard,autoshard_verified",
                policy=policy,
                measure=True,
                precision=config.precision,
                seconds=config.seconds,
                store=store,
                out=config.out / "plans",
                json=config.out / "compare.json",
                mlflow_uri=uri,
            )
        )


if __name__ == "__main__":
    cli.run_command(main, DemoConfig)
