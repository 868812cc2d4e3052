"""Counts of a window are those of a profile of the same batches, also of blocks and hot rows."""

from dataclasses import replace

import numpy as np
import pytest
from zipf_data import ZipfRows

from autoshard.workload import EmbeddingTable, UserError
from autoshard.workload.profiling.profiler import Portion, TableProfiler
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.profiling.window import GROUPS, WindowCounts, counted_batches

SAMPLES, BATCHES = 256, 2 * GROUPS
LAW = ZipfRows(3000, 1.1)
TABLES = (EmbeddingTable("t", LAW.rows, 16, 1.0), EmbeddingTable("empty", 10, 16, 1.0))


def batches() -> list[TableBatch]:
    rng, found = np.random.default_rng(1), []
    for _ in range(BATCHES):
        lengths = rng.poisson(3, SAMPLES)
        found.append(TableBatch(LAW.draw(int(lengths.sum()), rng), lengths))
    return found


def read(batch: TableBatch, name: str) -> TableBatch:
    empty = TableBatch(np.zeros(0, np.int64), np.zeros(SAMPLES, np.int64))
    return batch if name == "t" else empty


def window(tables: tuple[EmbeddingTable, ...] = TABLES, **given: object) -> WindowCounts:
    counts = WindowCounts(tables, SAMPLES, BATCHES, **given)  # type: ignore[arg-type]
    for batch in batches():
        counts.add(lambda name, batch=batch: read(batch, name))
    assert counts.is_full
    assert counts.has_all_groups
    return counts


def profiled() -> EmbeddingTable:
    profiler = TableProfiler(SAMPLES, TABLES[:1])
    for number, batch in enumerate(batches()):
        half = int(2 * number >= BATCHES)
        profiler.add(Portion(half, {"t": lambda batch=batch: [batch]}))
    (table,) = profiler.tables()
    return table


def test_a_window_counts_as_a_profile_does() -> None:
    (counted, empty), expected = window().tables(), profiled()
    assert counted.pooling_factor == expected.pooling_factor
    assert counted.reuse == expected.reuse
    assert counted.reuse_batch_size == SAMPLES
    assert counted.access is not None
    assert expected.access is not None
    assert counted.access.blocks == expected.access.blocks
    assert counted.access.distinct_rows == expected.access.distinct_rows
    assert counted.access.lookups == expected.access.lookups
    assert empty.pooling_factor == 0


def test_groups_add_up_to_the_window() -> None:
    counts = window(by_rows=("t",))
    groups = [counts.tables(number)[0] for number in range(GROUPS)]
    whole = counts.tables()[0]
    assert np.mean([t.pooling_factor for t in groups]) == pytest.approx(whole.pooling_factor)
    assert len({t.pooling_factor for t in groups}) > 1
    busiest = [t.access.blocks[0] for t in groups if t.access is not None]
    assert len(set(busiest)) > 1
    weights = [t.pooling_factor for t in groups]
    assert whole.access is not None
    assert np.average(busiest, weights=weights) == pytest.approx(whole.access.blocks[0])


def test_the_curve_goes_through_the_share_of_the_hot_ids() -> None:
    """Ids that were hot before, and are not in this data, have few lookups."""
    table = profiled()
    hot = window((table, TABLES[1]), hot_ids={"t": np.arange(30)}).tables()[0].access
    cold = window((table, TABLES[1]), hot_ids={"t": np.arange(2000, 2030)}).tables()[0].access
    assert hot is not None
    assert cold is not None
    assert hot.hottest(LAW.rows, 30) == pytest.approx(LAW.hottest(30), rel=0.05)
    last = LAW.hottest(2030) - LAW.hottest(2000)
    # It is known at some numbers of rows, and 30 is between two of them.
    assert cold.hottest(LAW.rows, 30) == pytest.approx(last, abs=0.02)


def test_only_profiles_of_such_batches_say_how_many_there_were() -> None:
    table = profiled()
    assert counted_batches([table], SAMPLES) == pytest.approx(BATCHES)
    assert counted_batches([table, replace(TABLES[1], pooling_factor=0.0)], SAMPLES) is not None
    assert counted_batches([table, TABLES[1]], SAMPLES) is None
    assert counted_batches([table], 2 * SAMPLES) is None


def test_bad_rows_and_short_windows_are_refused() -> None:
    with pytest.raises(UserError, match=r"table t: the batches look up row 3000 of 3000 rows"):
        WindowCounts(TABLES, 1, GROUPS).add(lambda _: TableBatch(np.array([3000]), np.array([1])))
    with pytest.raises(UserError, match=r"table t: the batches look up row -1 of 3000 rows"):
        WindowCounts(TABLES, 1, GROUPS).add(lambda _: TableBatch(np.array([-1]), np.array([1])))
    with pytest.raises(UserError, match="a window needs at least 20 batches, got 19"):
        WindowCounts(TABLES, 1, GROUPS - 1)
