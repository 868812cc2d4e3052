"""Draws the lookups of a batch on the device that measures, where a CPU's thread would be slow.

The rows and their uses are those of `workload.access.batches`, their order is another one: 100
tables with a batch of 65,536 have some 10^8 lookups, which a thread shuffles in seconds, and a GPU
in milliseconds.
"""

import numpy as np
import torch
from torch import Tensor

from autoshard.workload import EmbeddingTable, Shard, table_lookups
from autoshard.workload.access.batches import draw_rows, even_lengths, generator_of


def draw_on(
    device: torch.device, shard: Shard, batch_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns indices and offsets of all tables of a shard, as FBGEMM takes them."""
    parts = [_lookups(device, piece.table, batch_size, seed) for piece in shard.pieces]
    lengths = torch.cat([lengths for _, lengths in parts])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), lengths.cumsum(0)])
    return torch.cat([indices for indices, _ in parts]), offsets


def _lookups(
    device: torch.device, table: EmbeddingTable, batch_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns the rows that a batch looks up, and lookups of each feature and sample."""
    if table.trace is not None:
        indices, lengths = map(torch.from_numpy, table_lookups(table, batch_size, seed))
        return indices.to(device), lengths.to(device)
    rng = generator_of(table, seed)
    drawn = draw_rows(table, batch_size, rng)
    spectrum, samples = drawn.spectrum, batch_size * table.features
    numbers = torch.arange(spectrum.distinct_rows, device=device)
    rows = (numbers * drawn.stride + drawn.first) % table.rows
    uses, classes = (torch.from_numpy(each).to(device) for each in (spectrum.uses, spectrum.rows))
    indices = rows.repeat_interleave(uses.repeat_interleave(classes))
    order = torch.Generator(device)
    order.manual_seed(int(rng.integers(np.iinfo(np.int64).max)))
    lengths = torch.from_numpy(even_lengths(len(indices), samples, rng)).to(device)
    return indices[torch.randperm(len(indices), generator=order, device=device)], lengths
