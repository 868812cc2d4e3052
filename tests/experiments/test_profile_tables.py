"""From data to a plan: profile_tables.py, whose tables shard.py takes; and bad input."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Watched, kill_actors, run, wait_until
from zipf_data import ZipfRows, write_lists

from autoshard.experiments.collecting.profile_parts import counted_by_workers
from autoshard.workload import UserError, load_tables
from autoshard.workload.profiling.profiler import Portion, TableProfiler

LAWS = {"item": ZipfRows(20_000, 1.1), "user": ZipfRows(5000, 0.6, is_shuffled=True)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    columns = {name: law.draw(4 * 8192, rng) for name, law in LAWS.items()}
    write_lists(tmp_path / "clicks.parquet", columns, 4)
    return tmp_path


def test_a_plan_from_parquet_files(data: Path) -> None:
    lines = ("name,rows,dim,pooling_factor", "item,20000,32,1", "user,5000,16,1")
    (data / "tables.csv").write_text("\n".join(lines))
    command = "clicks.parquet --tables tables.csv --batch-size 1024 --out t.json"
    done = run("profile_tables.py", command, data)
    assert "2 tables are in t.json" in done.stdout
    item, user = load_tables(str(data / "t.json"))
    assert (item.dim, item.pooling_factor, user.rows) == (32, 4.0, 5000)
    assert item.access is not None
    assert item.access.hottest(item.rows, 200) == pytest.approx(LAWS["item"].hottest(200), abs=0.02)
    assert [path.name for path in data.glob(".*")] == []
    run("shard.py", "--tables t.json --num-devices 2 --memory-gb 1 --out plan.json", data)


def test_a_recording(tmp_path: Path) -> None:
    lengths = torch.full((2, 64), 3)
    indices = torch.arange(2 * 64 * 3) % 50
    offsets = torch.arange(2 * 64 + 1) * 3
    torch.save((indices, offsets, lengths), tmp_path / "lookups.pt")
    run("profile_tables.py", "lookups.pt --batch-size 16", tmp_path)
    tables = load_tables(str(tmp_path / "tables.parquet"))
    assert [(table.name, table.rows, table.reuse_batch_size) for table in tables] == [
        ("t0", 50, 16),
        ("t1", 50, 16),
    ]


def test_what_is_interrupted_goes_on(data: Path) -> None:
    write_small_groups(data / "many.parquet")
    command = "many.parquet --batch-size 500 --out tables.json"
    watched = Watched("profile_tables.py", command, data)
    watched.wait_for(r"\d+/800 portions")
    watched.process.send_signal(2)
    assert "interrupted" in watched.end(130)
    done = run("profile_tables.py", command, data)
    assert "going on after" in done.stdout
    for table in load_tables(str(data / "tables.json")):
        assert table.access is not None
        assert table.access.lookups == 400_000


def write_small_groups(path: Path) -> None:
    """Small row groups make it long enough to interrupt."""
    rng = np.random.default_rng(3)
    rows = {f"t{n}": ZipfRows(5000, 1.0).draw(400_000, rng) for n in range(3)}
    write_lists(path, rows, 1, group=500)


@pytest.mark.usefixtures("cluster")
def test_workers_count_as_one_process_does(data: Path) -> None:
    """Also if one of them is killed, and after an interruption."""
    write_small_groups(data / "many.parquet")
    command = "many.parquet --batch-size 500 --out {0}.json --hot-ids {0}.npz"
    run("profile_tables.py", command.format("alone"), data)
    watched = Watched("profile_tables.py", command.format("killed") + " --workers 2", data)
    wait_until("a worker", lambda: kill_actors("_count_part", 1))
    assert "counted 1,200,000 lookups" in watched.end()
    interrupted = command.format("interrupted")
    watched = Watched("profile_tables.py", interrupted + " --workers 1", data)
    watched.wait_for(r"\d+/800 portions")
    watched.process.send_signal(2)
    assert "run the same command to go on" in watched.end(130)
    done = run("profile_tables.py", interrupted, data)
    assert "going on after" in done.stdout
    ids = np.load(data / "alone.npz")
    for name in ("killed", "interrupted"):
        assert (data / f"{name}.json").read_bytes() == (data / "alone.json").read_bytes()
        others = np.load(data / f"{name}.npz")
        assert all((ids[table] == others[table]).all() for table in ids.files)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("missing.parquet", "missing.parquet: no such file"),
        ("clicks.parquet --out t.csv", "t.csv: name a file that ends in .json or .parquet"),
        ("clicks.parquet --dim 6", "--dim must be a multiple of 4"),
        ("clicks.parquet --max-gb 0", "--max-gb must be at least 0.01"),
        ("clicks.parquet --out clicks.parquet", "clicks.parquet: is among the data"),
        (". --out new.parquet", "new.parquet: is among the data"),
        ("clicks.parquet --num-batches 3", "--num-batches is for loaders"),
        ("clicks.parquet --tables wide:3", "is not in the data, which has item, user"),
        ("text.parquet", "text.parquet: is not a Parquet file"),
        ("clicks.parquet --workers 0", "--workers must be at least 1"),
        ("torch:batches --workers 2", "--workers is for files, not for loaders"),
        ("no_such_module:batches", "no_such_module cannot be imported"),
    ],
)
def test_bad_input_is_one_line(data: Path, arguments: str, says: str) -> None:
    (data / "text.parquet").write_text("text")
    done = run("profile_tables.py", arguments, data, 2)
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("cluster")
def test_what_a_worker_finds_wrong_is_one_line(data: Path) -> None:
    (data / "tables.csv").write_text("name,rows,dim,pooling_factor\nitem,20,32,1\n")
    done = run("profile_tables.py", "clicks.parquet --tables tables.csv --workers 1", data, 2)
    assert "table item: the data looks up row" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("cluster")
def test_workers_that_always_die_are_one_line() -> None:
    class Deadly:  # of this function, so that workers need no module of it
        identity = ""

        def __len__(self) -> int:
            return 1

        def portions(self, first: int) -> Iterator[Portion]:
            os._exit(1 + first)

    with pytest.raises(UserError, match="died each time that it counted a part") as caught:
        list(counted_by_workers(Deadly(), partial(TableProfiler, 8), TableProfiler(8), 0, 1))
    assert "\n" not in str(caught.value)
