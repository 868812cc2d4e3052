"""Acquisition: selects the shards whose measurement reduces a task's uncertainty most."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy import sparse

from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.cost_model.uncertainty.contributions import EmbeddedShards
from autoshard.workload import EmbeddingTable, Piece, Shard, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.tables.table import can_be_split, halves

_GROUP_SIZES = (2, 4, 8)  # tables that are measured together
_OVERHEAD_MS = 5.0  # time for setting up and reading a shard, beside its own cost
_MAX_CANDIDATES = 600  # shards that enter greedy selection
_MIN_MS = 1e-9


def select_measurements(
    oracle: EstimatedCosts,
    task: ShardingTask,
    competing: Sequence[Shard],
    count: int,
    fits: Callable[[Shard], bool],
    seed: int = 0,
) -> list[Shard]:
    """Selects up to `count` unmeasured shards to measure next, the most informative first.

    Candidates are single tables, groups of tables with similar uncertainty, and the shards of
    competing plans. Selection is greedy by reduction of table-cost variance (ms^2) per ms of
    measuring time; each pick updates the posterior.

    Args:
        oracle: Cost oracle with the current posterior of table corrections.
        task: Task to plan.
        competing: Shards of competing plans.
        count: Maximum number of shards.
        fits: Returns whether a measuring device has memory for a shard.
        seed: Seed for grouping tables.
    """
    pieces = [measurable_piece(table, fits) for table in task.tables]
    substitutes = [p.table for p, t in zip(pieces, task.tables, strict=True) if p.table is not t]
    known = {table.access_digest for table in (*task.tables, *substitutes)}
    blocks = {
        piece.table.access_digest: piece.table
        for shard in competing
        for piece in shard.pieces
        if piece.table.access_digest not in known  # blocks of rows
    }
    tables = [*task.tables, *substitutes, *blocks.values()]
    covariance = np.mean(oracle.residuals.posterior(tables).covariances, axis=0)
    deviations = np.sqrt(np.diag(covariance)[: len(pieces)])
    alone = [Shard((piece,)) for piece in pieces]
    candidates = [*alone, *_groups(pieces, deviations, seed), *competing]
    # A shard that was measured once says no more about its tables.
    fresh = [s for s in candidates if oracle.residuals.of_shard(s).uncertainty == 1.0 and fits(s)]
    candidates = list({shard.digest: shard for shard in fresh}.values())
    if not candidates:
        return []
    batches = [oracle.batch_size] * len(candidates)
    residuals, _ = oracle.residuals.estimates(tables)
    held = EmbeddedShards(oracle.model.compute, candidates, batches, tables)
    total, parts = held.contributions(residuals).together()
    costs = np.zeros(len(tables))
    costs[: len(pieces)] = oracle.prices([Shard((t.whole(),)) for t in task.tables]).total_ms
    shares = sparse.diags(1 / np.maximum(total, _MIN_MS)) @ parts
    noise, times_ms = np.square(oracle.residuals.prior.rest_of(total)), total + _OVERHEAD_MS
    cross = np.asarray(shares @ covariance)  # covariance of each candidate with each table
    variances = noise + np.asarray(shares.multiply(cross).sum(1)).ravel()
    gains = np.square(cross * costs).sum(1) / variances / times_ms
    kept = np.argsort(-gains)[: max(_MAX_CANDIDATES, 2 * count)]
    candidates = [candidates[number] for number in kept]
    shares, cross = shares[kept].toarray(), cross[kept]
    noise, variances, times_ms = noise[kept], variances[kept], times_ms[kept]
    chosen: list[int] = []
    for _ in range(min(count, len(candidates))):
        gains = np.square(cross * costs).sum(1) / variances / times_ms
        gains[chosen] = -1.0
        best = int(gains.argmax())
        chosen.append(best)
        # The posterior covariance after measuring it: an update of rank one.
        with_best = cross @ shares[best]
        cross = cross - with_best[:, None] * cross[best] / variances[best]
        variances = noise + np.maximum(0.0, (cross * shares).sum(1))
    return [candidates[number] for number in chosen]


def measurable_piece(table: EmbeddingTable, fits: Callable[[Shard], bool]) -> Piece:
    """Returns the whole table, or the widest of its column slices that fits, split by halves.

    If none fits, a slice of a similar table with fewer rows is returned; the correction of that
    table informs similar ones.
    """
    piece = table.whole()
    while not fits(Shard((piece,))):
        if can_be_split(piece):
            piece, _ = halves(piece)
        elif piece.table.rows > 1:
            lower = replace(piece.table, rows=piece.table.rows // 2, trace=None, access=None)
            piece = replace(piece, table=lower)
        else:
            break
    return piece


def _groups(pieces: Sequence[Piece], deviations: Floats, seed: int) -> list[Shard]:
    """Returns random groups of pieces with similar uncertainty."""
    rng = np.random.default_rng([seed, len(pieces)])
    order = np.argsort(-deviations).tolist()
    found = []
    for size in _GROUP_SIZES:
        for first in range(0, len(order) - size + 1, size):
            near = order[first : first + 2 * size]
            drawn = rng.choice(len(near), size, replace=False)
            found.append(Shard(tuple(pieces[near[n]] for n in drawn)))
    return found
