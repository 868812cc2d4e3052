"""How tables of a plan are sharded, and where, in the words of TorchRec's planner."""

from collections.abc import Sequence

from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.plans.placements import Placement
from autoshard.workload.ways import sharding_type
from autoshard.workload.ways.option import option_of


def options_of(plan: ShardingPlan, task: ShardingTask) -> dict[str, str]:
    """Returns the sharding type of each table: `table-wise`, `column-wise, 4 slices` and so on."""
    pieces, options, ranks = plan.by_table(), plan.all_options(), len(task.devices)
    return {
        table.name: sharding_type(
            option_of(options, table.name), len(pieces.get(table.name, ())), ranks
        )
        for table in task.tables
    }


def devices_of(plan: ShardingPlan, task: ShardingTask) -> dict[str, str]:
    """Returns the devices of each table: `device3`, `device0 to device7`, `all devices`."""
    pieces = plan.by_table()
    return {t.name: _names(pieces.get(t.name, ()), task) for t in task.tables}


def _names(pieces: Sequence[Placement], task: ShardingTask) -> str:
    homes = sorted({home for piece in pieces for home in piece.devices})
    if not pieces or len(homes) == len(task.devices) > 1:
        return "all devices"
    runs = list[list[int]]()
    for home in homes:
        if runs and runs[-1][-1] + 1 == home:
            runs[-1].append(home)
        else:
            runs.append([home])
    names = [device.name for device in task.devices]
    return ", ".join(
        f"{names[run[0]]} to {names[run[-1]]}"
        if len(run) > 2
        else ", ".join(names[home] for home in run)
        for run in runs
    )
