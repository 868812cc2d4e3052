"""Access statistics are those of the law that data was drawn from, also if memory is short."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zipf_data import ZipfRows, write_lists

from autoshard.workload import EmbeddingTable, UserError, load_tables
from autoshard.workload.access.reuse import spectrum_of
from autoshard.workload.profiling.profiler import Portion, TableProfiler
from autoshard.workload.profiling.row_counts import RowCounts
from autoshard.workload.profiling.sources import LoaderData, ParquetData, profile
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.sources.table_files import save_tables
from autoshard.workload.tables.row_access import RowAccess, block_rows, curve_ranks

LOOKUPS = 4  # a sample
BATCH = 2048


def portions(
    law: ZipfRows, count: int, shift: Callable[[int], int] = lambda _: 0
) -> Iterator[Portion]:
    """Batches of one table, half of them in each half of the data."""
    rng = np.random.default_rng(7)
    for number in range(count):
        rows = law.draw(BATCH * LOOKUPS, rng, shift(number))
        batch = TableBatch(rows, np.full(BATCH, LOOKUPS))
        yield Portion(int(2 * number >= count), {"t": lambda batch=batch: [batch]})


def profiled(
    law: ZipfRows, count: int, max_gb: float = 1.0, **drawn: Callable[[int], int]
) -> EmbeddingTable:
    known = [EmbeddingTable("t", law.rows, 64, 1.0)]
    profiler = TableProfiler(BATCH, known, max_gb)
    for portion in portions(law, count, **drawn):
        profiler.add(portion)
    (table,) = profiler.tables()
    return table


def access_of(table: EmbeddingTable) -> RowAccess:
    assert table.access is not None
    return table.access


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.1, 1.3])
def test_the_curve_is_that_of_the_law(alpha: float) -> None:
    law = ZipfRows(2000, alpha, is_shuffled=True)
    table = profiled(law, 100)
    access = access_of(table)
    for count in (1, 20, 200, 1000):
        assert access.hottest(2000, count) == pytest.approx(law.hottest(count), rel=0.02, abs=0.003)
    assert access.hottest(2000, 2000) == 1
    assert access.rows_for(2000, access.hottest(2000, 200)) == pytest.approx(200, rel=0.02)
    assert table.pooling_factor == LOOKUPS
    assert access.pooling_variance == 0
    assert access.lookups == 100 * BATCH * LOOKUPS


def test_rows_that_had_luck_are_not_hot() -> None:
    """With one lookup for each row, the luckiest tenth of rows have a quarter of the lookups."""
    law = ZipfRows(BATCH * LOOKUPS, 0.0)
    assert access_of(profiled(law, 2)).hottest(law.rows, law.rows / 10) == pytest.approx(
        0.1, abs=0.02
    )


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_blocks_say_where_the_hot_rows_lie(is_shuffled: bool) -> None:
    law = ZipfRows(100_000, 1.1, is_shuffled)
    found = access_of(profiled(law, 20)).even_blocks(law.rows, 8)
    places = law.of_ranks() // -(-law.rows // 8)
    # Within a block of the histogram, rows count alike.
    assert found == pytest.approx(np.bincount(places, weights=law.shares), abs=0.02)
    assert (found.max() > 0.5) == (not is_shuffled)


def test_a_sample_of_rows_gives_the_curve_of_all() -> None:
    law = ZipfRows(400_000, 1.05, is_shuffled=True)
    exact = access_of(profiled(law, 100))
    few = TableProfiler(BATCH, [EmbeddingTable("t", law.rows, 64, 1.0)], max_gb=0.004)
    for portion in portions(law, 100):
        few.add(portion)
    (share,) = few.sampled().values()
    assert share <= 1 / 4
    sampled = access_of(few.tables()[0])
    for count in (10, 1000, 4000, 40_000):
        assert sampled.hottest(law.rows, count) == pytest.approx(
            exact.hottest(law.rows, count), abs=0.01
        )
    assert sampled.coverage == pytest.approx(exact.coverage, rel=0.05)
    assert sampled.blocks == exact.blocks


@given(
    st.lists(st.lists(st.integers(0, 300), min_size=1), min_size=1, max_size=20), st.integers(0, 3)
)
def test_kept_rows_are_counted_exactly(parts: list[list[int]], thinned: int) -> None:
    """Whatever is thinned and when: a row that is kept has all of its uses."""
    counts, all_rows = RowCounts(), np.concatenate(parts)
    for number, part in enumerate(parts):
        counts.add(*np.unique(part, return_counts=True), number % 2)
        if number < thinned:
            counts.thin()
    kept = counts.counted()
    truly = {row: int((all_rows == row).sum()) for row in set(all_rows.tolist())}
    assert dict(zip(kept.rows.tolist(), kept.uses.sum(1).tolist(), strict=True)) == {
        row: truly[row] for row in kept.rows.tolist()
    }
    if not thinned:
        assert set(kept.rows.tolist()) == set(truly)


def joined(parts: list[TableProfiler]) -> TableProfiler:
    """What was counted in parts, together."""
    whole, *others = parts
    for part in others:
        whole.join(part.state())
    return whole


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5000), max_size=30), st.integers(1, 9), st.integers(0, 3)
        ),
        min_size=1,
    )
)
def test_counts_of_parts_are_those_of_the_whole(
    batches: list[tuple[list[int], int, int]],
) -> None:
    """Also where some have full batches only, or none, or see other rows."""
    profilers = [TableProfiler(5) for _ in range(5)]
    for number, (rows, samples, part) in enumerate(batches):
        lengths = np.bincount(np.arange(len(rows)) % samples, minlength=samples)
        batch = TableBatch(np.array(rows, np.int64), lengths)
        portion = Portion(int(2 * number >= len(batches)), {"t": partial(list, [batch])})
        for profiler in (profilers[part], profilers[4]):
            profiler.add(portion)
    *parts, whole = profilers
    found = joined(parts)
    assert [t.to_json() for t in found.tables()] == [t.to_json() for t in whole.tables()]
    assert found.hot_ids()["t"].tolist() == whole.hot_ids()["t"].tolist()


def test_samples_of_parts_give_the_curve_of_all() -> None:
    law = ZipfRows(200_000, 1.05, is_shuffled=True)
    exact = access_of(profiled(law, 100))
    known = [EmbeddingTable("t", law.rows, 64, 1.0)]
    parts = [TableProfiler(BATCH, known, gb) for gb in (0.002, 0.001, 1.0, 0.002)]
    for number, portion in enumerate(portions(law, 100)):
        parts[number // 25].add(portion)
    assert [bool(part.sampled()) for part in parts] == [True, True, False, True]
    sampled = access_of(joined(parts).tables()[0])
    for count in (10, 1000, 4000, 40_000):
        assert sampled.hottest(law.rows, count) == pytest.approx(
            exact.hottest(law.rows, count), abs=0.015
        )
    assert sampled.coverage == pytest.approx(exact.coverage, rel=0.05)
    assert sampled.blocks == exact.blocks


def test_a_change_of_hot_rows_is_drift() -> None:
    law = ZipfRows(50_000, 1.2, is_shuffled=True)
    steady = access_of(profiled(law, 100)).drift
    moved = access_of(profiled(law, 100, shift=lambda number: 1000 * (number >= 50))).drift
    assert steady is not None
    assert moved is not None
    assert steady < 0.01
    assert moved > 0.5


@pytest.mark.parametrize("mean", [8, 25, 40])
def test_chance_is_no_drift(mean: int) -> None:
    """Rows that are hot by luck in the first half are not in the second."""
    rows, count = 2 * LOOKUPS * BATCH, 4 * mean
    drift = access_of(profiled(ZipfRows(rows, 0.0), count)).drift
    assert drift is None or drift < 0.05


def test_nothing_is_said_of_drift_where_no_row_is_hot() -> None:
    assert access_of(profiled(ZipfRows(50_000, 0.0), 4)).drift is None


def test_reuse_is_counted_in_full_batches() -> None:
    law = ZipfRows(5000, 1.0)
    table = profiled(law, 8)
    assert table.reuse_batch_size == BATCH
    distinct = [len(np.unique(next(iter(part.tables["t"]())).rows)) for part in portions(law, 8)]
    assert access_of(table).distinct_rows == pytest.approx(np.mean(distinct))
    assert spectrum_of(table, BATCH).distinct_rows == pytest.approx(np.mean(distinct), rel=0.02)


def test_counts_that_were_saved_go_on(tmp_path: Path) -> None:
    law = ZipfRows(20_000, 1.1)
    known, path = [EmbeddingTable("t", law.rows, 64, 1.0)], tmp_path / "progress.npz"
    first = TableProfiler(BATCH, known, 0.0005)
    for portion in islice(portions(law, 10), 6):
        first.add(portion)
    first.save(path, "data", 6)
    second = TableProfiler(BATCH, known, 0.0005)
    assert second.load(path, "other data") == 0
    assert second.load(path, "data") == 6
    for portion in islice(portions(law, 10), 6, None):
        second.add(portion)
        first.add(portion)
    assert second.tables()[0].to_json() == first.tables()[0].to_json()


def test_tables_with_statistics_are_written_and_read(tmp_path: Path) -> None:
    tables = (profiled(ZipfRows(3000, 1.1), 4), EmbeddingTable("u", 10, 8, 1.0, features=2))
    for name in ("tables.json", "tables.parquet"):
        save_tables(tables, tmp_path / name)
        read = load_tables(str(tmp_path / name))
        assert read == tables
        assert access_of(read[0]).curve == pytest.approx(access_of(tables[0]).curve, abs=1e-6)
        assert access_of(read[0]).blocks == pytest.approx(access_of(tables[0]).blocks, abs=1e-6)
        assert read[1].access is None


@pytest.mark.parametrize("rows", [1, 2, 5, 1000, 1024, 1025, 10_000_000, 2**40])
def test_any_number_of_rows_has_ranks_and_blocks(rows: int) -> None:
    ranks = curve_ranks(rows)
    assert ranks[0] == 1
    assert ranks[-1] == rows
    assert (np.diff(ranks) >= 0).all()
    assert -(-rows // block_rows(rows)) <= 1024
    assert block_rows(rows) == 1 or -(-rows // (block_rows(rows) // 2)) > 1024


def test_statistics_of_another_table_are_refused() -> None:
    table = profiled(ZipfRows(3000, 1.1), 2)
    with pytest.raises(UserError, match=r"5000 rows have 625 blocks, got 750: profile this table"):
        replace(table, rows=5000)


def test_parquet_columns_of_lists_and_of_numbers(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    lists = pyarrow.array([[1, 2], [], None, [2]], pyarrow.list_(pyarrow.int64()))
    numbers = pyarrow.array([5, None, 5, 7], pyarrow.int32())
    labels = pyarrow.array([0.5, 1.0, 0.0, 1.0])
    for day in (1, 2):
        pyarrow.parquet.write_table(
            pyarrow.table({"label": labels, "l": lists, "n": numbers}), tmp_path / f"{day}.parquet"
        )
    data = ParquetData(str(tmp_path), 4)
    profiler = TableProfiler(4)
    for portion in data.portions(0):
        profiler.add(portion)
    of_lists, of_numbers = profiler.tables()
    assert (of_lists.name, of_lists.rows, of_lists.pooling_factor) == ("l", 3, 0.75)
    assert (of_numbers.name, of_numbers.rows, of_numbers.pooling_factor) == ("n", 8, 0.75)
    assert access_of(of_lists).pooling_variance == pytest.approx(np.var([2, 0, 0, 1]))
    assert access_of(of_lists).distinct_rows == 2


def test_small_row_groups_are_joined_to_batches(tmp_path: Path) -> None:
    law = ZipfRows(500, 1.0)
    rows = law.draw(4 * 1000, np.random.default_rng(0))
    write_lists(tmp_path / "d.parquet", {"t": rows}, 4, group=100)
    data = ParquetData(str(tmp_path / "d.parquet"), 250)
    sizes = [len(batch.lengths) for part in data.portions(0) for batch in part.tables["t"]()]
    assert sizes.count(250) >= 3
    assert sum(sizes) == 1000


def test_loaders_of_torchrec_s_batches() -> None:
    import torch
    from torchrec import KeyedJaggedTensor

    batch = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], torch.tensor([1, 2, 3, 3, 0]), torch.tensor([1, 2, 2, 0])
    )
    source = LoaderData([batch] * 4, {"both": ["a", "b"]}, batch_size=4)
    profiler = TableProfiler(4, [EmbeddingTable("both", 10, 8, 1.0, features=2)])
    parts = list(source.portions(0))
    assert [portion.half for portion in parts] == [0, 1]
    for portion in parts:
        profiler.add(portion)
    (table,) = profiler.tables()
    assert (table.pooling_factor, table.features, table.reuse_batch_size) == (2.5, 2, 4)
    assert access_of(table).pooling_variance == 0.25
    assert access_of(table).distinct_rows == 4
    assert profile([batch] * 4, 4, features={"both": ["a", "b"]})[0].pooling_factor == 2.5
    with pytest.raises(UserError, match="the loader has no length: give --num-batches"):
        LoaderData(iter([batch]), None, 4)


def test_rows_outside_of_a_table_are_one_line() -> None:
    profiler = TableProfiler(4, [EmbeddingTable("t", 3, 8, 1.0)])
    batch = TableBatch(np.array([1, 3]), np.array([2]))
    with pytest.raises(UserError, match="table t: the data looks up row 3 of 3 rows"):
        profiler.add(Portion(0, {"t": partial(list, [batch])}))
    with pytest.raises(UserError, match="table t: is not in the data, which has u"):
        profiler.add(Portion(0, {"u": partial(list, [batch])}))
