#!/usr/bin/env python
"""Test whether lookups have changed since a plan was made, and whether a new plan pays.

A cost model predicts costs; nothing is measured.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import tyro

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.drift import cost_change
from autoshard.cost_model.threads import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.imports import is_object, loader_data
from autoshard.experiments.console.inputs import check_file, read_plan
from autoshard.experiments.console.machine import MachineOptions
from autoshard.experiments.explaining.diff import PlanDiff
from autoshard.sharders import DriftReport, open_oracle
from autoshard.sharders.explaining.summary import new_table
from autoshard.sharders.replanning.move_advice import best_move, link_of, predicted
from autoshard.workload import Link, ShardingPlan, ShardingTask, UserError, documents
from autoshard.workload.bounds import check_bounds
from autoshard.workload.documents import Schema
from autoshard.workload.profiling.profiler import Portion
from autoshard.workload.profiling.sources import Source, source_of_files
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.profiling.window import GROUPS, WindowCounts, counted_batches

DRIFT_SCHEMA = Schema("autoshard.drift", 1)
_SHOWN = 5  # tables


@dataclass(frozen=True)
class DriftConfig(MachineOptions):
    """Compare lookups of new data with those that a plan was made for, by the price of the plan.

    Says how sure it is that costs changed, what a step takes now and by a new plan, and whether
    moving to that pays in the steps that are left.
    """

    data: tyro.conf.Positional[str]
    """New data, as for profile_tables.py: Parquet files, a dlrm_datasets file, or MODULE:NAME of a
    loader of KeyedJaggedTensors."""
    task: Path
    """Task that the plan was made for, from shard.py --save-task. Its tables should be a profile in
    batches of the task's size."""
    plan: Path
    """File of the plan in use."""
    steps_left: int
    """Steps that are left to train."""
    link: str | None = None
    """Link over which tables would move, such as 25GB/s. Default: that of the task."""
    batches: int = 100
    """Batches that are counted at most, evenly over the data."""
    model: str | None = None
    """MODULE:NAME of the TorchRec model whose features the loader's batches have. Default: each
    feature is a table of its name."""
    hot_ids: Path | None = None
    """File of hot ids that the plan was made with, if it has hot rows."""
    out: Path | None = None
    """File for the new plan, if moving is expected to save time."""
    json: Path | None = None
    """JSON file for the results."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        self.check_machine()
        check_bounds(self, at_least={"steps_left": 0, "batches": GROUPS})
        check_file(self.out, "--out")
        check_file(self.json, "--json")
        if self.model is not None and not is_object(self.data):
            raise UserError("--model is for loaders, not for files: leave it out")

    def source(self, batch_size: int) -> Source:
        """Returns the data, in portions of a batch."""
        if not is_object(self.data):
            return source_of_files(Path(self.data).expanduser(), batch_size)
        return loader_data(self.data, self.model, batch_size)[0]


@one_thread()
def main(config: DriftConfig) -> None:
    """Counts a sample of the data, prints the comparison, and writes the new plan."""
    config.check()
    task = ShardingTask.load(config.task)
    plan = read_plan(config.plan, task, fitting=False)
    link = link_of(task, None if config.link is None else Link.parse(config.link))
    model = config.model_for(task.operator)
    model = model.for_objective(task.objective, len(task.devices))
    oracle = open_oracle(model, task.batch_size, task.tables, config.store)
    oracle.check(task)
    window = _counted(config, task, plan)
    known = counted_batches(task.tables, task.batch_size)
    if known is None:
        cli.note(
            f"the tables of {config.task} are no profile in batches of {task.batch_size}: they are "
            "taken as exact, and differences from them may not be drift"
        )
    change = cost_change(oracle, plan, task, known or math.inf, window)
    now = ShardingTask(**{**vars(task), "tables": window.tables()})
    (before,), (after,) = predicted(oracle, task, [plan]), predicted(oracle, now, [plan])
    advice = best_move(plan, now, oracle, window, link, config.steps_left)
    report = DriftReport(0, now, change, before, after, advice)
    _show_tables(oracle, task, now)
    if not advice.stays:
        speed = link.all_to_all(len(task.devices)).bytes_s / 1e9
        *parts, _ = PlanDiff(now, advice.moves, advice.old, advice.new, speed).parts()
        cli.show(parts)  # without the last, which knows nothing of steps that are left
    cli.say(report.line)
    if config.json is not None:
        numbers = {name.removeprefix("drift/"): value for name, value in report.metrics.items()}
        documents.write(config.json, DRIFT_SCHEMA.stamp({**numbers, "change": asdict(change)}))
    if config.out is not None and not advice.stays:
        advice.plan.save(config.out)
        cli.say(f"the new plan is in {config.out}")


def _counted(config: DriftConfig, task: ShardingTask, plan: ShardingPlan) -> WindowCounts:
    """Returns counts of batches that are spread evenly over the data."""
    hot_ids = {}
    if counts := plan.copied_hot_rows:
        from autoshard.workload.access.hot_ids import hottest_ids, load_hot_ids

        if config.hot_ids is None:
            raise UserError(f"{config.plan} has hot rows: name their ids with --hot-ids")
        known = load_hot_ids(config.hot_ids)
        with documents.naming(config.hot_ids):
            hot_ids = hottest_ids(counts, known)
    source, done, window = config.source(task.batch_size), 0, None
    for portion in source.portions(0):
        if window is None:
            if missing := [t.name for t in task.tables if t.name not in portion.tables]:
                raise UserError(f"{config.data}: has no table {missing[0]} of {config.task}")
            count = min(config.batches, len(source) // portion.steps)
            _check_count(config, task, count)
            window = WindowCounts(task.tables, task.batch_size, count, plan.row_wise, hot_ids)
        if not window.is_full and done * window.batches >= window.counted * len(source):
            read = partial(_first_batch, portion)
            if len(read(task.tables[0].name).lengths) >= task.batch_size:  # the last may be small
                window.add(read)
        done += portion.steps
    if window is None or not window.has_all_groups:
        _check_count(config, task, GROUPS - 1)
    assert window is not None
    return window


def _first_batch(portion: Portion, table: str) -> TableBatch:
    return next(iter(portion.tables[table]()))


def _check_count(config: DriftConfig, task: ShardingTask, count: int) -> None:
    if count < GROUPS:
        raise UserError(
            f"{config.data}: a comparison takes at least {GROUPS} batches of {task.batch_size} "
            "samples, and there are fewer: profile more data"
        )


def _show_tables(oracle: EstimatedCosts, task: ShardingTask, now: ShardingTask) -> None:
    """Prints the tables whose own cost changed most."""
    before, after = (oracle.alone_ms([t.whole() for t in each.tables]) for each in (task, now))
    shown = new_table(("table", "lookups before", "now", "ms alone before", "now"))
    for number in abs(after - before).argsort()[::-1][:_SHOWN].tolist():
        was, new = task.tables[number], now.tables[number]
        factors = (f"{t.pooling_factor:.2f}" for t in (was, new))
        shown.add_row(was.name, *factors, f"{before[number]:.3f}", f"{after[number]:.3f}")
    cli.console.print(shown)


if __name__ == "__main__":
    cli.run_command(main, DriftConfig)
