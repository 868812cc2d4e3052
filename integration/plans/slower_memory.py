"""Rows in slower memory, as constraints of TorchRec's planner."""

from collections.abc import Sequence
from dataclasses import replace

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheAlgorithm, CacheParams

from autoshard.integration.models.names import lookups_of
from autoshard.integration.plans.cache_statistics import AccessStatistics, Eviction
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tables.table import EmbeddingTable


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


def cache_of(table: EmbeddingTable, rows: int, eviction: Eviction = "lfu") -> CacheParams | None:
    """Returns the cache of so many rows of a table in host memory; None if there are none."""
    if rows == 0:
        return None
    return CacheParams(
        algorithm=CacheAlgorithm[eviction.upper()],
        load_factor=rows / table.rows,
        stats=None if table.access is None else AccessStatistics(table, eviction),
    )


def kernel_of(rows: int) -> str:
    """Returns the kernel of a table in host memory with a cache of so many rows."""
    kernels = EmbeddingComputeKernel
    return str((kernels.FUSED_UVM_CACHING if rows else kernels.FUSED_UVM).value)


def _constraints(table: EmbeddingTable, rows: int, eviction: Eviction) -> ParameterConstraints:
    if not 0 <= rows <= table.rows:
        problem = f"of table {table.name} must lie between 0 and {table.rows}, got {rows}"
        raise FieldError("rows", problem)
    if rows == table.rows:
        kernel, cache = str(EmbeddingComputeKernel.FUSED.value), None
    else:
        kernel, cache = kernel_of(rows), cache_of(table, rows, eviction)
    return replace(lookups_of(table), compute_kernels=[kernel], cache_params=cache)
