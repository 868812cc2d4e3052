"""Draws the lookups of a batch from a table's description and a seed.

Every actor draws the same batch, so none is sent. The table's spectrum gives the number of uses of
each row, an affine map selects the rows, and a shuffle orders the lookups. Memory is therefore
proportional to the number of lookups and independent of the number of rows.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoshard.workload.access import traces
from autoshard.workload.access.reuse import Spectrum, spectrum_of
from autoshard.workload.arrays import Ints
from autoshard.workload.tables.table import EmbeddingTable, Shard, digest

# Lookups are cached, because the shards of one pool of tables share most of them.
_RECENT_BYTES = 64 * 2**20
_recent: OrderedDict[tuple[str, int, int], tuple[Ints, Ints]] = OrderedDict()

_GOLDEN = 0.6180339887498949


class DrawnRows(NamedTuple):
    """The rows that a batch looks up, and how often, but not in which order.

    The rows are `first`, `first + stride`, `first + 2 * stride` and so on, modulo the table's rows;
    they are used as the spectrum says, its first class first.
    """

    spectrum: Spectrum
    first: int
    stride: int


@dataclass(frozen=True)
class IndexBatch:
    """A batch as FBGEMM takes it: the concatenated lookups of all tables and samples.

    Sample `b` of feature `f` looks up `indices[offsets[f * batch_size + b] : offsets[... + 1]]`;
    features are numbered across all tables.
    """

    indices: Ints
    offsets: Ints


def table_lookups(table: EmbeddingTable, batch_size: int, seed: int = 0) -> tuple[Ints, Ints]:
    """Returns the rows that a batch looks up, and lookups of each feature and sample."""
    if table.trace is not None:
        return traces.lookups(table.trace, batch_size)
    key = (table.access_digest, batch_size, seed)
    found = _recent.get(key)
    if found is None:
        found = _recent[key] = _draw(table, batch_size, seed)
        while sum(part.nbytes for parts in _recent.values() for part in parts) > _RECENT_BYTES:
            _recent.popitem(last=False)
    else:
        _recent.move_to_end(key)
    return found


def _draw(table: EmbeddingTable, batch_size: int, seed: int) -> tuple[Ints, Ints]:
    rng = generator_of(table, seed)
    drawn = draw_rows(table, batch_size, rng)
    numbers = np.arange(drawn.spectrum.distinct_rows, dtype=np.int64)
    ids = (numbers * drawn.stride + drawn.first) % table.rows
    indices = np.repeat(ids, np.repeat(drawn.spectrum.uses, drawn.spectrum.rows))
    rng.shuffle(indices)
    return indices, even_lengths(len(indices), batch_size * table.features, rng)


def generator_of(table: EmbeddingTable, seed: int) -> np.random.Generator:
    """Returns the source of all that is random in a table's batch."""
    return np.random.Generator(np.random.PCG64(int(digest([table.access_digest, seed]), 16)))


def draw_rows(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> DrawnRows:
    """Returns which rows a batch looks up, spread over the whole table."""
    first = int(rng.integers(table.rows))
    return DrawnRows(spectrum_of(table, batch_size), first, spreading_stride(table.rows))


def spreading_stride(rows: int) -> int:
    """Returns a stride for which multiples of it, modulo `rows`, are all rows, and neighbours are
    far from each other.
    """
    stride = max(1, int(rows * _GOLDEN))
    while math.gcd(stride, rows) != 1:
        stride += 1
    return stride % rows


def shard_batch(shard: Shard, batch_size: int, seed: int = 0) -> IndexBatch:
    """Returns the batch of all tables of a shard, in the shard's order."""
    parts = [table_lookups(piece.table, batch_size, seed) for piece in shard.pieces]
    lengths = np.concatenate([lengths for _, lengths in parts])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return IndexBatch(np.concatenate([indices for indices, _ in parts]), offsets)


def even_lengths(lookups: int, samples: int, rng: np.random.Generator) -> Ints:
    """Returns lookups of each sample: the mean, rounded down, plus one for some random samples."""
    lengths = np.full(samples, lookups // samples, dtype=np.int64)
    lengths[rng.permutation(samples)[: lookups % samples]] += 1
    return lengths
