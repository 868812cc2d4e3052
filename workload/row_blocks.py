"""Blocks of rows: what each device holds of a table that is sharded by rows.

TorchRec assigns ids to ranks by `id // ceil(rows / ranks)`, so blocks are even; only the last ones
may be smaller. Each block serves the lookups that fall into it, for the samples of all ranks, and
gives partial sums of full width. So a block costs what a table of its own would cost, with as many
rows and lookups, on a fixed device; and the reduce-scatter of partial sums moves as many bytes as
an all-to-all in which every device has all columns of the table.

Lookups of blocks follow from the histogram of the table's rows (`RowAccess.blocks`). Where none is
known, ids are taken to be unrelated to how often they are used, as hashed ids are: then blocks are
used alike. The share of rows in each reuse bin is taken to be that of the whole table.
"""

from dataclasses import replace
from functools import lru_cache

from autoshard.workload.row_access import RowAccess
from autoshard.workload.tables import EmbeddingTable

_MAX_KNOWN = 2**14


def rows_of_block(rows: int, count: int) -> int:
    """Returns the rows of each of `count` even blocks; the last ones may have fewer, or none."""
    return -(-rows // count)


def can_be_blocks(rows: int, count: int) -> bool:
    """Returns whether each of `count` even blocks of so many rows has any."""
    return rows_of_block(rows, count) * (count - 1) < rows


def row_blocks(table: EmbeddingTable, count: int) -> tuple[EmbeddingTable, ...]:
    """Returns `count` even blocks of a table's rows, each as a table of its own.

    They are named like slices: `item[0:500]`. Lookups that were recorded are not kept: blocks have
    the table's reuse bins.
    """
    return _blocks(table, count, table.access)


@lru_cache(_MAX_KNOWN)
def _blocks(
    table: EmbeddingTable, count: int, access: RowAccess | None
) -> tuple[EmbeddingTable, ...]:
    """Returns `row_blocks`; tables that differ in `access` alone are equal."""
    size = rows_of_block(table.rows, count)
    shares = [1 / count] * count
    if access is not None:
        shares = access.even_blocks(table.rows, count).tolist()
    found = []
    for number, share in enumerate(shares):
        first, last = number * size, min((number + 1) * size, table.rows)
        found.append(
            replace(
                table,
                name=f"{table.name}[{first}:{last}]",
                rows=last - first,
                pooling_factor=table.pooling_factor * share,
                trace=None,
                access=None,
            )
        )
    return tuple(found)
