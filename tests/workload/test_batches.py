import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from autoshard.workload import (
    EmbeddingTable,
    Piece,
    Shard,
    piece_features,
    shard_batch,
    table_lookups,
)
from autoshard.workload.access.features import FEATURE_NAMES
from autoshard.workload.access.reuse import (
    UPPER,
    bin_of,
    histogram,
    kept_at_most,
    lookups_of,
    mean_uses,
    spectrum_of,
)
from autoshard.workload.tables.table import NUM_REUSE_BINS


@st.composite
def described_tables(draw: st.DrawFn) -> EmbeddingTable:
    rows = draw(st.integers(1, 100) | st.integers(1, 10**8))
    pooling = draw(st.floats(0, 60))
    if draw(st.booleans()):
        alpha = draw(st.none() | st.floats(0, 3))
        return EmbeddingTable("t", rows, 8, pooling, zipf_alpha=alpha)
    weights = draw(
        st.lists(st.floats(0, 1), min_size=NUM_REUSE_BINS, max_size=NUM_REUSE_BINS).filter(
            lambda bins: sum(bins) > 0.01
        )
    )
    reuse = tuple(weight / sum(weights) for weight in weights)
    counted_at = draw(st.none() | st.integers(1, 5000))
    return EmbeddingTable("t", rows, 8, pooling, reuse=reuse, reuse_batch_size=counted_at)


@given(described_tables(), st.integers(1, 600), st.integers(0, 3))
def test_a_batch_is_what_its_table_says(table: EmbeddingTable, batch_size: int, seed: int) -> None:
    indices, lengths = table_lookups(table, batch_size, seed)
    assert len(indices) == lengths.sum() == lookups_of(table, batch_size)
    assert len(lengths) == batch_size
    assert lengths.max() - lengths.min() <= 1
    if len(indices):
        assert indices.min() >= 0
        assert indices.max() < table.rows
    spectrum = spectrum_of(table, batch_size)
    _, uses = np.unique(indices, return_counts=True)
    assert np.array_equal(np.sort(uses), np.sort(np.repeat(spectrum.uses, spectrum.rows)))


@given(described_tables(), st.integers(1, 600))
def test_everyone_makes_the_same_batch(table: EmbeddingTable, batch_size: int) -> None:
    shard = Shard((table.whole(), Piece(replace(table, name="u", dim=16), 8, 4)))
    first, second = shard_batch(shard, batch_size), shard_batch(shard, batch_size)
    assert np.array_equal(first.indices, second.indices)
    assert np.array_equal(first.offsets, second.offsets)
    assert first.offsets[0] == 0
    assert first.offsets[-1] == len(first.indices)
    assert len(first.offsets) == 2 * batch_size + 1
    half = lookups_of(table, batch_size)  # both slices look up the same rows
    assert np.array_equal(first.indices[:half], first.indices[half:])


def test_the_seed_changes_the_batch() -> None:
    table = EmbeddingTable("t", 10_000, 8, 5.0)
    assert not np.array_equal(table_lookups(table, 64, 0)[0], table_lookups(table, 64, 1)[0])


@given(
    st.lists(st.floats(0.01, 1), min_size=8, max_size=8),
    st.integers(2000, 20_000),
)
def test_reuse_bins_are_met(weights: list[float], lookups: int) -> None:
    bins = np.array([*weights, *[0.0] * 9]) / sum(weights)
    table = EmbeddingTable("t", 10**7, 4, lookups / 100, reuse=tuple(bins.tolist()))
    indices, _ = table_lookups(table, 100)
    _, uses = np.unique(indices, return_counts=True)
    # As near as whole rows allow: each bin is rounded to one row of all distinct ones.
    assert np.abs(histogram(uses) - bins).max() <= 1.5 / len(uses) + 1e-9


@pytest.mark.parametrize(("alpha", "rows"), [(0.0, 3000), (0.8, 50_000), (1.2, 10**6)])
def test_zipf_laws_agree_with_drawing_from_them(alpha: float, rows: int) -> None:
    lookups = 40_000
    popularity = np.arange(1, rows + 1, dtype=float) ** -alpha
    drawn = np.random.default_rng(0).choice(rows, lookups, p=popularity / popularity.sum())
    _, uses = np.unique(drawn, return_counts=True)
    spectrum = spectrum_of(EmbeddingTable("t", rows, 4, 400.0, zipf_alpha=alpha), 100)
    assert spectrum.distinct_rows == pytest.approx(len(uses), rel=0.03)
    assert np.abs(spectrum.bins() - histogram(uses)).max() < 0.02
    assert max(spectrum.uses) == pytest.approx(max(uses), rel=0.3)


def test_smaller_batches_are_thinned_like_the_prefix_of_a_real_one() -> None:
    rng = np.random.default_rng(1)
    lookups = rng.zipf(1.3, 64_000) % 30_000
    _, uses = np.unique(lookups, return_counts=True)
    table = EmbeddingTable(
        "t", 30_000, 4, 64.0, reuse=tuple(histogram(uses)), reuse_batch_size=1000
    )
    for batch_size in (1000, 500, 100):
        _, fewer = np.unique(lookups[: 64 * batch_size], return_counts=True)
        spectrum = spectrum_of(table, batch_size)
        assert spectrum.distinct_rows == pytest.approx(len(fewer), rel=0.15)  # bins are coarse
        assert np.abs(spectrum.bins() - histogram(fewer)).max() < 0.05


def test_bins_are_half_open_powers_of_two() -> None:
    uses = np.array([1, 2, 3, 4, 5, 8, 9, 2**15, 2**15 + 1, 10**6])
    assert bin_of(uses).tolist() == [0, 1, 2, 2, 3, 3, 4, 15, 16, 16]
    assert mean_uses()[:2].tolist() == [1.0, 2.0]


def test_memory_does_not_grow_with_rows() -> None:
    table = EmbeddingTable("huge", 100_000_000, 128, 16.0, zipf_alpha=0.9)
    tracemalloc.start()
    indices, _ = table_lookups(table, 65_536)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(indices) == 16 * 65_536
    assert indices.max() > 50_000_000
    assert peak < 8 * indices.nbytes < 100_000_000 * 8 / 10


def test_features_are_the_published_ones_and_ours() -> None:
    table = EmbeddingTable("t", 1000, 64, 4.0)
    spectrum = spectrum_of(table, 256)
    (row,) = piece_features([Piece(table, 0, 32)], 256)
    named = dict(zip(FEATURE_NAMES, row, strict=True))
    assert named["dim"] == 32
    assert named["rows"] == 1000
    assert named["pooling_factor"] == 4
    assert named["size_gb"] == pytest.approx(1000 * 32 * 4 / 1e9)
    assert sum(named[f"reuse_{number}"] for number in range(17)) == pytest.approx(1)
    assert np.expm1(named["log_lookups"]) == pytest.approx(1024)
    assert np.expm1(named["log_distinct_rows"]) == pytest.approx(spectrum.distinct_rows)
    assert np.expm1(named["log_touched_bytes"]) == pytest.approx(spectrum.distinct_rows * 128)
    assert np.expm1(named["log_looked_up_bytes"]) == pytest.approx(1024 * 128)
    assert np.expm1(named["log_batch_size"]) == pytest.approx(256)
    assert named["log_features"] == named["weighted"] == 0
    assert len(FEATURE_NAMES) == 31


@given(st.lists(described_tables(), max_size=12), st.integers(1, 600))
def test_features_of_many_slices_are_those_of_each_spectrum(
    tables: list[EmbeddingTable], batch_size: int
) -> None:
    """Although hardly any spectrum is found for them."""
    pieces = [Piece(table, start, 4) for table in tables for start in (0, 4)]
    pieces += [table.whole() for table in tables]
    found = piece_features(pieces, batch_size)
    assert found.shape == (len(pieces), len(FEATURE_NAMES))
    for piece, row in zip(pieces, found, strict=True):
        named = dict(zip(FEATURE_NAMES, row, strict=True))
        spectrum = spectrum_of(piece.table, batch_size)
        bins = [named[f"reuse_{number}"] for number in range(NUM_REUSE_BINS)]
        assert bins == spectrum.bins().tolist()
        assert np.expm1(named["log_lookups"]) == pytest.approx(spectrum.lookups)
        assert np.expm1(named["log_distinct_rows"]) == pytest.approx(spectrum.distinct_rows)
        assert named["dim"] == piece.width
        (alone,) = piece_features([piece], batch_size)
        assert row.tolist() == alone.tolist()


def test_features_of_a_table_are_distinguished_from_samples() -> None:
    """Four features have four outputs a sample; lookups are those of all of them together."""
    table = EmbeddingTable("t", 1000, 64, 4.0)
    more = replace(table, features=4, weighted=True)
    rows = piece_features([table.whole(), more.whole()], 256)
    one, four = (dict(zip(FEATURE_NAMES, row, strict=True)) for row in rows)
    changed = {name for name in FEATURE_NAMES if one[name] != four[name]}
    assert changed == {"log_batch_size", "log_features", "weighted"}
    assert np.expm1(four["log_batch_size"]) == pytest.approx(4 * 256)
    assert np.exp(four["log_features"]) == pytest.approx(4)
    assert four["weighted"] == 1


@pytest.mark.parametrize("kept", [1e-4, 0.01, 0.3, 0.5, 0.99])
def test_what_is_left_of_many_uses_is_binomial(kept: float) -> None:
    """Although most of it is not computed."""
    uses = np.unique(np.geomspace(1, 2**17, 500).astype(np.int64)).astype(float)[:, None]
    exact = np.where(uses <= UPPER, 1.0, special.bdtr(UPPER[None], uses, kept))
    assert kept_at_most(UPPER[None], uses, kept) == pytest.approx(exact, abs=1e-15)
