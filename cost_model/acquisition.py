"""Which shards tell most about a task, if they are measured next."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy import sparse

from autoshard.cost_model.contributions import EmbeddedShards
from autoshard.cost_model.oracle import EstimatedCosts
from autoshard.workload import EmbeddingTable, Piece, Shard, ShardingTask
from autoshard.workload.tables import can_be_split, halves

Floats = npt.NDArray[np.float64]

_COMPANIES = (2, 4, 8)  # tables that are measured together
_OVERHEAD_MS = 5.0  # that a shard takes beside its own cost: to be set up, and read
_LIKELY = 600  # candidates that are looked at one by one
_MIN_MS = 1e-9


def select_measurements(
    oracle: EstimatedCosts,
    task: ShardingTask,
    competing: Sequence[Shard],
    count: int,
    fits: Callable[[Shard], bool],
    seed: int = 0,
) -> list[Shard]:
    """At most `count` shards, the most telling for its time first.

    Candidates are the task's tables alone, in company of others as doubtful, and the shards of
    plans that compete. One tells as much as it takes off the variance of what tables cost, in ms^2:
    strange and costly ones come first, and what shards before it have told counts.

    Args:
        oracle: what is known by now.
        task: what is to be planned.
        rivals: shards of plans that compete for it.
        count: shards.
        fits: whether a device that measures has room for a shard.
        seed: of the companies.
    """
    pieces = [measurable_piece(table, fits) for table in task.tables]
    standing_in = [p.table for p, t in zip(pieces, task.tables, strict=True) if p.table is not t]
    tables = [*task.tables, *standing_in]
    covariance = np.mean(oracle.residuals.covariances(tables), axis=0)
    doubts = np.sqrt(np.diag(covariance)[: len(pieces)])
    alone = [Shard((piece,)) for piece in pieces]
    candidates = [*alone, *_companies(pieces, doubts, seed), *competing]
    # What was measured once has told what it can: the rest is its own.
    new = {
        s.digest: s
        for s in candidates
        if oracle.residuals.of_shard(s).uncertainty == 1.0 and fits(s)
    }
    candidates = list(new.values())
    if not candidates:
        return []
    batches = [oracle.batch_size] * len(candidates)
    residuals, _ = oracle.residuals.estimates(tables)
    held = EmbeddedShards(oracle.model.compute, candidates, batches, tables)
    total, parts = held.contributions(residuals).together()
    costs = np.zeros(len(tables))  # that depend on what is not known
    costs[: len(pieces)] = oracle.prices([Shard((t.whole(),)) for t in task.tables]).total_ms
    shares = sparse.diags(1 / np.maximum(total, _MIN_MS)) @ parts
    noise, pace = oracle.residuals.prior.rest**2, total + _OVERHEAD_MS
    told = np.asarray(shares @ covariance)  # of each candidate with each table
    variances = noise + np.asarray(shares.multiply(told).sum(1)).ravel()
    first = np.square(told * costs).sum(1) / variances / pace
    likely = np.argsort(-first)[: max(_LIKELY, 2 * count)]
    candidates = [candidates[number] for number in likely]
    shares, told = shares[likely].toarray(), told[likely]
    variances, pace = variances[likely], pace[likely]
    chosen: list[int] = []
    for _ in range(min(count, len(candidates))):
        gains = np.square(told * costs).sum(1) / variances / pace
        gains[chosen] = -1.0
        best = int(gains.argmax())
        chosen.append(best)
        # One that is measured takes its part off all others: a step of rank one.
        line, spread = told[best].copy(), variances[best]
        met = told @ shares[best]
        told = told - met[:, None] * line[None] / spread
        variances = noise + np.maximum(0.0, (told * shares).sum(1))
    return [candidates[number] for number in chosen]


def measurable_piece(table: EmbeddingTable, fits: Callable[[Shard], bool]) -> Piece:
    """All of the table, or the widest of its slices, halved again and again, that fits.

    Where none fits, of a table like it with fewer rows: what is learned of that one is believed of
    tables that are alike.
    """
    piece = table.whole()
    while not fits(Shard((piece,))):
        if can_be_split(piece):
            piece, _ = halves(piece)
        elif piece.table.rows > 1:
            lower = replace(piece.table, rows=piece.table.rows // 2, trace=None)
            piece = replace(piece, table=lower)
        else:
            break
    return piece


def _companies(pieces: Sequence[Piece], doubts: Floats, seed: int) -> list[Shard]:
    """Tables with others that are about as doubtful."""
    rng = np.random.default_rng([seed, len(pieces)])
    order = np.argsort(-doubts).tolist()
    found = []
    for size in _COMPANIES:
        for first in range(0, len(order) - size + 1, size):
            near = order[first : first + 2 * size]
            some = rng.choice(len(near), size, replace=False)
            found.append(Shard(tuple(pieces[near[n]] for n in some)))
    return found
