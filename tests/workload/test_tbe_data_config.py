"""fbgemm's TBEDataConfig: what fbgemm draws from ours, and what we read from fbgemm's."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401 - registers the operators
import numpy as np
import pytest
import torch
from fbgemm_gpu.tbe.bench.tbe_data_config import TBEDataConfig
from fbgemm_gpu.tbe.bench.tbe_data_config_bench_helper import generate_requests
from fbgemm_gpu.tbe.monitoring.bench_params_reporter import TBEBenchmarkParamsReporter
from zipf_data import ZipfRows

from autoshard.workload import EmbeddingTable, UserError, load_tables
from autoshard.workload.access.hot_rows import hot_share
from autoshard.workload.profiling.profiler import Portion, TableProfiler
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.sources.tbe_data_config import tables_of, tbe_data_config
from autoshard.workload.tables.row_access import RowAccess

BATCH = 8192


def profiled(law: ZipfRows) -> EmbeddingTable:
    """A table as it is counted in two batches for each half of the data."""
    profiler, rng = TableProfiler(BATCH), np.random.default_rng(4)
    for half in (0, 0, 1, 1):
        rows = law.draw(16 * BATCH, rng)
        batch = TableBatch(rows, np.full(BATCH, 16))
        profiler.add(Portion(half, {"t": partial(list, [batch])}))
    return profiler.tables()[0]


def access_of(table: EmbeddingTable) -> RowAccess:
    assert table.access is not None
    return table.access


def drawn(document: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """The rows that fbgemm draws for each feature."""
    config = TBEDataConfig.from_json(json.dumps(document))
    (request,) = generate_requests(config, iters=1)
    offsets = request.offsets.numpy()[:: config.batch_params.B]
    return np.split(request.indices.numpy(), offsets[1:-1])


def test_fbgemm_draws_rows_as_often_as_the_table_says() -> None:
    tables = [
        profiled(ZipfRows(20_000, 1.1, is_shuffled=True)),
        profiled(ZipfRows(20_000, 0.5)),
        EmbeddingTable("u", 5000, 8, 16.0, features=2),
        EmbeddingTable("z", 200_000, 16, 20.0, zipf_alpha=1.05),
        EmbeddingTable("few", 3, 4, 2.0),
        EmbeddingTable("one", 1, 4, 1.0),
        EmbeddingTable("unused", 9, 4, 0.0),
    ]
    document = tbe_data_config(tables, BATCH)
    features, back = drawn(document), tables_of(document)
    assert len(features) == 8
    of = document["feature_table_map"]
    for rows, number in zip(features, of, strict=True):
        table, read = tables[number], back[number]
        assert len(rows) == BATCH * table.pooling_factor / table.features
        for count in (1, 20, table.rows // 100, table.rows // 10, table.rows // 3):
            if not (0 < count <= table.rows and len(rows)):
                continue
            share = float((rows < count).mean())
            assert share == pytest.approx(hot_share(table, count, BATCH), abs=0.02)
            assert access_of(read).hottest(read.rows, count) == pytest.approx(share, abs=0.01)
    for table, read in zip(tables, back, strict=True):
        for field in ("name", "rows", "dim", "features", "pooling_factor"):
            assert getattr(read, field) == getattr(table, field)
    distinct = len(np.unique(features[4]))
    assert access_of(back[3]).distinct_rows == pytest.approx(distinct, rel=0.03)
    assert back[3].reuse_batch_size == BATCH


def test_what_fbgemm_reports_of_real_lookups_is_a_file_of_tables(tmp_path: Path) -> None:
    law, rng = ZipfRows(3000, 1.1), np.random.default_rng(2)
    rows = np.concatenate([law.draw(4 * 2048, rng), rng.integers(0, 500, 4 * 2048)])
    config = TBEBenchmarkParamsReporter(1).extract_params(
        torch.tensor([3000, 500]),
        torch.tensor([16, 8]),
        torch.from_numpy(rows),
        torch.arange(0, len(rows) + 1, 4),
    )
    path = tmp_path / "config.json"
    path.write_text(config.json())
    hot, even = load_tables(str(path))
    assert [(t.name, t.rows, t.dim, t.pooling_factor) for t in (hot, even)] == [
        ("t0", 3000, 16, 4.0),
        ("t1", 500, 8, 4.0),
    ]
    assert access_of(hot).hottest(3000, 20) == pytest.approx(law.hottest(20), abs=0.02)
    assert access_of(even).hottest(500, 50) == pytest.approx(0.1, abs=0.05)
    # Where hot rows lie is not known.
    assert access_of(hot).even_blocks(3000, 2) == pytest.approx([0.5, 0.5], abs=1e-3)


def test_a_config_of_numbers_for_all_features() -> None:
    document = tbe_data_config([EmbeddingTable("a", 100, 8, 2.0, zipf_alpha=1.0)], 64) | {"T": 3}
    for name in ("Es", "Ds", "feature_table_map", "indices_params_list", "names"):
        del document[name]
    document["batch_params"] = {"B": 64}
    document["pooling_params"] = {"L": 2}
    tables = tables_of(document)
    assert [(t.name, t.rows, t.dim, t.pooling_factor) for t in tables] == [
        (name, 100, 8, 2.0) for name in ("t0", "t1", "t2")
    ]
    assert isinstance(tables[2].access, RowAccess)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"Es": [5, 6]}, "Es must be a list of T = 1 values"),
        ({"Es": [0]}, "table a: rows: must lie between 1"),
        ({"Ds": [6]}, "table a: dim: must be a multiple of 4"),
        ({"batch_params": {}}, "has no field 'B'"),
        ({"batch_params": {"B": 0}}, "B must be at least 1"),
        ({"pooling_params": {"L": "many"}}, "has a field of the wrong kind"),
        ({"pooling_params": {"L": -1}}, "table a: pooling_factor: must lie between 0 and"),
        ({"heavy_hitters": [0.9, 0.2]}, "heavy_hitters must be shares of the lookups"),
        ({"heavy_hitters": [0.0] * 101}, "heavy_hitters must be a list, at most 100"),
        ({"zipf_q": 0}, "zipf_q and zipf_s must be over 0"),
        ({"zipf_s": 11}, "zipf_s at most 10"),
    ],
)
def test_bad_configs_are_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    document = tbe_data_config([EmbeddingTable("a", 500, 8, 2.0)], 64)
    indices = document["indices_params_list"][0]
    for name, value in changes.items():
        (indices if name in indices else document)[name] = value
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"config\.json: TBEDataConfig") as caught:
        load_tables(str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tables_of_both_kinds_are_refused() -> None:
    plain, weighted = (EmbeddingTable(str(n), 5, 8, 1.0, weighted=n > 0) for n in (0, 1))
    for tables in ([plain, weighted], []):
        with pytest.raises(UserError, match="with weights either all or none"):
            tbe_data_config(tables, 64)
