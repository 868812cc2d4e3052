#!/usr/bin/env python
"""Shard your own tables: a plan of who holds what, and what it will cost."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from autoshard.cost_model import EstimatedCosts, TaskOutlook, load_model
from autoshard.cost_model.training import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.devices import read_devices
from autoshard.experiments.console.imports import model_tables
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.console.outputs import PICTURES, check_file
from autoshard.experiments.evaluation.measured_plan import measured_plan
from autoshard.experiments.explaining.explain import explanation
from autoshard.experiments.explaining.layout import show
from autoshard.experiments.explaining.memory import memory_parts
from autoshard.experiments.explaining.plan_files import read_plan
from autoshard.experiments.explaining.rival import beside, best_heuristic
from autoshard.experiments.training.loading import check_sharders, model_beside, oracle_for
from autoshard.sharders import (
    BY_NO_MODEL,
    NEED_POLICY,
    NEED_POOL,
    TAKE_SECONDS,
    Means,
    NearSharder,
    load_policy,
    make_sharder,
)
from autoshard.workload import (
    Constraints,
    Device,
    EmbeddingTable,
    OperatorOptions,
    ShardingPlan,
    ShardingTask,
    UserError,
    load_tables,
)
from autoshard.workload.bounds import check_bounds
from autoshard.workload.moves import moved_bytes, moves_between
from autoshard.workload.sizes import told

_DEFAULT = "autoshard"
_GB = 2**30
_MEASURE_SECONDS = 60.0


@dataclass(frozen=True)
class ShardConfig(ObjectiveOptions):
    """Decide which device holds which table, or which of its columns.

    It needs neither a cluster nor a network: costs are estimated by a cost model. With --measure
    it measures what tells most about the tables, and learns from it.
    """

    tables: str | None = None
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_devices: int = tyro.MISSING
    """Devices to shard over."""
    memory_gb: str = tyro.MISSING
    """GB (of 2^30 bytes) of a device, to be filled with weights, optimizer state and what a batch
    needs: one number for all, or one for each with commas between them."""
    model: str | None = None
    """In place of --tables: MODULE:NAME of a TorchRec model, or of a function that makes it. The
    module is imported from here, or from where Python finds it."""
    batches: str | None = None
    """With --model: MODULE:NAME of batches of one rank, or of a function that makes them. Lookups
    are counted in a few."""
    constraints: Path | None = None
    """YAML file of what plans must obey: tables together, apart, on certain devices, whole, ...,
    and memory that is kept free."""
    sharder: str = _DEFAULT
    """Who decides: autoshard, policy, cost, size_lookup, ...; a wrong name lists them all."""
    plan: Path | None = None
    """File of a plan that is priced as it is, in place of making one; nothing is written."""
    explain: bool = False
    """Say which device is slowest in which phase and why, what would help next, and how the plan
    differs from the best heuristic's."""
    keep_near: Path | None = None
    """File of a plan that is in use: it is improved, step by step, in place of making a new one."""
    most_moved_gb: float | None = None
    """With --keep-near: GB of weights and optimizer state that may move to other devices."""
    out: Path = Path("plan.json")
    """File for the plan."""
    save_task: Path | None = None
    """File for the task as JSON: others take it as --tables, also that of a --model."""
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
    learn from it, plan again. autoshard_verified always does."""
    seconds: float | None = None
    """That planning may take, by default as long as it takes: the policy's own plan comes first,
    the rest is for the search. With --measure, that measuring for the plan may take, by default 60;
    its plan's own measurement comes after."""
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
        if self.seconds is not None and not (
            self.measure or self.sharder in NEED_POOL or self.sharder in TAKE_SECONDS
        ):
            raise UserError(
                f"--seconds are for those who search: {self.sharder} takes as long as it takes"
            )
        if self.plan is not None and (self.measure or self.sharder != _DEFAULT):
            raise UserError("--plan is priced as it is: leave out --sharder and --measure")
        self._check_near()
        self.check_objective(self.num_devices)
        counts = ("num_devices", "batch_size")
        near = {} if self.most_moved_gb is None else {"most_moved_gb": 0}
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), "seed": 0, **near},
            more_than={"seconds": 0},
        )
        check_file(self.out, "--out")
        check_file(self.save_task, "--save-task")
        check_file(self.picture, "--picture", PICTURES)

    def _check_near(self) -> None:
        if (self.keep_near is None) != (self.most_moved_gb is None):
            raise UserError("--keep-near and --most-moved-gb go together: give both, or none")
        if self.keep_near is not None and (self.measure or self.plan or self.sharder != _DEFAULT):
            raise UserError(
                "--keep-near improves a plan by the cost model: leave out --sharder, --measure and "
                "--plan"
            )

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
        counted = {t.reuse_batch_size for t in found.tables if t.reuse_batch_size is not None}
        if counted and counted != {self.batch_size}:
            cli.console.print(
                f"note: the batches of {self.num_devices} ranks have {max(counted)} samples "
                f"together, and --batch-size is {self.batch_size}: lookups are scaled to that",
                soft_wrap=True,
            )
        return found.tables

    def devices(self) -> tuple[Device, ...]:
        """The devices with their memory; UserError unless it is one number, or one for each."""
        return read_devices(self.memory_gb, self.num_devices, "--num-devices")


@one_thread()  # of several, each waits for the others: networks this small gain nothing
def main(config: ShardConfig) -> None:
    """Plan, say what the plan costs beside the best heuristic's, write it."""
    config.check()
    devices, policy = config.devices(), load_policy(config.policy)
    model = load_model(config.cost_model or model_beside(config.policy))
    tables = config.workload(model.provenance.operator)
    if config.sharder in NEED_POLICY and config.plan is None:
        policy.check(len(devices))
    oracle = oracle_for(model, config.batch_size, tables, config.store)
    objective = config.wanted(len(devices), oracle.link)
    operator = model.provenance.operator
    task = ShardingTask(tables, devices, config.batch_size, operator, objective=objective)
    if config.constraints is not None:
        task = Constraints.of_file(config.constraints, task)
    if config.save_task is not None:
        task.save(config.save_task)
    measures = config.measure or config.sharder in NEED_POOL
    means = Means(
        oracle,
        policy,
        measure_seconds=config.seconds or _MEASURE_SECONDS,
        seed=config.seed,
        seconds=None if measures else config.seconds,
    )
    said: list[str] = []
    if config.plan is not None:
        plan = read_plan(config.plan, task, fitting=True)
    elif config.keep_near is not None:
        plan, said = _near(config, task, oracle)
    elif measures:
        plan, oracle, said = measured_plan(config.sharder, task, means, config.store)
    else:
        plan = make_sharder(config.sharder, means).shard(task)
    plan.check(task)
    given = config.plan or config.keep_near
    name = config.sharder if given is None else given.name
    outlook, cost = TaskOutlook(oracle, task), oracle.plan_cost(plan, task)
    rival = best_heuristic(task, outlook, config.seed)
    what = f"near {name}" if config.keep_near else name
    cli.console.print(cost.table(f"{what}, estimated"))
    show(memory_parts(plan, task))
    for line in (beside(name, outlook.of(plan), rival, task.objective), *said):
        cli.console.print(line, soft_wrap=True)
    if config.explain:
        show(explanation(oracle, task, plan, rival))
    if config.picture is not None:
        cost.picture(config.picture, name)
    if config.plan is None:
        plan.save(config.out)
        cli.console.print(f"the plan is in {config.out}", soft_wrap=True)


def _near(
    config: ShardConfig, task: ShardingTask, oracle: EstimatedCosts
) -> tuple[ShardingPlan, list[str]]:
    """A plan near to the one in use, and what moves."""
    assert config.keep_near is not None
    assert config.most_moved_gb is not None
    old = read_plan(config.keep_near, task, fitting=True)
    most = int(config.most_moved_gb * _GB)
    plan = NearSharder(oracle, old, most, config.seed).shard(task)
    moves = moves_between(old, plan, task)
    outlook = TaskOutlook(oracle, task)
    than = outlook.of(plan).over(outlook.of(old))
    return plan, [
        f"near {config.keep_near}: {len(moves)} moves, {told(moved_bytes(moves))} in all of "
        f"{told(most)} that may; a step takes {than.ratio:.3f} of what it does now "
        f"({than.low:.3f} to {than.high:.3f})"
    ]


if __name__ == "__main__":
    cli.run_command(main, ShardConfig, dropped=cli.VERIFIED)
