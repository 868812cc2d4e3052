"""Rows in slower memory, as constraints of TorchRec's planner."""

from collections.abc import Sequence
from dataclasses import replace

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheAlgorithm, CacheParams

from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tables import EmbeddingTable
from autoshard.workload.torchrec.cache_statistics import AccessStatistics, Eviction
from autoshard.workload.torchrec.names import lookups_of


def memory_constraints(
    tables: Sequence[EmbeddingTable], rows: Sequence[int], eviction: Eviction = "lfu"
) -> dict[str, ParameterConstraints]:
    """Returns constraints by TorchRec's name of a table.

    They are for `EmbeddingShardingPlanner(constraints=)`.

    A table with all rows in fast memory gets the kernel `fused`, one with none `fused_uvm`, and any
    other `fused_uvm_caching` with a cache of that many rows.

    Args:
        tables: Tables of the model.
        rows: Rows of each table in fast memory, as `fast_rows` finds them, [tables].
        eviction: What caches evict, see `AccessStatistics`.
    """
    found = {}
    for table, count in zip(tables, rows, strict=True):
        name = table.name.rpartition(".")[2]  # without the path of its collection
        if name in found:
            raise UserError(f"two tables are called {name}: TorchRec has constraints by that name")
        found[name] = _constraints(table, count, eviction)
    return found


def _constraints(table: EmbeddingTable, rows: int, eviction: Eviction) -> ParameterConstraints:
    if not 0 <= rows <= table.rows:
        problem = f"of table {table.name} must lie between 0 and {table.rows}, got {rows}"
        raise FieldError("rows", problem)
    kernel, cache = EmbeddingComputeKernel.FUSED_UVM_CACHING, None
    if rows == table.rows:
        kernel = EmbeddingComputeKernel.FUSED
    elif rows == 0:
        kernel = EmbeddingComputeKernel.FUSED_UVM
    else:
        cache = CacheParams(
            algorithm=CacheAlgorithm[eviction.upper()],
            load_factor=rows / table.rows,
            stats=None if table.access is None else AccessStatistics(table, eviction),
        )
    return replace(lookups_of(table), compute_kernels=[kernel.value], cache_params=cache)
