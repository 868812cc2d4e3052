"""TorchRec's constraints of tables as rules of a task."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType

from autoshard.integration.plans.table_shardings import COPIED
from autoshard.workload.tables.table import DIM_STEP, MAX_DIM, can_be_blocks
from autoshard.workload.tasks.rules import Kind, Rule

_WHOLE = ShardingType.TABLE_WISE.value
_COLUMNS = ShardingType.COLUMN_WISE.value
_ROWS = ShardingType.ROW_WISE.value
_ROWS_OF_NODE = ShardingType.TABLE_ROW_WISE.value


Limit = tuple[Kind, tuple[int, ...]]  # kind and numbers of a rule


def grouped_rules(limits: Mapping[str, Sequence[Limit]]) -> tuple[Rule, ...]:
    """Returns the rules of limits by table, one for all tables of a kind."""
    named: dict[Limit, list[str]] = defaultdict(list)
    for name, some in limits.items():
        for limit in some:
            named[limit].append(name)
    return tuple(
        Rule(kind, tuple(names), numbers, f"TorchRec's constraints: {kind}")
        for (kind, numbers), names in named.items()
    )


def limits_of(
    types: frozenset[str], rows: int, ranks: int, constraint: ParameterConstraints | None
) -> list[Limit] | None:
    """Returns the limits by which a table has only the sharding types that TorchRec offers it.

    Args:
        types: Sharding types that it may have.
        rows: Rows of the table.
        ranks: Number of ranks.
        constraint: TorchRec's constraints of the table.

    Returns:
        The limits; None if no limits leave these types alone.
    """
    found = _limits_of_types(types, rows, ranks)
    if found is not None and constraint is not None and constraint.min_partition:
        width = min(-(-constraint.min_partition // DIM_STEP) * DIM_STEP, MAX_DIM)
        if _COLUMNS in types:
            found.append(("min_width", (width,)))
    if found is not None and ("copied", ()) not in found and _is_of_fused_kernel(constraint):
        found.append(("not_copied", ()))
    return found


def _is_of_fused_kernel(constraint: ParameterConstraints | None) -> bool:
    """Returns whether constraints have settings that the dense kernel of copies does not know."""
    settings = (
        "cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype"
    )  # fmt: skip
    return any(getattr(constraint, name, None) is not None for name in settings)


def _limits_of_types(types: frozenset[str], rows: int, ranks: int) -> list[Limit] | None:
    if not types & {_WHOLE, _COLUMNS}:
        if _ROWS in types and ranks > 1 and can_be_blocks(rows, ranks):
            return [("row_wise", ())]
        return [("copied", ())] if COPIED in types else None
    found: list[Limit] = []
    if _COLUMNS not in types:
        found.append(("min_width", (MAX_DIM,)) if _ROWS in types else ("whole", ()))
    if _ROWS not in types:
        found.append(("not_row_wise", ()))
    elif _ROWS_OF_NODE not in types:
        found.append(("not_on_a_node", ()))
    if COPIED not in types:
        found.append(("not_copied", ()))
    return found
