#!/usr/bin/env python
"""Compare two plans of the same tables: what moves, what is gained, and when moving has paid off.

A cost model predicts costs; nothing is measured.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from autoshard.cost_model import StepPredictor, load_model
from autoshard.cost_model.threads import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.inputs import check_file, read_devices, read_plan
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.explaining.diff import PlanDiff, changes_of_options, present_step
from autoshard.sharders import open_oracle
from autoshard.workload import (
    Constraints,
    Device,
    Objective,
    ShardingPlan,
    ShardingTask,
    UserError,
    documents,
    load_tables,
)
from autoshard.workload.bounds import check_bounds
from autoshard.workload.plans.moves import moved_bytes, moves_between, renumbered

_ENOUGH_BYTES = 2**60  # memory of a device without --memory-gb
_LINK_GB_S = 10.0
_LESS = 0.99  # share of the moved bytes below which renumbering is suggested


@dataclass(frozen=True)
class DiffConfig(ObjectiveOptions):
    """Compare two plans: moved tables, change of the step time, and when moving has paid off.

    Columns that stay on their device do not move, however they are sliced there. The plans may be
    for different numbers of devices; options are for the new plan's.
    """

    old: tyro.conf.Positional[Path]
    """File of the plan in use."""
    new: tyro.conf.Positional[Path]
    """File of the plan that would replace it."""
    tables: str
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    batch_size: int = 1024
    """Samples of a batch."""
    memory_gb: str | None = None
    """Memory of a device in GB of 2^30 bytes, into which the new plan must fit. One number for all
    devices, or one per device, separated by commas. Default: not checked."""
    link_gb_s: float | None = None
    """GB (of 10^9 bytes) per second that a device can send, and receive at the same time. Default:
    as all-to-alls over the link, else 10."""
    renumber: Path | None = None
    """File for the new plan with devices renumbered so that fewest bytes move; it is then compared.
    Only devices with equal memory change numbers, so step time and memory stay the same. Requires
    --memory-gb."""
    constraints: Path | None = None
    """YAML file of constraints that the new plan must keep."""
    cost_model: Path = Path("cpu")
    """Folder of a cost model, or the name of a shipped one."""
    store: Path = Path("costs.db")
    """SQLite file of measurements; those of these tables correct the predictions."""
    json: Path | None = None
    """JSON file for the comparison."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        check_bounds(self, at_least={"batch_size": 1}, more_than={"link_gb_s": 0})
        check_file(self.renumber, "--renumber")
        if self.renumber is not None and self.memory_gb is None:
            raise UserError("--renumber needs --memory-gb: only equal devices may change numbers")
        check_file(self.json, "--json")

    def devices(self) -> tuple[Device, ...]:
        """Returns the devices of the new plan."""
        number = ShardingPlan.load(self.new).num_devices
        with documents.naming(self.new):
            if self.memory_gb is None:
                return Device.uniform(number, _ENOUGH_BYTES)
        return read_devices(self.memory_gb, number, str(self.new))

    def moving_link(self, objective: Objective, devices: int) -> tuple[float, str]:
        """Returns GB per second of a device, and where that is from."""
        if self.link_gb_s is not None:
            return self.link_gb_s, "--link-gb-s"
        if objective.link is not None:
            return objective.link.all_to_all(devices).bytes_s / 1e9, "as all-to-alls"
        return _LINK_GB_S, "an assumption: --link-gb-s"


@one_thread()
def main(config: DiffConfig) -> None:
    """Reads both plans, and prints and writes the comparison."""
    config.check()
    devices, tables = config.devices(), load_tables(config.tables)
    options = config.for_devices(len(devices))
    model = options.priced(load_model(config.cost_model), len(devices))
    oracle = open_oracle(model, config.batch_size, tables, config.store)
    objective = options.build_objective(len(devices), oracle.model)
    operator = model.provenance.operator
    task = ShardingTask(tables, devices, config.batch_size, operator, objective=objective)
    if config.constraints is not None:
        task = Constraints.of_file(config.constraints, task)
    old = read_plan(config.old, task, fitting=False, any_devices=True)
    new = read_plan(config.new, task, fitting=True)
    nearest = renumbered(new, old, task)
    compared = new if config.renumber is None else nearest
    moves = moves_between(old, compared, task)
    diff = PlanDiff(
        task,
        moves,
        present_step(config, oracle, old, task),
        StepPredictor(oracle, task).of(compared),
        *config.moving_link(objective, len(devices)),
        changes_of_options(old, compared),
        old.num_devices,
    )
    cli.show(diff.parts())
    if config.renumber is not None:
        nearest.save(config.renumber)
        how = "with its devices as they were, as it has row-wise tables"
        how = how if new.row_wise else "renumbered to move less"
        cli.say(f"the new plan, {how}, is in {config.renumber}")
    elif config.memory_gb is not None:
        moved, least = (moved_bytes(moves_between(old, plan, task)) for plan in (new, nearest))
        if least < moved * _LESS:
            cli.note(
                f"with its devices renumbered, the new plan would move {least / 1e6:,.1f} MB in "
                f"place of {moved / 1e6:,.1f}: --renumber FILE does that"
            )
    if config.json is not None:
        documents.write(config.json, diff.to_json())


if __name__ == "__main__":
    cli.run_command(main, DiffConfig)
