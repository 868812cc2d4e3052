#!/usr/bin/env python
"""Train a small model by a plan, with TorchRec, and say what a step takes."""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autoshard.benchmark.backends import RequestedKind
from autoshard.benchmark.rehearsal.rehearsal import RankGroup
from autoshard.benchmark.rehearsal.times import MUCH
from autoshard.experiments.console import cli
from autoshard.experiments.console.outputs import check_file
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.sharders import SHARDERS, make_sharder
from autoshard.workload import (
    Device,
    OperatorOptions,
    ShardingPlan,
    ShardingTask,
    UserError,
    documents,
    load_tables,
)
from autoshard.workload.bounds import check_bounds
from autoshard.workload.operators import Optimizer

_ANY_BYTES = 2**50  # what devices really have is for those to say that train


@dataclass(frozen=True)
class TrainTorchRecConfig:
    """Train a small model by a plan, for real, and say what a step takes, phase by phase.

    The tables lie as the plan says in TorchRec's DistributedModelParallel, one process a device on
    the Ray cluster that is found or started, and are looked up as they tell; what is dense in the
    model is small. It needs TorchRec.
    """

    tables: str
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    plan: Path | None = None
    """A plan for these tables, as shard.py writes it. It has a rank for each device."""
    planner: Literal["torchrec_default", "torchrec", "torchrec_columns"] | None = None
    """In place of --plan: let TorchRec's own planner decide, over all ways that it knows (by rows
    and copies, too), over whole tables, or over tables and their columns."""
    num_devices: int | None = None
    """Devices that --planner plans for."""
    devices: RequestedKind = "auto"
    """cuda, cpu, or auto: GPUs where the cluster has any, cores elsewhere."""
    batch_size: int = 1024
    """Samples of a batch, of all ranks together."""
    optimizer: Optimizer = "rowwise_adagrad"
    """Of the tables."""
    steps: int = 100
    """Steps that are timed, after a few that are not."""
    json: Path | None = None
    """Write the times of all steps here."""

    def check(self) -> None:
        """UserError unless the options make sense."""
        if (self.plan is None) == (self.planner is None):
            raise UserError("name a plan with --plan, or let TorchRec plan with --planner")
        if (self.planner is None) != (self.num_devices is None):
            raise UserError(
                "--num-devices goes with --planner and with nothing else: a plan has its own"
            )
        check_bounds(self, at_least=dict.fromkeys(("num_devices", "batch_size", "steps"), 1))
        check_file(self.json, "--json")


def main(config: TrainTorchRecConfig) -> None:
    """Train, say what steps take."""
    config.check()
    tables = load_tables(config.tables)
    plan = None
    if config.plan is not None:
        plan = ShardingPlan.load(config.plan)
        with documents.naming(config.plan):
            plan.check_columns(tables)
    ranks = plan.num_devices if plan is not None else config.num_devices or 1
    operator = OperatorOptions(optimizer=config.optimizer)
    task = ShardingTask(tables, Device.uniform(ranks, _ANY_BYTES), config.batch_size, operator)
    with ray_cluster(), closing(RankGroup(ranks, config.devices)) as found:
        if found.ranks_per_core > 1:
            cli.console.print(
                f"note: {ranks} ranks share {ranks / found.ranks_per_core:.0f} cores: they train "
                "as they would, but steps take longer than with a core for each",
                soft_wrap=True,
            )
        if config.planner in SHARDERS:
            plan = make_sharder(config.planner).shard(replace(task, devices=found.devices()))
        found.prepare("", task, plan)
        where = ", ".join(place.name for place in found.places)
        cli.console.print(f"training {len(tables)} tables on {where}", soft_wrap=True)
        rehearsal = found.train("", config.steps)
    cli.console.print(rehearsal.table(str(config.plan or config.planner)))
    if rehearsal.disturbed > MUCH and found.ranks_per_core == 1:
        cli.console.print(
            f"note: others took {rehearsal.disturbed:.0%} of the ranks' cores meanwhile: steps "
            "take longer than they would",
            soft_wrap=True,
        )
    losses = rehearsal.losses
    cli.console.print(f"loss: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last")
    if config.json is not None:
        documents.write(config.json, rehearsal.to_json())


if __name__ == "__main__":
    cli.run_command(main, TrainTorchRecConfig)
