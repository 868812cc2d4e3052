#!/usr/bin/env python
"""The tour of a minute: measure shards, then measure what three plans of the same tables cost."""

from dataclasses import dataclass
from pathlib import Path

from benchmark import BenchmarkPool, PlanCost, measure_plan
from cost_model import EstimatedCosts, load_model
from experiments import cli, collect_costs
from experiments.cluster import ray_cluster
from sharders import LocalSearchSharder, make_sharder
from workload import Device, Sharder, ShardingPlan, ShardingTask, load_tables

_BATCH_SIZE = 1024  # what the small profile of synthetic tables is made for
_HEURISTICS = ("round_robin", "size_lookup")
_SEARCH = "search"


@dataclass(frozen=True)
class DemoConfig:
    """Measure shards of synthetic tables, then two plans of heuristics and one of a cost model."""

    out: Path = Path("demo")
    """Folder for the store, the plans and their pictures."""
    num_tables: int = 40
    """Tables to be placed, on as many devices as the pool has."""


def main(config: DemoConfig) -> None:
    """Collect, then compare the plans."""
    config.out.mkdir(parents=True, exist_ok=True)
    source = f"synthetic:{config.num_tables}:1:small"
    store = config.out / "costs.db"
    with ray_cluster():
        cli.console.rule("1. measure random shards", align="left")
        collect_costs.main(
            collect_costs.CollectConfig(
                tables=source,
                num_shards=60,
                max_tables=12,
                batch_size=_BATCH_SIZE,
                store=store,
                json=config.out / "summary.json",
                mlflow_uri=f"sqlite:///{(config.out / 'mlflow.db').resolve()}",
            )
        )
        cli.console.rule("2. measure three plans of the same tables", align="left")
        pool = BenchmarkPool(store)
        devices = Device.uniform(max(2, len(pool.devices())), 2**31)
        task = ShardingTask(load_tables(source), devices, _BATCH_SIZE)
        task.save(config.out / "task.json")
        sharders: dict[str, Sharder] = {name: make_sharder(name) for name in _HEURISTICS}
        oracle = EstimatedCosts(load_model("cpu", pool.devices()[0].hardware), task.batch_size)
        sharders[_SEARCH] = LocalSearchSharder(oracle)
        costs = {
            name: _measured(name, sharder.shard(task), task, pool, config.out)
            for name, sharder in sharders.items()
        }
        pool.close()
    for name in _HEURISTICS:
        ours, theirs = costs[_SEARCH].max_compute_ms, costs[name].max_compute_ms
        cli.console.print(
            f"the slowest device computes {ours:.2f} ms by {_SEARCH} (over the shipped cost model) "
            f"and {theirs:.2f} ms by {name}: {1 - ours / theirs:+.1%} saved",
            soft_wrap=True,
        )
    cli.console.print(f"plans and pictures are in {config.out}/")


def _measured(
    name: str, plan: ShardingPlan, task: ShardingTask, pool: BenchmarkPool, out: Path
) -> PlanCost:
    plan.save(out / f"{name}.plan.json")
    cost = measure_plan(plan, task, pool)
    cost.picture(out / f"{name}.png", name)
    cli.console.print(cost.table(name))
    return cost


if __name__ == "__main__":
    cli.run_command(main, DemoConfig)
