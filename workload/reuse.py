"""How often a batch uses each of a table's rows.

A *spectrum* says how many distinct rows are used once, twice, and so on. The index batches are
drawn from it and the features are read off it, so both always tell the same story. It comes from
the table's reuse bins, thinned to smaller batches, or from its Zipf law.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from autoshard.workload.tables import NUM_REUSE_BINS, EmbeddingTable

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

# Bin k holds rows used more than LOWER[k] and at most UPPER[k] times in the batch.
UPPER: Floats = np.exp2(np.arange(NUM_REUSE_BINS, dtype=np.float64))
LOWER: Floats = np.concatenate([[0.0], UPPER[:-1]])

_GROUPS_PER_BIN = 64  # rows of a bin that get one common number of uses, at most rows / 64 of them
_EXACT_RANKS = 256  # the most popular rows, each a class of its own in a Zipf law
_RANK_CLASSES = 512  # classes of near equal popularity for all the others
_MIN_POPULATION = 1e-12
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


def spectrum_of(table: EmbeddingTable, batch_size: int) -> Spectrum:
    """The table's spectrum in a batch of `batch_size` samples. The same for every dim and name."""
    return _spectrum(
        table.rows,
        lookups_of(table, batch_size),
        table.zipf_alpha or 0.0,
        table.reuse,
        _thinning(table, batch_size),
    )


def _thinning(table: EmbeddingTable, batch_size: int) -> tuple[int, float] | None:
    """Lookups of the batch that the bins were counted in, and the share of it that is left."""
    counted = table.reuse_batch_size
    if counted is None or batch_size >= counted:
        return None
    return lookups_of(table, counted), batch_size / counted


@lru_cache(maxsize=16384)
def _spectrum(
    rows: int,
    lookups: int,
    alpha: float,
    reuse: tuple[float, ...] | None,
    thinning: tuple[int, float] | None,
) -> Spectrum:
    if lookups == 0:
        return Spectrum(np.zeros(0, np.int64), np.zeros(0, np.int64))
    if reuse is None:
        population = _zipf_population(rows, lookups, alpha)
    elif thinning is None:
        shares = np.asarray(reuse)
        population = shares * (lookups / float(shares @ _MEAN_USES))
    else:
        counted, kept = thinning
        population = _thinned_population(_spectrum(rows, counted, 0.0, reuse, None), kept)
    return _fit(_whole_rows(population, min(rows, lookups)), lookups)


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
    at_most = special.pdtr(UPPER[None, :-1], rates[:, None])
    below = np.concatenate([np.exp(-rates)[:, None], at_most], axis=1)
    above = np.concatenate([at_most, np.ones((len(rates), 1))], axis=1)
    return np.asarray(members @ np.maximum(above - below, 0.0), dtype=np.float64)


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


def _whole_rows(population: Floats, limit: int) -> Whole:
    """Whole rows in each bin, at least one and at most `limit` in all.

    Rounded along the cumulative sum from the most used bin down: the few heavy rows carry most of
    the lookups, and rounding each bin by itself would lose them.
    """
    total = float(population.sum())
    scaled = population * (min(max(total, 1.0), limit) / max(total, _MIN_POPULATION))
    from_top = np.floor(np.cumsum(scaled[::-1]) + 0.5).astype(np.int64)
    from_top = np.minimum(from_top, limit)
    whole = np.diff(np.concatenate([[0], from_top]))[::-1]
    if whole.sum() == 0:
        whole[np.argmax(scaled)] = 1
    return np.asarray(whole, dtype=np.int64)


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


def mean_uses() -> Floats:
    """Mean uses of a row of each bin, where nothing more is known than its bin."""
    return _MEAN_USES.copy()


def _fit(whole_rows: Whole, lookups: int) -> Spectrum:
    """Give each row a number of uses inside its bin such that they add up to exactly `lookups`."""
    bins, positions, rows = [], [], []
    for number, count in enumerate(whole_rows.tolist()):
        groups = min(count, _GROUPS_PER_BIN)
        if groups:
            bins.append(np.full(groups, number, np.int64))
            positions.append((np.arange(groups) + 0.5) / groups)
            rows.append(np.diff(np.floor(np.linspace(0, count, groups + 1)).astype(np.int64)))
    bin_numbers, places, weights = (np.concatenate(parts) for parts in (bins, positions, rows))
    low, high = (
        -6.0,
        6.0,
    )  # log2 of the bend: from all at the top of their bins to all at the bottom
    for _ in range(24):
        middle = (low + high) / 2
        total = int((_uses_within(bin_numbers, places, 2.0**middle) * weights).sum())
        low, high = (middle, high) if total > lookups else (low, middle)
    uses = _uses_within(bin_numbers, places, 2.0**high)
    return _settle(uses, weights, UPPER[bin_numbers].astype(np.int64), lookups)


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
