#!/usr/bin/env python
"""Train a small model by a plan with TorchRec, and measure its step time."""

import math
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from autoshard.benchmark.backends import RequestedKind
from autoshard.benchmark.rehearsals.times import MUCH
from autoshard.experiments.console import cli
from autoshard.experiments.console.inputs import check_file
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.evaluation.task_sets import TORCHREC_DEFAULT
from autoshard.integration.rehearsal.rank_group import (
    MIN_ROUNDS,
    ROUND_STEPS,
    Effort,
    RankGroup,
)
from autoshard.sharders import make_sharder, spec_of
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
from autoshard.workload.tables.operators import Optimizer

_ANY_BYTES = 2**50  # not checked before training


@dataclass(frozen=True)
class TrainTorchRecConfig:
    """Train a small model by a plan with TorchRec, and measure each phase of a step.

    TorchRec's DistributedModelParallel places the tables by the plan, with one process per device
    on a Ray cluster, which is found or started. Lookups follow the tables' descriptions; the dense
    layers are small. Requires TorchRec.
    """

    tables: str
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    plan: Path | None = None
    """File of a plan for these tables, with a rank for each device. Excludes --planner."""
    planner: str | None = None
    """TorchRec's own planner, in place of --plan. torchrec_default: all sharding types that it
    offers for the devices. torchrec: whole tables; torchrec_columns_rows, torchrec_all and
    so on: also these types. Requires --num-devices."""
    num_devices: int | None = None
    """Number of devices of --planner."""
    devices: RequestedKind = "auto"
    """Kind of devices; auto: GPUs if the cluster has any, else cores. Ranks take turns on cores of
    one machine, and on one GPU if there are fewer than ranks."""
    batch_size: int = 1024
    """Samples of a batch, of all ranks together."""
    optimizer: Optimizer = "rowwise_adagrad"
    """Optimizer of the tables."""
    steps: int = 100
    """Number of timed steps, after a few that are not timed. Ranks that take turns run them in
    rounds of ten, each with models built anew."""
    at_once: bool = False
    """All ranks compute at the same time, also on cores of one machine, which slow each other down.
    By default those take turns, each with the machine to itself, and a step is composed of what
    each computed."""
    pipelined: bool = False
    """Train by TorchRec's TrainPipelineSparseDist, which distributes the lookups of the next batch
    beside the forward pass. By default one batch follows another."""
    json: Path | None = None
    """File for the times of all steps."""

    @property
    def sharder(self) -> str | None:
        """The planner, if it makes a plan of ours."""
        return None if self.planner == TORCHREC_DEFAULT else self.planner

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        if (self.plan is None) == (self.planner is None):
            raise UserError("name a plan with --plan, or let TorchRec plan with --planner")
        if self.sharder is not None and "torchrec" not in spec_of(self.sharder).needs:
            raise UserError(
                f"--planner {self.planner}: is not TorchRec's: name torchrec, or make a plan with "
                f"shard.py --sharder {self.planner}"
            )
        if (self.planner is None) != (self.num_devices is None):
            raise UserError(
                "--num-devices goes with --planner and with nothing else: a plan has its own number"
            )
        check_bounds(self, at_least=dict.fromkeys(("num_devices", "batch_size", "steps"), 1))
        check_file(self.json, "--json")


def main(config: TrainTorchRecConfig) -> None:
    """Trains, and prints and writes the step times."""
    config.check()
    tables = load_tables(config.tables)
    plan = None
    if config.plan is not None:
        plan = ShardingPlan.load(config.plan)
        with documents.naming(config.plan):
            plan.check_columns(tables)
    ranks = config.num_devices or 1
    if plan is not None:
        ranks = plan.num_devices if plan.replicas is None else plan.replicas.num_devices
    operator = OperatorOptions(optimizer=config.optimizer)
    task = ShardingTask(tables, Device.uniform(ranks, _ANY_BYTES), config.batch_size, operator)
    in_turns = False if config.at_once else None
    with (
        ray_cluster(),
        closing(
            RankGroup(ranks, config.devices, in_turns, "pipelined" if config.pipelined else "plain")
        ) as found,
    ):
        if found.in_turns:
            cli.note(
                "the ranks share a machine or a GPU, so they compute in turns, and a step is "
                "composed of what each computed (--at-once: all at the same time)"
            )
        if config.sharder is not None:
            plan = make_sharder(config.sharder).shard(replace(task, devices=found.devices()))
        where = ", ".join(place.name for place in found.places)
        cli.say(f"training {len(tables)} tables on {where}")
        if found.in_turns:
            rounds = max(MIN_ROUNDS, math.ceil(config.steps / ROUND_STEPS))
            rehearsal = found.train_interleaved(task, {"": plan}, Effort(rounds))[""]
        else:
            found.prepare("", task, plan)
            rehearsal = found.train("", config.steps)
    cli.console.print(rehearsal.table(str(config.plan or config.planner)))
    if rehearsal.disturbed > MUCH and not found.in_turns:
        cli.note(
            f"other processes took {rehearsal.disturbed:.0%} of the ranks' cores: steps took longer"
        )
    losses = rehearsal.losses
    cli.say(f"loss: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last")
    if config.json is not None:
        documents.write(config.json, rehearsal.to_json())


if __name__ == "__main__":
    cli.run_command(main, TrainTorchRecConfig)
