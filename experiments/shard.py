#!/usr/bin/env python
"""Plan the sharding of embedding tables, and predict the step time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import tyro

from autoshard.cost_model import StepPredictor
from autoshard.cost_model.hardware import Reporter, for_tables
from autoshard.cost_model.threads import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.inputs import (
    PICTURES,
    build_task,
    check_file,
    read_devices,
    read_plan,
)
from autoshard.experiments.console.machine import PlanningOptions
from autoshard.sharders import (
    SHARDERS,
    SharderSpec,
    check_takes_seconds,
    make_sharder,
    needs_of,
    open_context,
    spec_of,
)
from autoshard.sharders.explaining.summary import (
    best_heuristic,
    expected_line,
    memory_parts,
    training_notes,
)
from autoshard.workload import (
    EmbeddingTable,
    OperatorOptions,
    UserError,
    documents,
    load_tables,
)
from autoshard.workload.bounds import check_bounds
from autoshard.workload.packing.table_options import OptionResources
from autoshard.workload.plans.replicas import group_sizes

_DEFAULT = "autoshard"
_GB = 2**30
_MEASURE_SECONDS = 60.0
_SHARDERS = "\n".join(
    ["Algorithm that makes the plan.", *(f"{name}: {spec.text}" for name, spec in SHARDERS.items())]
)


@dataclass(frozen=True)
class ShardConfig(PlanningOptions):
    """Assign embedding tables to devices: table-wise, column-wise, row-wise or data-parallel.

    A cost model predicts costs, so no cluster is needed. With --measure, selected shards of these
    tables are measured and correct the predictions.
    """

    tables: str | None = None
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_devices: int = tyro.MISSING
    """Number of devices, up to 4,096."""
    memory_gb: str | None = None
    """Memory of a device in GB of 2^30 bytes, for weights, optimizer state and a batch's inputs and
    outputs. One number for all devices, or one per device, separated by commas. Default: 85 % of
    what the GPU has that --hardware names."""
    model: str | None = None
    """MODULE:NAME of a TorchRec model, or of a function that returns one, in place of --tables. The
    module is imported from the current folder or Python's path."""
    batches: str | None = None
    """MODULE:NAME of one rank's batches, or of a function that returns them. Lookups are counted in
    the first batches. Requires --model."""
    replica_group_size: str | None = None
    """Devices of a group that holds one copy of all tables, or auto: the size with the lowest
    price. The plan is that of each group, for TorchRec's DMPCollection. Requires a link."""
    sync_interval: int | None = None
    """Steps from one average of the copies of replica groups to the next. Default: 1. Requires
    --replica-group-size."""
    host_memory_gb: float | None = None
    """Memory of the host in GB of 2^30 bytes, for each GPU. If tables do not fit into GPUs, some
    stay there, with caches on the GPUs. Default: tables are in the memory of devices alone."""
    dense_layers: str | None = None
    """Widths of the fully connected layers of your model, such as 13-512-256-128,3456-1024-1 for
    two stacks, in place of --dense-ms: what they take is estimated from the data sheet. Requires a
    GPU as --hardware."""
    constraints: Path | None = None
    """YAML file of constraints, such as tables that must share a device or stay whole, and reserved
    memory."""
    hot_ids: Path | None = None
    """File of the most used rows, from profile_tables.py --hot-ids. The plan may copy these to all
    devices and shard the others; training then needs the file, too."""
    hash_ids: bool = False
    """Number the rows of tables in blocks of rows by a hash of their ids, so that blocks are used
    alike whatever the order of ids; training then does so, too."""
    sharder: Annotated[str, tyro.conf.arg(help=_SHARDERS)] = _DEFAULT
    plan: Path | None = None
    """File of a plan to price; none is made or written. Excludes --sharder, --measure and
    --start-plan."""
    explain: bool = False
    """Print the slowest device of each phase and its costliest tables, the best next changes, and
    the differences from the best heuristic's plan."""
    start_plan: Path | None = None
    """File of a plan in use, which is improved step by step. It may be for another number of
    devices. Requires --max-moved-gb; excludes --sharder, --measure and --plan."""
    max_moved_gb: float | None = None
    """Maximum GB (of 2^30 bytes) of weights and optimizer state that may move to other devices,
    beside those that have to, as their device is gone. Requires --start-plan."""
    out: Path = Path("plan.json")
    """File for the plan."""
    save_task: Path | None = None
    """JSON file for the task, which --tables accepts; also for the tables of a --model."""
    picture: Path | None = None
    """PNG or SVG file for a chart of each device's costs."""
    report: Path | None = None
    """HTML file for a page about the plan, which needs no server: step, devices, tables, what
    options save, what would help next. It takes as long as some further plans."""
    batch_size: int = 1024
    """Samples of a batch, all ranks together."""
    seed: int = 0
    """Seed of sharders that sample."""
    measure: bool = False
    """Measure the most informative shards of these tables on a Ray cluster, which is found or
    started, and correct the predictions with them. autoshard_verified always does."""
    seconds: float | None = None
    """Time budget in seconds. Limits planning (default: until the sharder stops); local search uses
    what the policy leaves. With --measure, limits measuring instead (default: 60), excluding the
    final measurement of the plan."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        spec = self.spec
        if (self.tables is None) == (self.model is None):
            raise UserError("name a file of tables with --tables, or a TorchRec model with --model")
        if self.batches is not None and self.model is None:
            raise UserError(f"--batches {self.batches} requires the model: name it with --model")
        if self.measure and "model" not in spec.needs:
            raise UserError(
                f"--measure corrects a cost model, which {self.sharder} does not use: leave it out"
            )
        if self.seconds is not None and not self.measure:
            check_takes_seconds(self.sharder)
        if self.plan is not None and (self.measure or self.sharder != _DEFAULT):
            raise UserError("--plan is priced as it is: leave out --sharder and --measure")
        if (self.start_plan is None) != (self.max_moved_gb is None):
            raise UserError("--start-plan and --max-moved-gb go together: give both, or none")
        if self.start_plan is not None and (self.measure or self.plan or self.sharder != _DEFAULT):
            raise UserError(
                "--start-plan improves a plan by the cost model: leave out --sharder, --measure "
                "and --plan"
            )
        if self.hot_ids is not None or self.hash_ids:
            self._check_ids("--hash-ids" if self.hot_ids is None else "--hot-ids")
        self._check_replicas()
        self._check_host_memory()
        self._check_dense_layers()
        self.build_objective(self.num_devices)  # raises for wrong options
        self.check_machine(several=True)
        check_bounds(
            self,
            at_least={
                "num_devices": 1,
                "batch_size": 1,
                "seed": 0,
                "max_moved_gb": 0,
                "sync_interval": 1,
            },
            more_than={"seconds": 0, "host_memory_gb": 0},
        )
        check_file(self.out, "--out")
        check_file(self.save_task, "--save-task")
        check_file(self.picture, "--picture", PICTURES)
        check_file(self.report, "--report", (".html",))

    def _check_ids(self, option: str) -> None:
        """Raises UserError if the sharder does not number rows anew, for which the option is."""
        if self.plan is not None or self.start_plan is not None:
            raise UserError(f"{option} is for making plans: leave it out with --plan, --start-plan")
        choosing = [name for name, spec in SHARDERS.items() if spec.ways == "chosen"]
        if self.sharder not in choosing:
            raise UserError(
                f"{option} is not used by sharder {self.sharder}: take one of {', '.join(choosing)}"
            )
        if self.hot_ids is not None and self.objective in ("operators", "compute"):
            raise UserError(
                f"--hot-ids needs the price of copies, which --objective {self.objective} has not: "
                "take --objective step"
            )

    def _check_host_memory(self) -> None:
        """Raises UserError if --host-memory-gb is given to something that does not use it."""
        if self.host_memory_gb is None:
            return
        if self.plan or self.start_plan or self.replica_group_size or self.measures:
            raise UserError(
                "--host-memory-gb is for making plans by the cost model: leave out --plan, "
                "--start-plan, --replica-group-size and --measure"
            )
        if "model" not in self.spec.needs or self.spec.ways == "own":
            raise UserError(
                f"--host-memory-gb is not used by sharder {self.sharder}: take autoshard"
            )

    def _check_replicas(self) -> None:
        """Raises UserError unless the options of replica groups are valid."""
        size = self.replica_group_size
        if size is None:
            if self.sync_interval is not None:
                raise UserError("--sync-interval is of replica groups: give --replica-group-size")
            return
        sizes = group_sizes(self.num_devices)
        if size != "auto" and not (size.isdecimal() and int(size) in sizes):
            raise UserError(
                f"--replica-group-size must be auto, or divide --num-devices {self.num_devices}: "
                f"one of {', '.join(map(str, sizes))}, got {size!r}"
            )
        if self.kinds:
            raise UserError(
                "--replica-group-size plans groups alike, and --hardware names several kinds of "
                "devices: name one"
            )
        others = (self.plan, self.start_plan, self.hot_ids, self.seconds, self.hash_ids or None)
        if self.measures or any(other is not None for other in others):
            raise UserError(
                "--replica-group-size plans for several tasks by the cost model: leave out --plan, "
                "--start-plan, --hot-ids, --hash-ids, --measure and --seconds"
            )

    @property
    def spec(self) -> SharderSpec:
        """Specification of the sharder; UserError for an unknown name."""
        return spec_of(self.sharder)

    @property
    def measures(self) -> bool:
        """Whether planning measures."""
        return self.measure or "pool" in self.spec.needs

    def _check_dense_layers(self) -> None:
        if self.dense_layers is None:
            return
        if self.dense_ms is not None:
            raise UserError("--dense-layers stands for --dense-ms: leave one of them out")
        if self.hardware is None or self.kinds or self.data_sheet is None:
            raise UserError("--dense-layers requires one GPU, named by --hardware: give --dense-ms")

    def with_dense_part(self) -> Self:
        """Returns the options with what the dense part takes; a UserError if it is not known."""
        if self.dense_layers is None or self.data_sheet is None:
            return self
        from autoshard.cost_model.step.dense_part import dense_ms, read_layers  # few need it

        samples = self.batch_size / self.num_devices
        found = dense_ms(read_layers(self.dense_layers), samples, self.data_sheet)
        cli.say(f"the dense layers are taken to take {found:.2f} ms of a step")
        return replace(self, dense_ms=found)

    def num_hot_ids(self, tables: Sequence[EmbeddingTable]) -> dict[str, int]:
        """Returns the tables whose most used rows are known, and how many of them."""
        if self.hot_ids is None:
            return {}
        from autoshard.workload.access.hot_ids import (  # other plans do without
            check_hot_ids,
            load_hot_ids,
        )

        ids = load_hot_ids(self.hot_ids)
        with documents.naming(self.hot_ids):
            check_hot_ids(ids, tables)
            if not any(table.name in ids for table in tables):
                raise UserError("has ids of none of these tables: profile them")
        return {name: len(some) for name, some in ids.items()}

    def workload(self) -> tuple[tuple[EmbeddingTable, ...], OperatorOptions | None]:
        """Returns the tables, and for a TorchRec model, the operator that it stores them for."""
        if self.model is None:
            assert self.tables is not None
            return load_tables(self.tables), None
        from autoshard.experiments.console.imports import model_tables  # loads torch's models

        found = model_tables(self.model, self.batches, self.num_devices)
        counted = {t.reuse_batch_size for t in found.tables if t.reuse_batch_size is not None}
        if counted and counted != {self.batch_size}:
            cli.note(
                f"the batches of {self.num_devices} ranks have {max(counted)} samples "
                f"together, and --batch-size is {self.batch_size}: lookups are scaled to that"
            )
        return found.tables, found.operator


@one_thread()  # networks this small gain nothing from several threads, which wait for each other
def main(config: ShardConfig) -> None:
    """Makes a plan, compares its predicted cost with the best heuristic's, and writes it."""
    config.check()
    config = config.with_dense_part()
    memory_gb = config.known_memory_gb(config.memory_gb, config.num_devices)
    devices = read_devices(memory_gb, config.num_devices, "--num-devices")
    config.check_memory(devices)
    tables, stored = config.workload()
    given = config.plan or config.start_plan
    models = [
        model if stored is None else for_tables(model, stored, Reporter(cli.note, cli.note))
        for model in config.models_for(stored)
    ]
    devices = config.with_hardware(devices, models)
    context = open_context(
        frozenset() if given else needs_of([config.sharder]),
        tables,
        config.batch_size,
        config.priced_kinds(models, len(devices)),
        config.policy,
        config.store,
    )
    model = context.costs.model
    objective = config.build_objective(len(devices), model)
    task = build_task(tables, devices, config.batch_size, model, objective, config.constraints)
    if config.save_task is not None:
        task.save(config.save_task)
    context = replace(
        context,
        measure_seconds=config.seconds or _MEASURE_SECONDS,
        seed=config.seed,
        resources=OptionResources(
            config.num_hot_ids(tables),
            config.hash_ids,
            int((config.host_memory_gb or 0) * _GB),
        ),
        seconds=None if config.measures else config.seconds,
    )
    oracle = context.costs
    lines: list[str] = []
    if config.plan is not None:
        plan = read_plan(config.plan, task, fitting=True)
    elif config.start_plan is not None:
        from autoshard.experiments.explaining.near_plan import plan_near  # others do without

        max_bytes = int((config.max_moved_gb or 0) * _GB)
        plan, line = plan_near(config.start_plan, task, oracle, max_bytes, config, config.seed)
        lines = [line]
    elif config.replica_group_size is not None:
        # Other plans do without.
        from autoshard.experiments.explaining.replica_choice import choose_replicas

        size = None if config.replica_group_size == "auto" else int(config.replica_group_size)
        found = choose_replicas(
            task, context, config.sharder, size, config.sync_interval or 1, config.store
        )
        cli.show(found.parts())
        plan, task, oracle = found.chosen.plan, found.chosen.task, found.oracle
    elif config.measures:
        from autoshard.experiments.evaluation.measured_plan import measured_plan  # loads Ray

        plan, oracle, lines = measured_plan(
            config.sharder, task, context, config.store, config.devices
        )
    else:
        plan = make_sharder(config.sharder, context).shard(task)
    plan.check(task)
    name = config.sharder if given is None else given.name
    predictor, cost = StepPredictor(oracle, task), oracle.plan_cost(plan, task)
    best = best_heuristic(task, predictor, config.seed)
    what = f"near {name}" if config.start_plan else name
    cli.console.print(cost.table(f"{what}, estimated"))
    cli.show(memory_parts(plan, task))
    for line in (expected_line(name, predictor.of(plan), best, task.objective), *lines):
        cli.say(line)
    for note in training_notes(plan, task):
        cli.say(note)
    if config.explain:
        from autoshard.sharders.explaining.explain import explanation  # loads the search

        cli.show(explanation(oracle, task, plan, best))
    if config.plan is None:  # first, as what follows may fail
        plan.save(config.out)
        cli.say(f"the plan is in {config.out}")
    if config.picture is not None:
        cost.picture(config.picture, name)
    if config.report is not None:
        from autoshard.sharders import write_report  # loads the search

        title = f"{config.tables or config.model}, sharded by {what}"
        write_report(config.report, plan, task, replace(context, oracle=oracle), title=title)
        cli.say(f"the report is in {config.report}")


if __name__ == "__main__":
    cli.run_command(main, ShardConfig)
