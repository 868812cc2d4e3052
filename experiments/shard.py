#!/usr/bin/env python
"""Shard your own tables: a plan of who holds what, and what it will cost."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.cost_model.training import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.inputs import read_devices, read_plan
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.console.outputs import PICTURES, check_file
from autoshard.experiments.explaining.plan_report import (
    best_heuristic,
    expected_line,
    memory_parts,
    show,
)
from autoshard.sharders import (
    SHARDERS,
    IncrementalSharder,
    SharderSpec,
    make_sharder,
    needs_of,
    open_context,
    spec_of,
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
from autoshard.workload.sizes import format_bytes

_DEFAULT = "autoshard"
_GB = 2**30
_MEASURE_SECONDS = 60.0
_SHARDERS = "\n".join(f"{name}: {spec.text}" for name, spec in SHARDERS.items())

_DROPPED = {
    **cli.VERIFIED,
    "--keep-near": "use --start-plan",
    "--most-moved-gb": "use --max-moved-gb",
}


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
    sharder: Annotated[str, tyro.conf.arg(help=f"Sharder:\n{_SHARDERS}")] = _DEFAULT
    plan: Path | None = None
    """File of a plan that is priced as it is, in place of making one; nothing is written."""
    explain: bool = False
    """Say which device is slowest in which phase and why, what would help next, and how the plan
    differs from the best heuristic's."""
    start_plan: Path | None = None
    """File of a plan that is in use: it is improved, step by step, in place of making a new one."""
    max_moved_gb: float | None = None
    """With --start-plan: GB of weights and optimizer state that may move to other devices."""
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
        spec = self.spec
        if (self.tables is None) == (self.model is None):
            raise UserError("name a file of tables with --tables, or a TorchRec model with --model")
        if self.batches is not None and self.model is None:
            raise UserError("--batches are those of a model: name it with --model")
        if self.measure and "model" not in spec.needs:
            raise UserError(
                f"--measure teaches a cost model, which {self.sharder} does not go by: leave it out"
            )
        if self.seconds is not None and not self.measure and spec.time == "own":
            limited = [name for name, spec in SHARDERS.items() if spec.time != "own"]
            raise UserError(
                f"--seconds is not supported by sharder {self.sharder}: use one of "
                f"{', '.join(limited)}, or omit --seconds"
            )
        if self.plan is not None and (self.measure or self.sharder != _DEFAULT):
            raise UserError("--plan is priced as it is: leave out --sharder and --measure")
        self._check_start_plan()
        self.check_objective(self.num_devices)
        counts = ("num_devices", "batch_size")
        near = {} if self.max_moved_gb is None else {"max_moved_gb": 0}
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), "seed": 0, **near},
            more_than={"seconds": 0},
        )
        check_file(self.out, "--out")
        check_file(self.save_task, "--save-task")
        check_file(self.picture, "--picture", PICTURES)

    def _check_start_plan(self) -> None:
        if (self.start_plan is None) != (self.max_moved_gb is None):
            raise UserError("--start-plan and --max-moved-gb go together: give both, or none")
        if self.start_plan is not None and (self.measure or self.plan or self.sharder != _DEFAULT):
            raise UserError(
                "--start-plan improves a plan by the cost model: leave out --sharder, --measure "
                "and --plan"
            )

    @property
    def spec(self) -> SharderSpec:
        """What the sharder needs and does; UserError lists all if there is none of that name."""
        return spec_of(self.sharder)

    @property
    def measures(self) -> bool:
        """Whether the plan is measured while it is made."""
        return self.measure or "pool" in self.spec.needs

    def workload(self) -> tuple[tuple[EmbeddingTable, ...], OperatorOptions | None]:
        """Returns the tables, and how a TorchRec model stores them."""
        if self.model is None:
            assert self.tables is not None
            return load_tables(self.tables), None
        from autoshard.experiments.console.imports import model_tables  # as slow as the model

        found = model_tables(self.model, self.batches, self.num_devices)
        counted = {t.reuse_batch_size for t in found.tables if t.reuse_batch_size is not None}
        if counted and counted != {self.batch_size}:
            cli.console.print(
                f"note: the batches of {self.num_devices} ranks have {max(counted)} samples "
                f"together, and --batch-size is {self.batch_size}: lookups are scaled to that",
                soft_wrap=True,
            )
        return found.tables, found.operator

    def devices(self) -> tuple[Device, ...]:
        """The devices with their memory; UserError unless it is one number, or one for each."""
        return read_devices(self.memory_gb, self.num_devices, "--num-devices")


@one_thread()  # of several, each waits for the others: networks this small gain nothing
def main(config: ShardConfig) -> None:
    """Plans, prints what the plan costs beside the best heuristic's, writes it."""
    config.check()
    devices, (tables, stored) = config.devices(), config.workload()
    given = config.plan or config.start_plan
    context = open_context(
        frozenset() if given else needs_of([config.sharder]),
        tables,
        config.batch_size,
        config.policy,
        config.cost_model,
        config.store,
    )
    task = _task(config, tables, devices, stored, context.costs)
    if config.save_task is not None:
        task.save(config.save_task)
    context = replace(
        context,
        measure_seconds=config.seconds or _MEASURE_SECONDS,
        seed=config.seed,
        seconds=None if config.measures else config.seconds,
    )
    oracle = context.costs
    said: list[str] = []
    if config.plan is not None:
        plan = read_plan(config.plan, task, fitting=True)
    elif config.start_plan is not None:
        plan, said = _near(config, task, oracle)
    elif config.measures:
        from autoshard.experiments.evaluation.measured_plan import measured_plan  # starts Ray

        plan, oracle, said = measured_plan(config.sharder, task, context, config.store)
    else:
        plan = make_sharder(config.sharder, context).shard(task)
    plan.check(task)
    name = config.sharder if given is None else given.name
    predictor, cost = StepPredictor(oracle, task), oracle.plan_cost(plan, task)
    best = best_heuristic(task, predictor, config.seed)
    what = f"near {name}" if config.start_plan else name
    cli.console.print(cost.table(f"{what}, estimated"))
    show(memory_parts(plan, task))
    for line in (expected_line(name, predictor.of(plan), best, task.objective), *said):
        cli.console.print(line, soft_wrap=True)
    if config.explain:
        from autoshard.experiments.explaining.explain import explanation  # loads next_steps

        show(explanation(oracle, task, plan, best))
    if config.picture is not None:
        cost.picture(config.picture, name)
    if config.plan is None:
        plan.save(config.out)
        cli.console.print(f"the plan is in {config.out}", soft_wrap=True)


def _task(
    config: ShardConfig,
    tables: tuple[EmbeddingTable, ...],
    devices: tuple[Device, ...],
    stored: OperatorOptions | None,
    oracle: EstimatedCosts,
) -> ShardingTask:
    """Returns the task; UserError if a model stores tables other than the cost model knows."""
    known = oracle.model.provenance.operator
    if stored not in (None, known):
        raise UserError(
            f"--model {config.model}: its tables are {stored}, and the cost model knows those "
            f"that are {known}: name another with --cost-model, which learned from "
            "collect_costs.py with their --weights and --optimizer"
        )
    objective = config.wanted(len(devices), oracle.link)
    task = ShardingTask(tables, devices, config.batch_size, known, objective=objective)
    return task if config.constraints is None else Constraints.of_file(config.constraints, task)


def _near(
    config: ShardConfig, task: ShardingTask, oracle: EstimatedCosts
) -> tuple[ShardingPlan, list[str]]:
    """A plan near to the one in use, and what moves."""
    assert config.start_plan is not None
    assert config.max_moved_gb is not None
    old = read_plan(config.start_plan, task, fitting=True)
    most = int(config.max_moved_gb * _GB)
    plan = IncrementalSharder(oracle, old, most, config.seed).shard(task)
    moves = moves_between(old, plan, task)
    predictor = StepPredictor(oracle, task)
    than = predictor.of(plan).over(predictor.of(old))
    return plan, [
        f"near {config.start_plan}: {len(moves)} moves, {format_bytes(moved_bytes(moves))} in all "
        f"of {format_bytes(most)} that may; a step takes {than.ratio:.3f} of what it does now "
        f"({than.low:.3f} to {than.high:.3f})"
    ]


if __name__ == "__main__":
    cli.run_command(main, ShardConfig, dropped=_DROPPED)
