"""Ways of sharding a table beside columns, each in a file: which options it gives, which rules
demand or forbid it, what a plan has to keep to, and what reports say. What it costs is in
`cost_model.step.common_price`, what it is in TorchRec in `integration.plans.table_shardings`.

Ways come in the order in which a table's options are put together: hot rows, for example, may be
those of a table in columns or in blocks of rows. A plan's options are `workload.ways.option`.
"""

from autoshard.workload.ways.copies import Copies
from autoshard.workload.ways.host_memory import HostMemory
from autoshard.workload.ways.numbered_rows import HashedIds, HotRows
from autoshard.workload.ways.option import ShardingOption
from autoshard.workload.ways.rows import Rows
from autoshard.workload.ways.way import OptionLimits, Way

WAYS: tuple[Way, ...] = (Rows(), Copies(), HotRows(), HashedIds(), HostMemory())

__all__ = ["WAYS", "OptionLimits", "Way", "sharding_type"]


def sharding_type(option: ShardingOption, slices: int, ranks: int) -> str:
    """Returns how a table is sharded by an option, in the words of TorchRec's planner.

    Args:
        option: The option.
        slices: Number of slices of columns, each on one device or in blocks of rows on several.
        ranks: Number of devices.
    """
    found = [way.words(option, slices, ranks) for way in WAYS if way.taken_by(option)]
    if option.by_columns:
        found.insert(0, "table-wise" if slices == 1 else f"column-wise, {slices} slices")
    return "; ".join(found)
