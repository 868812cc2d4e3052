"""Tables in host memory, with caches in device memory: their traffic, and how large caches are.

FBGEMM's cache (`fused_uvm_caching`) fetches the rows that a batch uses and that it lacks before the
forward pass, and writes the rows that it evicts back. Without a cache (`fused_uvm`) each lookup
reads its row over the link, and the backward pass reads and writes each row that was used. Caches
are taken to hold the most used rows, as those do that evict the least frequently used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from autoshard.workload.access.caches import lfu_hits
from autoshard.workload.access.reuse import lookups_of
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.tables.operators import FLOAT_BYTES, WEIGHT_BYTES, OperatorOptions
from autoshard.workload.tables.table import EmbeddingTable, Piece
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import Options, common_memory, option_of

_SHARES = np.append(0.0, np.geomspace(1e-4, 0.97, 48))  # of rows that a cache may have room for
# Of all device memory, for tables and caches: what is left lets pieces be placed, and devices be
# balanced.
_FILLS = (0.98, 0.95, 0.9, 0.8, 0.65, 0.5)
_BISECTIONS = 60
_LEAST_PRICE, _MOST_PRICE = 1e-12, 1e6  # bytes over the link for a byte of memory


def link_bytes(piece: Piece, operator: OperatorOptions, batch_size: int) -> tuple[float, float]:
    """Returns the bytes between host and device that a batch moves for a piece, before or in the
    forward pass and in the backward pass.

    Args:
        piece: Piece of a table; nothing is moved if that is in device memory.
        operator: Type of the weights and optimizer.
        batch_size: Samples of a batch.
    """
    table = piece.table
    if table.cached_rows is None:
        return 0.0, 0.0
    caches = np.array([table.cached_rows], float)
    forward, backward = _link_numbers(table, caches, operator, batch_size)
    return float(forward[0]) * piece.width, float(backward[0]) * piece.width


def _link_numbers(
    table: EmbeddingTable, caches: Floats, operator: OperatorOptions, batch_size: int
) -> tuple[Floats, Floats]:
    """Returns the bytes of each column in both passes, with caches of so many rows: [caches]."""
    distinct, hits = lfu_hits(table, caches, batch_size)
    weight = WEIGHT_BYTES[operator.weights]
    cached = caches > 0
    forward = np.where(cached, 2 * (distinct - hits), lookups_of(table, batch_size)) * weight
    state = 2 * FLOAT_BYTES * distinct if operator.optimizer == "adagrad" else 0.0
    return np.asarray(forward), np.where(cached, 0.0, 2 * distinct * weight) + state


def options_with_caches(task: ShardingTask, required: Options) -> list[Options]:
    """Returns sets of options in which tables are in host memory that do not fit into that of
    devices, with caches that are smaller from set to set.

    Args:
        task: The task, with all tables in device memory.
        required: Options of tables to which rules leave no other.
    """
    budgets_bytes = [share * float(task.usable_bytes.sum()) for share in _FILLS]
    found = list[Options]()
    for counts in cached_rows(task, budgets_bytes, required):
        caches = {
            name: replace(option_of(required, name), cached_rows=count)
            for name, count in counts.items()
        }
        found.append({**required, **caches})
    return [some for number, some in enumerate(found) if some not in found[:number]]


def cached_rows(
    task: ShardingTask, budgets_bytes: Sequence[float], required: Options = MappingProxyType({})
) -> Iterator[dict[str, int]]:
    """Yields which tables to keep in host memory, and the rows that their caches have room for.

    Minimises the bytes that a batch moves between host and devices, with all that devices hold
    within the budget. One price of memory holds for all tables: each takes the cache, or none and
    all of its rows in device memory, for which traffic and memory at that price are least.

    Args:
        task: The task, with all tables in device memory.
        budgets_bytes: Memory of all devices together, for each choice.
        required: Options of tables to which rules leave no other; copied ones are in device memory.
    """
    tables = [table for table in task.tables if not option_of(required, table.name).has_copies]
    if not tables:
        yield from ({} for _ in budgets_bytes)
        return
    memory, traffic = np.stack([_choices(task, table) for table in tables], axis=1)
    taken = len(task.devices) * common_memory(task, required).total
    for budget_bytes in budgets_bytes:
        chosen = _cheapest(memory, traffic, budget_bytes - taken)
        yield {
            table.name: int(_caches(table)[number])
            for table, number in zip(tables, chosen.tolist(), strict=True)
            if number < len(_SHARES)
        }


def _cheapest(memory: Floats, traffic: Floats, budget_bytes: float) -> Ints:
    """Returns the choice of each table by the lowest price of memory that keeps the budget.

    Args:
        memory: Bytes that each choice takes, [tables, choices].
        traffic: Bytes that it moves over the link, [tables, choices].
        budget_bytes: Memory for all tables.
    """
    low, high = _LEAST_PRICE, _MOST_PRICE
    chosen = (traffic + _MOST_PRICE * memory).argmin(1)
    each = np.arange(len(memory))
    for _ in range(_BISECTIONS):
        price = float(np.sqrt(low * high))
        found = (traffic + price * memory).argmin(1)
        if memory[each, found].sum() > budget_bytes:
            low = price
        else:
            high, chosen = price, found
    return np.asarray(chosen)


def _caches(table: EmbeddingTable) -> Floats:
    return np.asarray(np.floor(_SHARES * table.rows))


def _choices(task: ShardingTask, table: EmbeddingTable) -> Floats:
    """Returns the memory and link bytes with each cache, and with none and all rows in device
    memory: [2, caches + 1].
    """
    caches = _caches(table)
    forward, backward = _link_numbers(table, caches, task.operator, task.batch_size)
    traffic = np.append((forward + backward) * table.dim, 0.0)
    memory = [task.table_bytes(replace(table, cached_rows=int(count))) for count in caches]
    return np.stack([np.array([*memory, task.table_bytes(table)], float), traffic])
