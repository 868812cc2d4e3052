"""Tables by the name of their family: as published, or spread over a range by design."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.workload import EmbeddingTable, UserError, load_tables, piece_features

SHARED = Path(__file__).parents[3] / "shared" / "data" / "workloads.json"


def test_workloads_are_as_published() -> None:
    criteo, mlperf = load_tables("criteo"), load_tables("mlperf:dlrm-v2")
    assert len(criteo) == len(mlperf) == 26
    assert {table.dim for table in criteo} == {16}
    assert {table.dim for table in mlperf} == {128}
    assert sum(table.rows for table in criteo) == 33_762_577
    assert sum(table.rows for table in mlperf) == 204_184_588
    assert sum(table.pooling_factor for table in mlperf) == 214
    if not SHARED.is_file():
        pytest.skip("the published numbers are not beside this checkout")
    expected = json.loads(SHARED.read_text())
    for tables, name in ((criteo, "criteo_kaggle"), (mlperf, "mlperf_dlrm_v2")):
        assert [table.rows for table in tables] == expected[name]["rows"]
        assert [table.pooling_factor for table in tables] == expected[name]["lookups_per_sample"]


def test_a_scale_divides_rows_and_nothing_else() -> None:
    whole, small = load_tables("mlperf:dlrm-v2"), load_tables("mlperf:dlrm-v2:1/64")
    assert [table.rows for table in small] == [max(1, table.rows // 64) for table in whole]
    assert [t.pooling_factor for t in small] == [t.pooling_factor for t in whole]


def logs(
    tables: tuple[EmbeddingTable, ...], name: str
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.log([getattr(table, name) for table in tables])


def test_a_range_is_covered_however_few_the_tables() -> None:
    tables = load_tables("wide:40:3")
    assert tables == load_tables("wide:40:3") != load_tables("wide:40:4")
    for name, low, high in (("rows", 10, 1e7), ("dim", 4, 512), ("pooling_factor", 0.1, 200)):
        found = logs(tables, name)
        assert found.min() >= np.log(low) - 1e-9
        assert found.max() <= np.log(high) + 1e-9
        places = (found - np.log(low)) / np.log(high / low)
        counts = np.histogram(places, 4, (0, 1))[0]
        assert counts.min() >= 7, name  # the largest tables are made lower, to fit somewhere
    zipf = [table.zipf_alpha for table in tables if table.reuse is None]
    assert max(a for a in zipf if a is not None) > 1.3
    assert 0.2 < len(zipf) / len(tables) < 0.8
    assert all(table.rows * table.dim * 4 <= 2**32 + 4096 for table in tables)


def test_tables_with_features_are_wide_ones_otherwise() -> None:
    tables = load_tables("features:60:3")
    plain = tuple(replace(table, features=1, weighted=False) for table in tables)
    assert plain == load_tables("wide:60:3")
    assert {table.features for table in tables} == set(range(1, 9))
    few = [table.features <= 2 for table in tables]
    assert 0.4 < np.mean(few) < 0.6  # by their logarithms
    assert sum(table.weighted for table in tables) == 20


@pytest.mark.parametrize(
    "source",
    [
        "wide:30:1",
        "features:30:1",
        "zipf:30:1",
        "hot:30",
        "cold:30:2",
        "criteo:1/8",
        "giants:60:1",
        "skewed:60:1",
        "directions:30:2",
        "tiny:30:2",
    ],
)
def test_they_have_features_in_any_batch(source: str) -> None:
    pieces = [table.whole() for table in load_tables(source)]
    for batch in (128, 16_384):
        features = piece_features(pieces, batch)
        assert np.isfinite(features).all()
        shares = features[:, 4:21].sum(1)
        assert shares[features[:, 23] > 1] == pytest.approx(1.0)


def test_giants_are_variations_and_no_two_are_alike() -> None:
    tables = load_tables("giants:260:3")
    assert tables == load_tables("giants:260:3") != load_tables("giants:260:4")
    assert tables[:52] == tuple(
        replace(table, name=other.name)
        for table, other in zip(load_tables("giants:52:3"), tables, strict=False)
    )
    assert len({table.name for table in tables}) == 260
    many = [table for table in tables if table.rows > 100]  # small tables may be equal by chance
    assert len({table.access_digest for table in many}) == len(many)
    assert all(table.rows * table.dim * 4 <= 2**32 + 4096 for table in tables)
    sizes = sorted((table.rows * table.dim for table in tables), reverse=True)
    assert sum(sizes[:52]) > 0.8 * sum(sizes)


def test_skewed_tables_differ_from_giants_by_their_skew() -> None:
    for giant, skewed in zip(load_tables("giants:60:1"), load_tables("skewed:60:1"), strict=True):
        assert skewed.zipf_alpha is not None
        assert 0.9 <= skewed.zipf_alpha <= 1.4
        assert replace(skewed, zipf_alpha=giant.zipf_alpha) == giant


def test_a_mixture_has_as_many_of_each_range() -> None:
    tables = load_tables("directions:31:1")
    assert [table.dim >= 256 for table in tables] == [number % 2 == 0 for number in range(31)]
    assert len({table.name for table in tables}) == 31


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("criteo:64", "write criteo or criteo:1/64"),
        ("mlperf:dlrm-v2:1/0", "write mlperf:dlrm-v2 or mlperf:dlrm-v2:1/64"),
        ("wide", "write wide:N"),
        ("wide:x", "write wide:N"),
        ("features:some", "write features:N"),
        ("zipf:3:1:2", "write zipf:N"),
        ("hot:0", "at least 1 table"),
        ("giants:some", "write giants:N"),
        ("directions", "write directions:N"),
        ("mlperf", "tables are read from|does not exist"),
    ],
)
def test_what_is_written_wrongly_is_reported_in_one_line(source: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_tables(source)
    assert "\n" not in str(caught.value)
