import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from autoshard.workload import (
    Device,
    EmbeddingTable,
    ShardingTask,
    UserError,
    load_tables,
    shard_batch,
    table_lookups,
)
from autoshard.workload.access.reuse import histogram, spectrum_of
from autoshard.workload.tables.table import NUM_REUSE_BINS, Shard

GOOD = "name,rows,dim,pooling_factor\nuser,1000,64,12.5\nitem,20,8,1\n"
REUSE = [f"reuse_{number}" for number in range(NUM_REUSE_BINS)]


def test_csv_json_and_parquet_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\ufeff" + GOOD + "\n", encoding="utf-8")
    tables = load_tables(str(tmp_path / "t.csv"))
    assert tables == (EmbeddingTable("user", 1000, 64, 12.5), EmbeddingTable("item", 20, 8, 1.0))
    records = [table.to_json() for table in tables]
    (tmp_path / "t.json").write_text(json.dumps(records))
    (tmp_path / "u.json").write_text(json.dumps({"tables": records}))
    ShardingTask(tables, Device.uniform(2, 10**9), 64).save(tmp_path / "task.json")
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "t.parquet")
    for name in ("t.json", "u.json", "task.json", "t.parquet"):
        assert load_tables(str(tmp_path / name)) == tables


def test_optional_columns(tmp_path: Path) -> None:
    header = ",".join(["name,rows,dim,pooling_factor,zipf_alpha,reuse_batch_size,note", *REUSE])
    bins = ["1"] + ["0"] * (NUM_REUSE_BINS - 1)
    lines = [
        "a,100,8,2,1.1,,x" + "," * NUM_REUSE_BINS,
        ",".join(["b,100,8,2,,512,y", *bins]),
        "c,1e6,8,0.5,,," + "," * NUM_REUSE_BINS,
    ]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([header, *lines]))
    first, second, third = load_tables(str(path))
    assert (first.zipf_alpha, first.reuse) == (1.1, None)
    assert (second.reuse_batch_size, second.reuse) == (512, tuple(map(float, bins)))
    assert (third.rows, third.reuse, third.zipf_alpha) == (1_000_000, None, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("name,rows,dim,pooling_factor\n", "holds no tables"),
        ("name,rows,pooling_factor\na,1,1\n", "line 1, column dim: is missing"),
        (GOOD + "x,ten,8,1\n", "line 4, column rows: must be a number, got 'ten'"),
        (GOOD + "x,1.5,8,1\n", "line 4, column rows: must be a whole number"),
        (GOOD + "x,0,8,1\n", "line 4, column rows: must lie between 1"),
        (GOOD + "x,nan,8,1\n", "line 4, column rows"),
        (GOOD + "x,5,6,1\n", "line 4, column dim: must be a multiple of 4, got 6"),
        (GOOD + "x,5,8,-1\n", "line 4, column pooling_factor"),
        (GOOD + "x,5,8,inf\n", "line 4, column pooling_factor"),
        (GOOD + "x,5,8,\n", "line 4, column pooling_factor: is missing"),
        (GOOD + "user,5,8,1\n", "line 4, column name: 'user' is also at line 2"),
        (GOOD + "x,5,8\n", "line 4: has 3 cells, the header has 4"),
        ("name,rows,dim,pooling_factor,rows\na,1,4,1,1\n", "column rows: occurs twice"),
        ("name,rows,dim,pooling_factor,reuse_0\na,1,4,1,1\n", "column reuse_1: is missing"),
        ('name,rows,dim,pooling_factor\n"a,1,4,1\n', "line 2"),
    ],
)
def test_bad_csv_names_file_line_and_column(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    expect(str(path), says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1, column 2"),
        ("3", "needs a list of tables"),
        ("[]", "holds no tables"),
        ("[3]", "table 1: is not an object"),
        ('[{"name": "a", "rows": 5, "dim": 8}]', "table 1, column pooling_factor: is missing"),
        ('[{"name": "a", "rows": "x", "dim": 8, "pooling_factor": 1}]', "column rows"),
        ('[{"name": "a", "rows": 5, "dim": 8, "pooling_factor": 1, "reuse": 3}]', "reuse"),
        ('{"schema": "autoshard.task", "version": 7}', "version 7"),
    ],
)
def test_bad_json_names_the_table(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    expect(str(path), says)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("synthetic", "synthetic:N"),
        ("synthetic:0", "at least 1"),
        ("synthetic:x", "synthetic:N"),
        ("synthetic:5:1:huge", "huge"),
        ("nowhere.csv", "does not exist"),
        ("nowhere.pt.gz", "does not exist"),
        (".", "is a folder"),
    ],
)
def test_bad_sources_say_what_is_possible(source: str, says: str) -> None:
    expect(source, says)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(GOOD)
    expect(str(tmp_path / "t.txt"), "tables are read from")
    (tmp_path / "t.parquet").write_text(GOOD)
    expect(str(tmp_path / "t.parquet"), "not a Parquet file")
    (tmp_path / "t.csv").write_bytes(b"name,rows\xff\xfe")
    expect(str(tmp_path / "t.csv"), "UTF-8")


def expect(source: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_tables(source)
    message = str(caught.value)
    assert says in message
    assert source.split(":")[0] in message
    assert "\n" not in message


# --- dlrm_datasets --------------------------------------------------------------------------------


@pytest.fixture
def recording() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three tables, 400 samples; the last table is never looked up."""
    rng = np.random.default_rng(5)
    lengths = np.stack([rng.integers(0, 9, 400), np.ones(400), np.zeros(400)]).astype(np.int64)
    first = rng.zipf(1.2, lengths[0].sum()) % 5000
    indices = np.concatenate([first, rng.integers(0, 50, 400)])
    offsets = np.concatenate([[0], lengths.ravel().cumsum()])
    return tuple(torch.from_numpy(part) for part in (indices, offsets, lengths))  # type: ignore[return-value]


@pytest.fixture(params=[".pt", ".pt.gz"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[object], Path]:
    def save(value: object) -> Path:
        path = tmp_path / "trace.pt"
        torch.save(value, path)
        if request.param == ".pt":
            return path
        packed = tmp_path / "trace.pt.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        return packed

    return save


def test_a_recording_gives_tables_features_and_its_real_batches(
    recording: tuple[torch.Tensor, ...], write: Callable[[object], Path]
) -> None:
    indices, offsets, lengths = (part.numpy() for part in recording)
    path = write(recording)
    first, second, third = load_tables(str(path))
    assert first.rows == indices[: offsets[400]].max() + 1
    assert first.pooling_factor == lengths[0].mean()
    assert (second.rows, second.pooling_factor) == (50, 1.0)
    assert (third.rows, third.pooling_factor, third.reuse) == (1, 0.0, None)
    assert {table.dim for table in (first, second, third)} == {64}
    assert {table.dim for table in load_tables(f"{path}:128")} == {128}
    drawn, counts = table_lookups(first, 400)
    assert np.array_equal(drawn, indices[: offsets[400]])
    assert np.array_equal(counts, lengths[0])
    part, counts = table_lookups(second, 100)
    assert np.array_equal(part, indices[offsets[400] : offsets[500]])
    _, uses = np.unique(drawn, return_counts=True)
    assert first.reuse == pytest.approx(histogram(uses))
    assert spectrum_of(first, 400).distinct_rows == pytest.approx(len(uses), rel=0.1)
    batch = shard_batch(Shard.of_tables([first, second, third]), 100)
    assert len(batch.offsets) == 301
    with pytest.raises(UserError, match="holds 400 samples"):
        table_lookups(first, 401)
    path.write_bytes(b"other")
    with pytest.raises(UserError, match="not the file"):
        table_lookups(first, 100)


def test_broken_recordings(
    recording: tuple[torch.Tensor, ...], write: Callable[[object], Path]
) -> None:
    indices, offsets, lengths = recording
    cases = {
        "three tensors": (indices, offsets),
        "[tables, batch]": (indices, offsets, lengths.ravel()),
        "offsets do not agree": (indices[:-1], offsets, lengths),
        "negative row": (indices - 1, offsets, lengths),
    }
    for says, value in cases.items():
        expect(str(write(value)), says)


def test_a_truncated_archive(
    recording: tuple[torch.Tensor, ...], write: Callable[[object], Path]
) -> None:
    path = write(recording)
    path.write_bytes(path.read_bytes()[:-200])
    expect(str(path), "truncated" if path.suffix == ".gz" else "not a file of tensors")
    path.write_bytes(b"")
    expect(str(path), "is ")


class Sneaky:
    """What a recording from an untrusted place might hold."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this must never be printed",)


def test_code_in_a_recording_is_not_run(
    write: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    expect(str(write((Sneaky(), 1, 2))), "not a file of tensors")
    assert "never" not in capsys.readouterr().out
