#!/usr/bin/env python
"""Shard your own tables: a plan of who holds what, and what it will cost."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from autoshard.benchmark import MeasurementStore, MeasureSettings
from autoshard.cost_model import EstimatedCosts, TaskOutlook, load_model
from autoshard.cost_model.telling import held_piece
from autoshard.cost_model.training import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.imports import model_tables
from autoshard.experiments.console.outputs import PICTURES, check_file
from autoshard.experiments.judging.judge import judge_plan
from autoshard.experiments.judging.knowledge import Knowledge
from autoshard.experiments.judging.shard_visits import (
    SEEDS,
    ShardVisits,
    judging_seeds,
    plan_pool,
    told_as,
)
from autoshard.experiments.training.loading import check_sharders, model_beside, oracle_for
from autoshard.sharders import (
    BY_NO_MODEL,
    HEURISTICS,
    NEED_POLICY,
    NEED_POOL,
    Means,
    load_policy,
    make_measuring,
    make_sharder,
)
from autoshard.workload import (
    Device,
    EmbeddingTable,
    OperatorOptions,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
    load_tables,
)
from autoshard.workload.bounds import check_bounds

_GB = 2**30
JUDGED = 1000  # from here on are the index batches by which a plan is held against its promise
_MOST_GB = 2**32  # more than there is
_ALIKE = 5e-4  # a relative difference that would read 0.0 %


@dataclass(frozen=True)
class ShardConfig:
    """Decide which device holds which table, or which of its columns.

    It needs neither a cluster nor a network: costs are estimated by a cost model. With --measure
    it measures what tells most about the tables, and learns from it.
    """

    tables: str | None = None
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_devices: int = tyro.MISSING
    """Devices to shard over."""
    memory_gb: str = tyro.MISSING
    """GB (of 2^30 bytes) that weights and optimizer state may take of a device: one number for
    all, or one for each with commas between them."""
    model: str | None = None
    """In place of --tables: MODULE:NAME of a TorchRec model, or of a function that makes it. The
    module is imported from here, or from where Python finds it."""
    batches: str | None = None
    """With --model: MODULE:NAME of batches of one rank, or of a function that makes them. Lookups
    are counted in a few."""
    sharder: str = "autoshard"
    """Who decides: autoshard, policy, cost, size_lookup, ...; a wrong name lists them all."""
    out: Path = Path("plan.json")
    """File for the plan."""
    picture: Path | None = None
    """PNG or SVG of what each device costs."""
    batch_size: int = 1024
    """Samples of a batch, of all ranks together."""
    policy: Path = Path("cpu")
    """Folder of a policy, as ppo_shard.py makes it, or the name of one that is shipped."""
    cost_model: Path | None = None
    """Folder of a cost model, or the name of one that is shipped; by default the one in the
    policy's folder, else the shipped one."""
    seed: int = 0
    """Of sharders that draw."""
    measure: bool = False
    """Measure, on the Ray cluster that is found or started, what tells most about these tables;
    learn from it, plan again, measure the best plans. autoshard_verified always does."""
    seconds: float = 60.0
    """That measuring for the plan may take; its plan's own measurement comes after."""
    verified: int = 3
    """Plans that are measured in the end: all once, the better half again, and so on."""
    store: Path = Path("costs.db")
    """SQLite file that keeps what is measured. What it knows of the tables is used in any case."""

    def check(self) -> None:
        """UserError unless the options make sense."""
        check_sharders([self.sharder])
        if (self.tables is None) == (self.model is None):
            raise UserError("name a file of tables with --tables, or a TorchRec model with --model")
        if self.batches is not None and self.model is None:
            raise UserError("--batches are those of a model: name it with --model")
        if self.measure and self.sharder in BY_NO_MODEL:
            raise UserError(
                f"--measure teaches a cost model, which {self.sharder} does not go by: leave it out"
            )
        counts = ("num_devices", "batch_size", "verified")
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), "seed": 0},
            more_than={"seconds": 0},
        )
        check_file(self.out, "--out")
        check_file(self.picture, "--picture", PICTURES)

    def workload(self, known: OperatorOptions) -> tuple[EmbeddingTable, ...]:
        """The tables; UserError if a model's store other than the cost model knows."""
        if self.model is None:
            assert self.tables is not None
            return load_tables(self.tables)
        found = model_tables(self.model, self.batches, self.num_devices)
        if found.operator != known:
            raise UserError(
                f"--model {self.model}: its tables are {found.operator}, and the cost model knows "
                f"those that are {known}: name another with --cost-model, which learned from "
                "collect_costs.py with their --weights and --optimizer"
            )
        return found.tables

    def devices(self) -> tuple[Device, ...]:
        """The devices with their memory; UserError unless it is one number, or one for each."""
        try:
            numbers = [float(part) for part in self.memory_gb.split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(0 < number < _MOST_GB for number in numbers):
            raise UserError(
                f"--memory-gb must be a number more than 0, or one for each device as in 16,16,32, "
                f"got {self.memory_gb!r}"
            )
        if len(numbers) not in (1, self.num_devices):
            raise UserError(
                f"--memory-gb names {len(numbers)} devices and --num-devices {self.num_devices}: "
                "give one number for all, or one for each"
            )
        each = numbers * (self.num_devices // len(numbers))
        return tuple(Device(f"device{n}", int(number * _GB)) for n, number in enumerate(each))


@one_thread()  # of several, each waits for the others: networks this small gain nothing
def main(config: ShardConfig) -> None:
    """Plan, say what the plan costs beside the best heuristic's, write it."""
    config.check()
    devices, policy = config.devices(), load_policy(config.policy)
    model = load_model(config.cost_model or model_beside(config.policy))
    tables = config.workload(model.provenance.operator)
    if config.sharder in NEED_POLICY:
        policy.check(len(devices))
    oracle = oracle_for(model, config.batch_size, tables, config.store)
    task = ShardingTask(tables, devices, config.batch_size, model.provenance.operator)
    means = Means(
        oracle,
        policy,
        verified=config.verified,
        measure_seconds=config.seconds,
        seed=config.seed,
    )
    if config.measure or config.sharder in NEED_POOL:
        plan, oracle, told = _measured(config, task, means)
    else:
        plan, told = make_sharder(config.sharder, means).shard(task), []
    plan.check(task)
    cost = oracle.plan_cost(plan, task)
    cli.console.print(cost.table(f"{config.sharder}, estimated"))
    for line in (_compared(config, oracle, task, plan), *told):
        cli.console.print(line, soft_wrap=True)
    if config.picture is not None:
        cost.picture(config.picture, config.sharder)
    plan.save(config.out)
    cli.console.print(f"the plan is in {config.out}", soft_wrap=True)


def _measured(
    config: ShardConfig, task: ShardingTask, means: Means
) -> tuple[ShardingPlan, EstimatedCosts, list[str]]:
    """A plan that was measured while it was made, what is known by then, and what is said of it."""
    assert means.oracle is not None
    model = means.oracle.model
    MeasurementStore(config.store).close()  # one that cannot be used is told at once
    with plan_pool(config.store) as pool:
        settings = MeasureSettings(config.batch_size, task.operator)
        seeds = [JUDGED + seed for seed in judging_seeds(SEEDS)]
        knowledge = Knowledge(pool, model, settings, tables=task.tables, unseen=seeds)
        said = _standing_in(task, knowledge)
        before = knowledge.shards
        plan = make_measuring(config.sharder, replace(means, measurer=knowledge)).shard(task)
        said.append(
            f"measured: {knowledge.shards - before} shards in {knowledge.seconds:.0f} s; "
            f"{knowledge.shards} of such batches are known by now"
        )
        oracle = knowledge.informed(means.oracle)
        judging = ShardVisits(pool, settings, seeds, told=told_as(model, pool))
        found = judge_plan(judging, task, plan, visits=SEEDS)
    if found is None:
        return plan, oracle, [*said, "measured: a shard of the plan could not be"]
    (low, high), promise = found.interval_ms, TaskOutlook(oracle, task).of(plan)
    said.append(
        f"measured: {found.mean_ms:.2f} ms (95 % interval {low:.2f} to {high:.2f} ms), which is "
        f"{found.mean_ms / promise.expected_ms:.3f} of what was promised"
    )
    return plan, oracle, said


def _standing_in(task: ShardingTask, knowledge: Knowledge) -> list[str]:
    """What is said of tables that no device can hold for measuring."""
    pieces = [held_piece(table, knowledge.fits) for table in task.tables]
    parts = sum(p.table is t and p.width < t.dim for p, t in zip(pieces, task.tables, strict=True))
    lower = sum(p.table is not t for p, t in zip(pieces, task.tables, strict=True))
    if not parts and not lower:
        return []
    return [
        f"note: {parts + lower} tables do not fit into a device that measures: {parts} are learned "
        f"from some of their columns, {lower} from tables with fewer rows"
    ]


def _compared(
    config: ShardConfig, oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan
) -> str:
    """What the slowest device is expected to compute, and how that is to the best heuristic's."""
    outlook = TaskOutlook(oracle, task)
    ours, theirs = outlook.of(plan), {}
    for name in HEURISTICS:
        with suppress(PlanError):
            theirs[name] = outlook.of(make_sharder(name, Means(seed=config.seed)).shard(task))
    low, high = ours.interval_ms
    line = (
        f"expected: the slowest device computes {ours.expected_ms:.2f} ms a step (90 % interval "
        f"{low:.2f} to {high:.2f}; all-to-all left out)"
    )
    if not theirs:
        return f"{line}; no heuristic finds a plan that fits"
    best = min(theirs, key=lambda name: theirs[name].expected_ms)
    than = ours.over(theirs[best])
    if config.sharder == best or abs(1 - than.ratio) < _ALIKE:
        return f"{line}, the least of any heuristic"
    less = f"{1 - than.ratio:.1%} less" if than.ratio < 1 else f"{than.ratio - 1:.1%} more"
    return (
        f"{line}, {less} than by the best heuristic ({best}, {theirs[best].expected_ms:.2f} ms): "
        f"{than.low:.3f} to {than.high:.3f} of it, faster with probability {than.probability:.2f}"
    )


if __name__ == "__main__":
    cli.run_command(main, ShardConfig)
