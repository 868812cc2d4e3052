"""How tables of a plan are sharded, and where, in the words of TorchRec's planner."""

from collections.abc import Sequence

from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.plans.placements import Placement
from autoshard.workload.ways.option import ShardingOption, option_of


def options_of(plan: ShardingPlan, task: ShardingTask) -> dict[str, str]:
    """Returns the sharding type of each table: `table-wise`, `column-wise, 4 slices` and so on."""
    pieces = plan.by_table()
    return {
        table.name: _type(pieces.get(table.name, ()), len(task.devices))
        + _details(option_of(plan.options, table.name))
        for table in task.tables
    }


def _type(pieces: Sequence[Placement], ranks: int) -> str:
    if not pieces:
        return "data-parallel"
    blocks = pieces[0].row_blocks
    if len(pieces) > 1:
        slices = f"{len(pieces)} slices"
        return f"column-wise, {slices}" if blocks == 1 else f"grid, {slices} x {blocks} blocks"
    if blocks == 1:
        return "table-wise"
    return f"{'row-wise' if blocks == ranks else 'table-row-wise'}, {blocks} blocks"


def _details(option: ShardingOption) -> str:
    """Returns what an option says beside the sharding type."""
    found = ""
    if option.hot_rows is not None:
        hot = f"{option.hot_rows:,} hot rows data-parallel"
        found += f"; {hot if option.hot_rows else 'hashed ids'}"
    if option.cached_rows is not None:
        rows = option.cached_rows
        found += "; in host memory (UVM), " + (f"cache of {rows:,} rows" if rows else "no cache")
    return found


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
