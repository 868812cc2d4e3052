"""Folders, shared paths and object stores (a real S3 protocol, served on this machine)."""

import json
from pathlib import Path

import pytest

from autoshard.benchmark import MeasurementStore, import_parquet
from autoshard.experiments.tracking.storage import Storage
from autoshard.workload import UserError

SHIPPED = Path(__file__).parents[2] / "cost_model" / "pretrained" / "cpu.parquet"


@pytest.fixture(params=["folder", "object store"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "shared")
    return str(request.getfixturevalue("bucket"))


def make_run(folder: Path, number: int) -> None:
    (folder / f"checkpoint-{number}" / "learner").mkdir(parents=True)
    (folder / f"checkpoint-{number}" / "learner" / "state.pkl").write_bytes(b"weights")
    (folder / "training.json").write_text(json.dumps({"checkpoint": f"checkpoint-{number}"}))
    (folder / "costs.db").write_bytes(b"a store is kept as Parquet")


def test_a_folder_is_mirrored_and_comes_back(uri: str, tmp_path: Path) -> None:
    storage = Storage(uri).within("run")
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    make_run(folder, 1)
    storage.keep_folder(folder, last="training.json", without="*.db*")
    (folder / "checkpoint-1" / "learner" / "state.pkl").unlink()
    make_run(folder, 2)
    storage.keep_folder(folder, last="training.json", without="*.db*")
    assert Storage(uri).within("run").fetch_folder(elsewhere)
    files = {p.relative_to(elsewhere).as_posix() for p in elsewhere.rglob("*") if p.is_file()}
    assert files == {"checkpoint-2/learner/state.pkl", "training.json"}
    assert (elsewhere / "checkpoint-2" / "learner" / "state.pkl").read_bytes() == b"weights"
    assert storage.read_json("training.json") == {"checkpoint": "checkpoint-2"}


def test_what_is_not_there_is_nothing(uri: str, tmp_path: Path) -> None:
    storage = Storage(uri)
    assert not storage.fetch_folder(tmp_path / "empty")
    assert storage.read_json("sweep.json") is None
    assert storage.fetch_store(tmp_path / "costs.db") == 0
    assert not (tmp_path / "costs.db").exists()
    storage.remove("trials")


def test_stores_of_two_machines_become_one(uri: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a" / "costs.db", tmp_path / "b" / "costs.db"
    for store, part in ((ours, slice(0, 30)), (theirs, slice(20, 50))):
        store.parent.mkdir()
        with MeasurementStore(tmp_path / "all.db") as all_of_it, MeasurementStore(store) as some:
            if not len(all_of_it):
                import_parquet(all_of_it, SHIPPED)
            some.put(all_of_it.measurements()[part])
    storage = Storage(uri)
    storage.keep_store(theirs)
    assert storage.fetch_store(ours) == 20
    with MeasurementStore(ours) as store:
        assert len(store) == 50
    assert storage.fetch_store(ours) == 0
    assert Storage(uri).fetch_store(ours) == 0
    # What one keeps does not lose what the other has brought since.
    storage.keep_store(ours)
    Storage(uri).keep_store(theirs)
    with MeasurementStore(theirs) as store:
        assert len(store) == 50
    storage.keep_folder(tmp_path / "a", last="", without="*.db*")  # which takes no store away
    assert storage.fetch_store(tmp_path / "c" / "costs.db") == 50


@pytest.mark.parametrize(
    ("uri", "line"),
    [
        ("s4://bucket/x", "--storage s4://bucket/x: "),
        ("/proc/nowhere/runs", "--storage /proc/nowhere/runs: cannot be written: "),
    ],
)
def test_bad_storage_is_one_line(uri: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        Storage(uri)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_one_line(bucket: str) -> None:
    with pytest.raises(UserError, match="--storage s3://nobody/x: cannot be written: ") as caught:
        Storage("s3://nobody/x")
    assert "\n" not in str(caught.value)
