"""Reuse of rows: how often a batch uses each of a table's rows.

A *spectrum* is the number of distinct rows that are used once, twice, and so on. Index batches are
drawn from it and features are computed from it, so they are consistent. It follows from the table's
reuse bins, thinned to smaller batches, or from its Zipf law.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special

from autoshard.workload.arrays import Bools, Floats, Ints
from autoshard.workload.tables.table import NUM_REUSE_BINS, EmbeddingTable

# Bin k holds rows used more than LOWER[k] and at most UPPER[k] times in the batch.
UPPER: Floats = np.exp2(np.arange(NUM_REUSE_BINS, dtype=np.float64))
LOWER: Floats = np.concatenate([[0.0], UPPER[:-1]])

_GROUPS_PER_BIN = 64  # rows of a group have the same number of uses
_EXACT_RANKS = 256  # the most popular rows of a Zipf law, each with its own popularity
_RANK_CLASSES = 512  # classes of similar popularity for all other rows
_MIN_POPULATION = 1e-12
# Range of the log2 exponent that distributes uses within bins, from nearly all at the top to nearly
# all at the bottom, and the number of bisection steps.
_MAX_LOG_BEND = 6.0
_BISECTIONS = 24
_NEGLIGIBLE = 40.0  # negative logarithm of a probability that is treated as 0


@dataclass(frozen=True)
class Spectrum:
    """`rows[i]` distinct rows are used `uses[i]` times each in the batch."""

    uses: Ints
    rows: Ints

    @property
    def distinct_rows(self) -> int:
        """Returns the number of rows used at least once."""
        return int(self.rows.sum())

    @property
    def lookups(self) -> int:
        """Returns the uses of all rows together."""
        return int((self.uses * self.rows).sum())

    def bins(self) -> Floats:
        """Returns the share of distinct rows in each of the 17 reuse bins."""
        return histogram(self.uses, self.rows)


def histogram(uses: Ints, rows: Ints | None = None) -> Floats:
    """Returns the share of distinct rows in each reuse bin; zeros if there are none."""
    weights = np.ones(len(uses)) if rows is None else rows.astype(float)
    counts = np.bincount(bin_of(uses), weights=weights, minlength=NUM_REUSE_BINS)
    return np.asarray(counts / max(counts.sum(), 1.0), dtype=np.float64)


def bin_of(uses: Ints) -> Ints:
    """Returns the reuse bin of each number of uses (at least 1)."""
    exponents = np.ceil(np.log2(np.maximum(uses, 1))).astype(np.int64)
    return np.minimum(exponents, NUM_REUSE_BINS - 1)


def lookups_of(table: EmbeddingTable, batch_size: int) -> int:
    """Returns the number of lookups of a batch in the table."""
    return round(table.pooling_factor * batch_size)


class Access(NamedTuple):
    """Parameters of a batch's lookups in a table, which determine its spectrum.

    Args:
        rows: Rows of the table.
        lookups: Lookups of the batch.
        alpha: Exponent of the Zipf law, where there are no bins.
        reuse: Shares of distinct rows in the reuse bins.
        thinning: Where bins were counted in a larger batch: its lookups, and the share that this
            batch has of them.
    """

    rows: int
    lookups: int
    alpha: float
    reuse: tuple[float, ...] | None
    thinning: tuple[int, float] | None


def access_of(table: EmbeddingTable, batch_size: int) -> Access:
    """Returns the access of a batch of `batch_size` samples, independent of dim and name."""
    counted, thinning = table.reuse_batch_size, None
    if table.reuse is not None and counted is not None and batch_size < counted:
        thinning = lookups_of(table, counted), batch_size / counted
    lookups = lookups_of(table, batch_size)
    return Access(table.rows, lookups, table.zipf_alpha or 0.0, table.reuse, thinning)


def spectrum_of(table: EmbeddingTable, batch_size: int) -> Spectrum:
    """Returns the spectrum of a batch of `batch_size` samples, independent of dim and name."""
    return spectrum_by(access_of(table, batch_size))


@lru_cache(maxsize=16384)
def spectrum_by(access: Access) -> Spectrum:
    """Returns the spectrum of an access."""
    if access.lookups == 0:
        return Spectrum(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return _fit(whole_rows([access])[0], access.lookups)


def whole_rows(accesses: Sequence[Access]) -> Ints:
    """Returns distinct rows in each bin, [accesses, bins]. Each access must have lookups."""
    limits = np.array([min(access.rows, access.lookups) for access in accesses], np.int64)
    return _rounded(_populations(accesses), limits)


def _populations(accesses: Sequence[Access]) -> Floats:
    """Returns expected distinct rows in each bin, [accesses, bins]; vectorized where possible."""
    found = np.empty((len(accesses), NUM_REUSE_BINS))
    binned, uniform = [], []
    for number, access in enumerate(accesses):
        if access.thinning is not None:
            counted, kept = access.thinning
            before = access._replace(lookups=counted, alpha=0.0, thinning=None)
            found[number] = _thinned_population(spectrum_by(before), kept)
        elif access.reuse is not None:
            binned.append(number)
        elif access.alpha == 0:
            uniform.append(number)
        else:
            found[number] = _zipf_population(access.rows, access.lookups, access.alpha)
    lookups = np.array([access.lookups for access in accesses], float)
    if binned:
        shares = np.array([accesses[number].reuse for number in binned])
        # Row by row, because a matrix product rounds differently for many rows than for one.
        means = np.array([float(row @ _MEAN_USES) for row in shares])
        found[binned] = shares * (lookups[binned] / means)[:, None]
    if uniform:
        rows = np.array([accesses[number].rows for number in uniform], float)
        found[uniform] = rows[:, None] * shares_of_bins(lookups[uniform] / rows)
    return found


def shares_of_bins(rates: Floats) -> Floats:
    """Returns the share of rows in each bin for Poisson uses with these rates: [rates, bins]."""
    at_most = special.pdtr(UPPER[None, :-1], rates[:, None])
    below = np.concatenate([np.exp(-rates)[:, None], at_most], axis=1)
    above = np.concatenate([at_most, np.ones((len(rates), 1))], axis=1)
    return np.asarray(np.maximum(above - below, 0.0), dtype=np.float64)


def popularity(rows: int, alpha: float, shift: float = 0.0) -> tuple[Floats, Floats]:
    """Returns classes of rows by popularity (rank + shift)**-alpha, the most popular first.

    Returns:
        Number of rows in each class, and the popularity of one of them, [classes].
    """
    exact = np.arange(1, min(rows, _EXACT_RANKS) + 2, dtype=float)
    edges = exact
    if rows > _EXACT_RANKS:
        tail = np.geomspace(_EXACT_RANKS + 1, rows + 1, _RANK_CLASSES + 1)
        edges = np.concatenate([exact[:-1], tail])
    middle = np.where(edges[:-1] <= _EXACT_RANKS, edges[:-1], _middle_rank(edges))
    return np.diff(edges), np.asarray((middle + shift) ** -alpha, dtype=np.float64)


def _zipf_population(rows: int, lookups: int, alpha: float) -> Floats:
    """Returns expected distinct rows in each bin for popularity rank**-alpha."""
    members, popular = popularity(rows, alpha)
    rates = lookups * popular / (members * popular).sum()
    return np.asarray(members @ shares_of_bins(rates), dtype=np.float64)


def _middle_rank(edges: Floats) -> Floats:
    """Returns the geometric middle of the ranks in each class."""
    first, last = edges[:-1] - 0.5, edges[1:] - 0.5
    return np.asarray(np.sqrt(first * last), dtype=np.float64)


def _thinned_population(spectrum: Spectrum, kept: float) -> Floats:
    """Returns expected distinct rows in each bin if lookups are kept with probability `kept`."""
    different, groups = np.unique(spectrum.uses, return_inverse=True)
    rows = np.bincount(groups, weights=spectrum.rows)
    uses = different.astype(float)[:, None]
    at_most = kept_at_most(UPPER[None, :-1], uses, kept)
    below = np.concatenate([(1 - kept) ** uses, at_most], axis=1)
    above = np.concatenate([at_most, np.ones((len(uses), 1))], axis=1)
    return np.asarray(rows @ np.maximum(above - below, 0.0), dtype=np.float64)


def kept_at_most(limit: Floats, uses: Floats, kept: float) -> Floats:
    """Returns the probability that at most `limit` of `uses` are kept.

    Most are 0 or 1 in double precision by Chernoff's bound; only the others are computed.
    """
    limit, uses = np.broadcast_arrays(limit, uses)
    mean = kept * uses
    unsure = (uses > limit) & (mean - limit + limit * np.log(limit / mean) < _NEGLIGIBLE)
    found = np.where((uses <= limit) | (limit > mean), 1.0, 0.0)
    found[unsure] = special.bdtr(limit[unsure], uses[unsure], kept)
    return found


def _rounded(population: Floats, limits: Ints) -> Ints:
    """Returns whole rows in each bin, [tables, bins]; in sum between 1 and the table's limit.

    Rounds the cumulative sum from the most used bin down. The few most used rows have most of the
    lookups, and rounding each bin separately would lose them.
    """
    total = population.sum(-1)
    fitting = np.minimum(np.maximum(total, 1.0), limits) / np.maximum(total, _MIN_POPULATION)
    scaled = population * fitting[:, None]
    from_top = np.floor(np.cumsum(scaled[:, ::-1], axis=-1) + 0.5).astype(np.int64)
    from_top = np.minimum(from_top, limits[:, None])
    whole = np.diff(from_top, axis=-1, prepend=0)[:, ::-1].copy()
    empty = np.flatnonzero(whole.sum(-1) == 0)
    whole[empty, scaled[empty].argmax(-1)] = 1
    return whole


def _uses_within(bins: Ints, positions: Floats, bend: float) -> Ints:
    """Returns uses of rows at `positions` (0 to 1) in their bins; smaller `bend`: more uses."""
    lower, upper = LOWER[bins], UPPER[bins]
    uses = np.ceil(np.maximum(lower, 0.5) * 2.0 ** (positions**bend))
    return np.clip(uses, lower + 1, upper).astype(np.int64)


def _mean_uses() -> Floats:
    positions = (np.arange(4096) + 0.5) / 4096
    means = [
        _uses_within(np.full(4096, k, np.int64), positions, 1.0).mean()
        for k in range(NUM_REUSE_BINS)
    ]
    return np.array(means)


_MEAN_USES: Floats = _mean_uses()


@cache
def _min_uses() -> tuple[Floats, Floats]:
    """Returns minimum total uses of 0 to 64 rows of each bin in `_fit`, [bins, rows + 1], and the
    range of uses of 64 rows, [bins].
    """
    sums = np.zeros((NUM_REUSE_BINS, _GROUPS_PER_BIN + 1))
    bins = np.arange(NUM_REUSE_BINS)[:, None]
    for rows in range(1, _GROUPS_PER_BIN + 1):
        uses = _uses_within(bins, (np.arange(rows) + 0.5) / rows, 2.0**_MAX_LOG_BEND)
        sums[:, rows] = uses.sum(-1)
    return sums, np.asarray(uses[:, -1] - uses[:, 0], dtype=np.float64)


def stay_in_bins(rows: Ints, lookups: Ints) -> Bools:
    """Returns where `_fit` surely leaves all uses inside their bins, so that `rows` is exact.

    Args:
        rows: Rows in each bin, [tables, bins].
        lookups: Lookups of each table.
    """
    sums, spread = _min_uses()
    few = sums[np.arange(NUM_REUSE_BINS), np.minimum(rows, _GROUPS_PER_BIN)]
    # Groups of many rows differ by one row at most, which may be in the group with most uses.
    many = rows * (sums[:, -1] / _GROUPS_PER_BIN) + spread
    fewest = np.where(rows > _GROUPS_PER_BIN, many, few).sum(-1)
    return np.asarray((fewest <= lookups) & (lookups <= rows @ UPPER))


def mean_uses() -> Floats:
    """Returns the mean uses of a row of each bin."""
    return _MEAN_USES.copy()


def _fit(whole_rows: Ints, lookups: int) -> Spectrum:
    """Returns a spectrum with these rows in each bin and exactly `lookups` uses in sum."""
    groups = np.minimum(whole_rows, _GROUPS_PER_BIN)
    bins = np.repeat(np.arange(NUM_REUSE_BINS), groups)
    places = np.arange(len(bins)) - np.repeat(np.cumsum(groups) - groups, groups)
    positions = (places + 0.5) / groups[bins]
    size = (whole_rows / np.maximum(groups, 1))[bins]
    weights = (np.floor((places + 1) * size) - np.floor(places * size)).astype(np.int64)

    def too_many(log_bend: float) -> bool:
        uses = _uses_within(bins, positions, 2.0**log_bend)
        return int((uses * weights).sum()) > lookups

    low, high = -_MAX_LOG_BEND, _MAX_LOG_BEND
    nearly = low + (high - low) / 2**_BISECTIONS
    if not too_many(nearly):  # all rows are at the top of their bins
        high = nearly
    elif not too_many(high):
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if too_many(middle) else (low, middle)
    uses = _uses_within(bins, positions, 2.0**high)
    return _settle(uses, weights, UPPER[bins].astype(np.int64), lookups)


def _settle(uses: Ints, rows: Ints, upper: Ints, lookups: int) -> Spectrum:
    """Corrects the rounding error of the sum of uses, within the bins as far as possible."""
    if int((uses * rows).sum()) > lookups:  # too few lookups for the bins: scale down
        uses = np.maximum(1, (uses * (lookups / (uses * rows).sum())).astype(np.int64))
        while (excess := int((uses * rows).sum()) - lookups) > 0:
            heaviest = int(np.argmax(np.where(uses > 1, uses * rows, 0)))
            cut = min(uses[heaviest] - 1, max(1, excess // rows[heaviest]))
            uses[heaviest] -= cut
        upper = np.maximum(upper, uses)
    spectrum = [uses], [rows]
    for stretch in (False, True):  # within the bins first, beyond them only if rows are too few
        gap = lookups - sum(int((u * r).sum()) for u, r in zip(*spectrum, strict=True))
        if gap <= 0:
            break
        spectrum = _spread(spectrum[0], spectrum[1], upper, gap, stretch)
    all_uses, all_rows = np.concatenate(spectrum[0]), np.concatenate(spectrum[1])
    kept = all_rows > 0
    return Spectrum(all_uses[kept], all_rows[kept])


def _spread(
    uses: list[Ints], rows: list[Ints], upper: Ints, gap: int, stretch: bool
) -> tuple[list[Ints], list[Ints]]:
    """Adds `gap` uses to the first group of rows, most used ones first."""
    base, weights = uses[0].copy(), rows[0].copy()
    extra_uses, extra_rows = [], []
    if stretch:  # scale up, then add the rounding error
        factor = 1 + gap / float((base * weights).sum())
        stretched = np.floor(base * factor).astype(np.int64)
        gap -= int(((stretched - base) * weights).sum())
        base = stretched
    for group in np.argsort(-base, kind="stable").tolist():
        if gap == 0:
            break
        free = gap if stretch else int(upper[group] - base[group])
        step = min(free, gap // int(weights[group]))
        base[group] += step
        gap -= step * int(weights[group])
        if 0 < gap < weights[group] and step < free:  # one more use for some rows of the group
            extra_uses.append(base[group] + 1)
            extra_rows.append(gap)
            weights[group] -= gap
            gap = 0
    return (
        [base, *uses[1:], np.array(extra_uses, np.int64)],
        [weights, *rows[1:], np.array(extra_rows, np.int64)],
    )
