#!/usr/bin/env python
"""The tour of a minute: measure shards, then measure what two plans of the same tables cost."""

from dataclasses import dataclass
from pathlib import Path

from benchmark import BenchmarkPool, PlanCost, measure_plan
from experiments import cli, collect_costs
from experiments.cluster import ray_cluster
from sharders import make_sharder
from workload import Device, ShardingTask, load_tables

_BATCH_SIZE = 1024  # what the small profile of synthetic tables is made for
_PLANS = ("round_robin", "size_lookup")


@dataclass(frozen=True)
class DemoConfig:
    """Measure a few shards of synthetic tables, then a round-robin and a greedy plan."""

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
        cli.console.rule("2. measure two plans of the same tables", align="left")
        pool = BenchmarkPool(store)
        devices = Device.uniform(max(2, len(pool.devices())), 2**31)
        task = ShardingTask(load_tables(source), devices, _BATCH_SIZE)
        task.save(config.out / "task.json")
        costs = {name: _plan(name, task, pool, config.out) for name in _PLANS}
        pool.close()
    first, second = (costs[name].max_ms for name in _PLANS)
    cli.console.print(
        f"the slowest device takes {second:.2f} ms with {_PLANS[1]} and {first:.2f} ms with "
        f"{_PLANS[0]}: {1 - second / first:+.1%} saved; plans and pictures are in {config.out}/",
        soft_wrap=True,
    )


def _plan(name: str, task: ShardingTask, pool: BenchmarkPool, out: Path) -> PlanCost:
    plan = make_sharder(name).shard(task)
    plan.save(out / f"{name}.plan.json")
    cost = measure_plan(plan, task, pool)
    cost.picture(out / f"{name}.png", name)
    cli.console.print(cost.table(name))
    return cost


if __name__ == "__main__":
    cli.run_command(main, DemoConfig)
