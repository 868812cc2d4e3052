"""How often a batch uses each of a table's rows.

A *spectrum* says how many distinct rows are used once, twice, and so on. The index batches are
drawn from it and the features are read off it, so both always tell the same story. It comes from
the table's reuse bins, thinned to smaller batches, or from its Zipf law.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from autoshard.workload.tables import NUM_REUSE_BINS, EmbeddingTable

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

# Bin k holds rows used more than LOWER[k] and at most UPPER[k] times in the batch.
UPPER: Floats = np.exp2(np.arange(NUM_REUSE_BINS, dtype=np.float64))
LOWER: Floats = np.concatenate([[0.0], UPPER[:-1]])

_GROUPS_PER_BIN = 64  # rows of a bin that get one common number of uses, at most rows / 64 of them
_EXACT_RANKS = 256  # the most popular rows, each a class of its own in a Zipf law
_RANK_CLASSES = 512  # classes of near equal popularity for all the others
_MIN_POPULATION = 1e-12
# The logarithm (base 2) of the bend of uses within bins: from nearly all at the top to nearly all
# at the bottom, and in how many halvings it is searched for.
_MAX_BENT = 6.0
_HALVINGS = 24
_SURE = 40.0  # minus the logarithm of a probability that is as good as none


@dataclass(frozen=True)
class Spectrum:
    """`rows[i]` distinct rows are used `uses[i]` times each in the batch."""

    uses: Whole
    rows: Whole

    @property
    def distinct_rows(self) -> int:
        """Rows used at least once."""
        return int(self.rows.sum())

    @property
    def lookups(self) -> int:
        """Uses of all rows together."""
        return int((self.uses * self.rows).sum())

    def bins(self) -> Floats:
        """Share of the distinct rows in each of the 17 reuse bins."""
        return histogram(self.uses, self.rows)


def histogram(uses: Whole, rows: Whole | None = None) -> Floats:
    """Share of distinct rows in each reuse bin; zeros if there are none."""
    weights = np.ones(len(uses)) if rows is None else rows.astype(float)
    counts = np.bincount(bin_of(uses), weights=weights, minlength=NUM_REUSE_BINS)
    return np.asarray(counts / max(counts.sum(), 1.0), dtype=np.float64)


def bin_of(uses: Whole) -> Whole:
    """The reuse bin of each number of uses (at least 1)."""
    exponents = np.ceil(np.log2(np.maximum(uses, 1))).astype(np.int64)
    return np.minimum(exponents, NUM_REUSE_BINS - 1)


def lookups_of(table: EmbeddingTable, batch_size: int) -> int:
    """Lookups that a batch makes in the table."""
    return round(table.pooling_factor * batch_size)


class Access(NamedTuple):
    """How a batch looks rows up in a table: all that its spectrum follows from.

    Args:
        rows: of the table.
        lookups: of the batch.
        alpha: of the Zipf law, where there are no bins.
        reuse: shares of distinct rows in the reuse bins.
        thinning: where the bins were counted in a larger batch: its lookups, and the share of them
            that is left.
    """

    rows: int
    lookups: int
    alpha: float
    reuse: tuple[float, ...] | None
    thinning: tuple[int, float] | None


def access_of(table: EmbeddingTable, batch_size: int) -> Access:
    """How a batch of `batch_size` samples looks rows up. The same for every dim and name."""
    counted, thinning = table.reuse_batch_size, None
    if table.reuse is not None and counted is not None and batch_size < counted:
        thinning = lookups_of(table, counted), batch_size / counted
    lookups = lookups_of(table, batch_size)
    return Access(table.rows, lookups, table.zipf_alpha or 0.0, table.reuse, thinning)


def spectrum_of(table: EmbeddingTable, batch_size: int) -> Spectrum:
    """The table's spectrum in a batch of `batch_size` samples. The same for every dim and name."""
    return spectrum_by(access_of(table, batch_size))


@lru_cache(maxsize=16384)
def spectrum_by(access: Access) -> Spectrum:
    """The spectrum of a batch that looks rows up in this way."""
    if access.lookups == 0:
        return Spectrum(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return _fit(whole_rows([access])[0], access.lookups)


def whole_rows(accesses: Sequence[Access]) -> Whole:
    """Distinct rows in each bin [accesses, bins], at least one in all. Each batch has lookups."""
    limits = np.array([min(access.rows, access.lookups) for access in accesses], np.int64)
    return _rounded(_populations(accesses), limits)


def _populations(accesses: Sequence[Access]) -> Floats:
    """Expected distinct rows in each bin: [accesses, bins]. What is common goes all at once."""
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
        # Row by row: a product of matrices would round otherwise for many than for one.
        means = np.array([float(row @ _MEAN_USES) for row in shares])
        found[binned] = shares * (lookups[binned] / means)[:, None]
    if uniform:
        rows = np.array([accesses[number].rows for number in uniform], float)
        found[uniform] = rows[:, None] * _in_bins(lookups[uniform] / rows)
    return found


def _in_bins(rates: Floats) -> Floats:
    """Of rows that are used so often in the mean, drawn at random: the share in each bin."""
    at_most = special.pdtr(UPPER[None, :-1], rates[:, None])
    below = np.concatenate([np.exp(-rates)[:, None], at_most], axis=1)
    above = np.concatenate([at_most, np.ones((len(rates), 1))], axis=1)
    return np.asarray(np.maximum(above - below, 0.0), dtype=np.float64)


def _zipf_population(rows: int, lookups: int, alpha: float) -> Floats:
    """Expected distinct rows in each bin when rows are drawn with popularity rank**-alpha."""
    exact = np.arange(1, min(rows, _EXACT_RANKS) + 2, dtype=float)
    edges = exact
    if rows > _EXACT_RANKS:
        tail = np.geomspace(_EXACT_RANKS + 1, rows + 1, _RANK_CLASSES + 1)
        edges = np.concatenate([exact[:-1], tail])
    members = np.diff(edges)
    popularity = np.where(edges[:-1] <= _EXACT_RANKS, edges[:-1], _middle_rank(edges)) ** -alpha
    rates = lookups * popularity / (members * popularity).sum()
    return np.asarray(members @ _in_bins(rates), dtype=np.float64)


def _middle_rank(edges: Floats) -> Floats:
    """The geometric middle of the ranks in each class from one edge to before the next."""
    first, last = edges[:-1] - 0.5, edges[1:] - 0.5
    return np.asarray(np.sqrt(first * last), dtype=np.float64)


def _thinned_population(spectrum: Spectrum, kept: float) -> Floats:
    """Expected distinct rows in each bin when each lookup is kept with probability `kept`."""
    different, groups = np.unique(spectrum.uses, return_inverse=True)
    rows = np.bincount(groups, weights=spectrum.rows)
    uses = different.astype(float)[:, None]
    at_most = kept_at_most(UPPER[None, :-1], uses, kept)
    below = np.concatenate([(1 - kept) ** uses, at_most], axis=1)
    above = np.concatenate([at_most, np.ones((len(uses), 1))], axis=1)
    return np.asarray(rows @ np.maximum(above - below, 0.0), dtype=np.float64)


def kept_at_most(most: Floats, uses: Floats, kept: float) -> Floats:
    """The probability that of so many uses at most `most` are kept.

    By far most are 0 or 1 as far as anybody can tell, by Chernoff's bound; what is exact is dear.
    """
    most, uses = np.broadcast_arrays(most, uses)
    mean = kept * uses
    unsure = (uses > most) & (mean - most + most * np.log(most / mean) < _SURE)
    found = np.where((uses <= most) | (most > mean), 1.0, 0.0)
    found[unsure] = special.bdtr(most[unsure], uses[unsure], kept)
    return found


def _rounded(population: Floats, limits: Whole) -> Whole:
    """Whole rows in each bin [tables, bins], at least one and at most the limit of each in all.

    Rounded along the cumulative sum from the most used bin down: the few heavy rows carry most of
    the lookups, and rounding each bin by itself would lose them.
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


def _uses_within(bins: Whole, positions: Floats, bend: float) -> Whole:
    """Uses of rows at `positions` (0 to 1) of their bins; a smaller `bend` moves all of them up."""
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
    """Uses of 0 to 64 rows of each bin together, where they are as near to its bottom as `_fit`
    puts them [bins, rows + 1]; and by how much those of 64 differ.
    """
    sums = np.zeros((NUM_REUSE_BINS, _GROUPS_PER_BIN + 1))
    bins = np.arange(NUM_REUSE_BINS)[:, None]
    for rows in range(1, _GROUPS_PER_BIN + 1):
        uses = _uses_within(bins, (np.arange(rows) + 0.5) / rows, 2.0**_MAX_BENT)
        sums[:, rows] = uses.sum(-1)
    return sums, np.asarray(uses[:, -1] - uses[:, 0], dtype=np.float64)


def stay_in_bins(rows: Whole, lookups: Whole) -> Truths:
    """True where uses surely stay inside their bins: the spectrum then has as many rows in each.

    Args:
        rows: in each bin [tables, bins].
        lookups: of each table.
    """
    sums, spread = _min_uses()
    few = sums[np.arange(NUM_REUSE_BINS), np.minimum(rows, _GROUPS_PER_BIN)]
    # Groups of many rows are equal but for one row: that one may be in the group of most uses.
    many = rows * (sums[:, -1] / _GROUPS_PER_BIN) + spread
    least = np.where(rows > _GROUPS_PER_BIN, many, few).sum(-1)
    return np.asarray((least <= lookups) & (lookups <= rows @ UPPER))


def mean_uses() -> Floats:
    """Mean uses of a row of each bin, where nothing more is known than its bin."""
    return _MEAN_USES.copy()


def _fit(whole_rows: Whole, lookups: int) -> Spectrum:
    """Give each row a number of uses inside its bin such that they add up to exactly `lookups`."""
    groups = np.minimum(whole_rows, _GROUPS_PER_BIN)
    bins = np.repeat(np.arange(NUM_REUSE_BINS), groups)
    places = np.arange(len(bins)) - np.repeat(np.cumsum(groups) - groups, groups)
    positions = (places + 0.5) / groups[bins]
    each = (whole_rows / np.maximum(groups, 1))[bins]
    weights = (np.floor((places + 1) * each) - np.floor(places * each)).astype(np.int64)

    def too_many(log_bend: float) -> bool:
        uses = _uses_within(bins, positions, 2.0**log_bend)
        return int((uses * weights).sum()) > lookups

    low, high = -_MAX_BENT, _MAX_BENT
    nearly = low + (high - low) / 2**_HALVINGS
    if not too_many(nearly):  # most rows are at the top of their bins: there is nothing to search
        high = nearly
    elif not too_many(high):
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if too_many(middle) else (low, middle)
    uses = _uses_within(bins, positions, 2.0**high)
    return _settle(uses, weights, UPPER[bins].astype(np.int64), lookups)


def _settle(uses: Whole, rows: Whole, upper: Whole, lookups: int) -> Spectrum:
    """Close the gap that whole numbers leave, inside the bins as far as that goes."""
    if int((uses * rows).sum()) > lookups:  # too few lookups for the bins: shrink all alike
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
    uses: list[Whole], rows: list[Whole], upper: Whole, gap: int, stretch: bool
) -> tuple[list[Whole], list[Whole]]:
    """Add `gap` uses to the first group of rows, most used ones first."""
    base, weights = uses[0].copy(), rows[0].copy()
    extra_uses, extra_rows = [], []
    if stretch:  # multiply all alike, then add what rounding left
        factor = 1 + gap / float((base * weights).sum())
        stretched = np.floor(base * factor).astype(np.int64)
        gap -= int(((stretched - base) * weights).sum())
        base = stretched
    for group in np.argsort(-base, kind="stable").tolist():
        if gap == 0:
            break
        room = gap if stretch else int(upper[group] - base[group])
        step = min(room, gap // int(weights[group]))
        base[group] += step
        gap -= step * int(weights[group])
        if 0 < gap < weights[group] and step < room:  # one more use for some rows of the group
            extra_uses.append(base[group] + 1)
            extra_rows.append(gap)
            weights[group] -= gap
            gap = 0
    return (
        [base, *uses[1:], np.array(extra_uses, np.int64)],
        [weights, *rows[1:], np.array(extra_rows, np.int64)],
    )
