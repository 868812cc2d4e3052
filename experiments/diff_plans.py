#!/usr/bin/env python
"""Two plans of the same tables: what moves, what is gained, and after how many steps it has paid.

Costs are estimated by a cost model: nothing is measured.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from autoshard.cost_model import StepPredictor, load_model
from autoshard.cost_model.training import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.inputs import read_devices, read_plan
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.console.outputs import check_file
from autoshard.experiments.explaining.diff import PlanDiff
from autoshard.experiments.explaining.plan_report import show
from autoshard.sharders import open_oracle
from autoshard.workload import (
    Constraints,
    Device,
    ShardingPlan,
    ShardingTask,
    UserError,
    documents,
    load_tables,
)
from autoshard.workload.bounds import check_bounds
from autoshard.workload.moves import moved_bytes, moves_between, renumbered

_ENOUGH_BYTES = 2**60  # of memory, where none is said
_LESS = 0.99  # of what moves: from here on it is worth a line


@dataclass(frozen=True)
class DiffConfig(ObjectiveOptions):
    """Say what moves from one plan to another, what is gained a step, and when that has paid.

    Columns that stay on their device do not move, however they are sliced there.
    """

    old: tyro.conf.Positional[Path]
    """File of the plan that runs."""
    new: tyro.conf.Positional[Path]
    """File of the plan that would take its place."""
    tables: str
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    batch_size: int = 1024
    """Samples of a batch."""
    memory_gb: str | None = None
    """GB (of 2^30 bytes) that may be filled of a device: one number for all, or one for each with
    commas between them. Then the new plan must fit."""
    link_gb_s: float = 10.0
    """GB (of 10^9 bytes) a second that a device can send, and take at the same time."""
    renumber: Path | None = None
    """File for the new plan with its devices numbered so that least moves, which is then compared.
    Only like devices take each other's numbers, so --memory-gb has to say what they are: it costs
    and fits as it did."""
    constraints: Path | None = None
    """YAML file of what the new plan must obey, as shard.py takes it."""
    cost_model: Path = Path("cpu")
    """Folder of a cost model, or the name of one that is shipped."""
    store: Path = Path("costs.db")
    """SQLite file of what was measured: what it knows of the tables is used."""
    json: Path | None = None
    """File for all of it as JSON."""

    def check(self) -> None:
        """UserError unless the options make sense."""
        check_bounds(self, at_least={"batch_size": 1}, more_than={"link_gb_s": 0})
        check_file(self.renumber, "--renumber")
        if self.renumber is not None and self.memory_gb is None:
            raise UserError("--renumber needs --memory-gb: only like devices may change numbers")
        check_file(self.json, "--json")

    def devices(self) -> tuple[Device, ...]:
        """As many as both plans are for."""
        old, new = (ShardingPlan.load(path).num_devices for path in (self.old, self.new))
        if old != new:
            raise UserError(
                f"{self.old} is for {old} devices and {self.new} for {new}: what moves is told "
                "among the same devices only"
            )
        with documents.naming(self.old):
            if self.memory_gb is None:
                return Device.uniform(old, _ENOUGH_BYTES)
        return read_devices(self.memory_gb, old, "the plans")


@one_thread()
def main(config: DiffConfig) -> None:
    """Read both, say what lies between them."""
    config.check()
    devices, tables = config.devices(), load_tables(config.tables)
    model = load_model(config.cost_model)
    oracle = open_oracle(model, config.batch_size, tables, config.store)
    objective = config.wanted(len(devices), oracle.link)
    operator = model.provenance.operator
    task = ShardingTask(tables, devices, config.batch_size, operator, objective=objective)
    if config.constraints is not None:
        task = Constraints.of_file(config.constraints, task)
    old, new = read_plan(config.old, task, fitting=False), read_plan(config.new, task, fitting=True)
    near = renumbered(new, old, task)
    moved, least = (moved_bytes(moves_between(old, plan, task)) for plan in (new, near))
    predictor = StepPredictor(oracle, task)
    compared = new if config.renumber is None else near
    diff = PlanDiff.of(old, compared, predictor, task, config.link_gb_s)
    show(diff.parts())
    if config.renumber is not None:
        near.save(config.renumber)
        show([f"the new plan, renumbered to move less, is in {config.renumber}"])
    elif config.memory_gb is not None and least < moved * _LESS:
        show(
            [
                f"note: with its devices numbered otherwise the new plan would move "
                f"{least / 1e6:,.1f} MB in place of {moved / 1e6:,.1f}: --renumber FILE does that"
            ]
        )
    if config.json is not None:
        documents.write(config.json, diff.to_json())


if __name__ == "__main__":
    cli.run_command(main, DiffConfig)
