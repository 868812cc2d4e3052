"""The command as a user runs it: from another folder, joined to the tests' cluster."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlflow
import psutil
import pytest
from commands import PATIENCE, command, run

from autoshard.benchmark import MeasurementStore, export_parquet

SMALL = (
    "--tables synthetic:30:1:small --num-shards 12 --max-tables 4 --batch-size 256 --store costs.db"
)


def test_collect_then_collect_again(cluster: object, tmp_path: Path) -> None:
    first = run("collect_costs.py", f"{SMALL} --json summary.json", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert sorted(summary) == sorted(
        [
            "requested",
            "measured",
            "reused",
            "failed",
            "left_out",
            "seconds",
            "promised_seconds",
            "shards_per_second",
            "duty_cycle",
            "devices",
            "median_spread",
        ]
    )
    assert (summary["requested"], summary["measured"], summary["reused"]) == (12, 12, 0)
    assert summary["failed"] == 0
    assert 0 < summary["duty_cycle"] < 1
    assert 0 < summary["median_spread"] < 0.5
    assert sorted(summary["devices"][0]) == ["kind", "name", "node"]
    assert summary["shards_per_second"] == pytest.approx(12 / summary["seconds"], rel=0.01)
    assert "12/12 shards" in first.stdout

    run("collect_costs.py", f"{SMALL} --num-shards 15 --json again.json", tmp_path)
    again = json.loads((tmp_path / "again.json").read_text())
    assert (again["requested"], again["measured"], again["reused"]) == (15, 3, 12)
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert len(store) == 15

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    runs = mlflow.search_runs(experiment_names=["autoshard"], output_format="list")
    assert len(runs) == 2
    latest = max(runs, key=lambda found: found.info.start_time)
    assert latest.info.status == "FINISHED"
    assert latest.data.metrics["measured"] == 3
    assert latest.data.metrics["duty_cycle"] == pytest.approx(again["duty_cycle"])
    assert latest.data.params["tables"] == "synthetic:30:1:small"
    assert latest.data.tags["kind"] == "collect_costs"
    assert latest.data.tags["hardware"]
    copy = mlflow.artifacts.download_artifacts(
        run_id=latest.info.run_id, artifact_path="costs.db", dst_path=str(tmp_path / "artifact")
    )
    with MeasurementStore(copy) as store:
        assert len(store) == 15


def test_stores_are_looked_into_and_carried_as_parquet(cluster: object, tmp_path: Path) -> None:
    run("collect_costs.py", f"{SMALL} --num-shards 5 --augment --optimizer sgd", tmp_path)
    assert "5 ok" in run("store.py", "info costs.db", tmp_path).stdout
    assert "5 measurements" in run("store.py", "export costs.db out.parquet", tmp_path).stdout
    assert "5 measurements added" in run("store.py", "import new.db out.parquet", tmp_path).stdout
    for bad in ("info none.db", "export none.db x.parquet", "import new.db none.parquet"):
        failed = run("store.py", bad, tmp_path, code=2)
        assert failed.stderr.count("\n") == 1
        assert "none." in failed.stderr


@pytest.mark.parametrize(
    ("table_file", "says"),
    [
        ("name,rows,dim\na,1,4\n", "line 1, column pooling_factor: is missing"),
        ("name,rows,dim,pooling_factor\na,1,4,1\na,1,4,1\n", "line 3, column name"),
        ("name,rows,dim,pooling_factor\na,1,5,1\n", "line 2, column dim: must be a multiple of 4"),
    ],
)
def test_bad_tables_end_in_one_line_and_leave_the_store(
    tmp_path: Path, table_file: str, says: str
) -> None:
    (tmp_path / "bad.csv").write_text(table_file)
    MeasurementStore(tmp_path / "costs.db").close()
    before = (tmp_path / "costs.db").read_bytes()
    done = run("collect_costs.py", "--tables bad.csv --store costs.db", tmp_path, code=2)
    assert done.stderr.count("\n") == 1
    assert "bad.csv" in done.stderr
    assert says in done.stderr
    assert (tmp_path / "costs.db").read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad.csv", "costs.db"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--tables nowhere.csv", "nowhere.csv: does not exist"),
        ("--store folder", "folder: is a folder"),
        ("--store other.txt", "other.txt: is not a store"),
        ("--json folder", "folder: is a folder"),
        ("--num-shards 0", "at least 1"),
        ("--seconds 0", "--seconds must be more than 0, got 0"),
        ("--batch-size 0", "at least 1"),
        ("--mlflow-uri sqlite:////dev/null/all.db", "MLflow cannot be used"),
        ("--mlflow-uri nonsense://x", "MLflow cannot be used at nonsense://x"),
    ],
)
def test_bad_options_end_in_one_line(
    cluster: object, tmp_path: Path, arguments: str, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.txt").write_text("something that somebody may need " * 9)
    done = run("collect_costs.py", f"{SMALL} {arguments}", tmp_path, code=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr


def test_a_cluster_that_is_not_there_ends_in_one_line(tmp_path: Path) -> None:
    done = run("collect_costs.py", SMALL, tmp_path, code=2, RAY_ADDRESS="127.0.0.1:1")
    assert done.stderr.count("\n") == 1, done.stderr
    assert "RAY_ADDRESS=127.0.0.1:1" in done.stderr


def start(folder: Path, shards: int, **environment: str) -> subprocess.Popen[str]:
    """A long collection that has measured its first shards."""
    process = subprocess.Popen(
        command("collect_costs.py", f"{SMALL} --num-shards {shards} --max-tables 12"),
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where the tests run in the background, children would inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "costs.db").exists():
            with MeasurementStore(folder / "costs.db") as store:
                if len(store) > 5:
                    return process
        time.sleep(0.2)
    process.kill()
    raise AssertionError("".join(process.communicate()))


def test_ctrl_c_keeps_what_was_measured(cluster: object, tmp_path: Path) -> None:
    process = start(tmp_path, 500)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, output + error
    assert "run again to continue" in error
    assert error.count("\n") == 1
    assert_goes_on(tmp_path)


LATE_CLOSE = """
import ray
from autoshard.benchmark import BenchmarkPool, MeasureSettings, TimingOptions
from autoshard.workload import random_shards, synthetic_tables

ray.init(logging_level="ERROR", log_to_driver=False)
shards = random_shards(synthetic_tables(60, seed=7, profile="small"), 100, 8)
quick = TimingOptions(precision=0.2, max_iterations=9)
stream = BenchmarkPool("costs.db").stream(shards, MeasureSettings(256), quick)
next(stream)
ray.shutdown()
del stream
assert not ray.is_initialized()
"""


def test_a_stream_that_ends_after_its_cluster_says_nothing(cluster: object, tmp_path: Path) -> None:
    """As where Ctrl-C comes between two answers: the exception keeps the stream until the end."""
    done = subprocess.run(
        [sys.executable, "-c", LATE_CLOSE], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_kill_9_of_everything_keeps_what_was_measured(cluster: object, tmp_path: Path) -> None:
    """A driver that started a Ray of its own, and all of its processes with it.

    It did so although an earlier cluster, killed likewise, has left its address.
    """
    # A short name: Ray's sockets are in it.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as ray:
        left = Path(ray) / "ray" / "ray_current_cluster"
        left.parent.mkdir()
        left.write_text("127.0.0.1:9")
        # So few that the machine is not probed first, which takes seconds.
        process = start(tmp_path, 99, RAY_ADDRESS="", RAY_TMPDIR=ray)
        kill_family(process)
    assert_goes_on(tmp_path)


def kill_family(process: subprocess.Popen[str]) -> None:
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate(timeout=PATIENCE)


def assert_goes_on(folder: Path) -> None:
    """A second run measures only what is missing."""
    with MeasurementStore(folder / "costs.db") as store:
        before = len(store)
        digests = {item.shard.digest for item in store.measurements()}
    assert before > 5
    wanted = before + 4
    run(
        "collect_costs.py",
        f"{SMALL} --num-shards {wanted} --max-tables 12 --json summary.json",
        folder,
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["measured"] + summary["reused"] == wanted
    assert summary["reused"] >= before - 4  # the order of answers is not that of shards
    with MeasurementStore(folder / "costs.db") as store:
        found = [item.shard.digest for item in store.measurements()]
        assert len(found) == len(set(found))
        assert digests <= set(found)
        export_parquet(store, folder / "x.parquet")


def test_seconds_that_are_spent_leave_the_rest_for_the_next_run(
    cluster: object, tmp_path: Path
) -> None:
    hurried = f"{SMALL} --num-exchanges 2 --seconds 0.001 --json hurried.json"
    done = run("collect_costs.py", hurried, tmp_path)
    told = "stopped by --seconds 0.001: 0 of 12 shards measured; run again to continue"
    assert told in done.stdout
    assert "0 of 2 all-to-alls measured" in done.stdout
    summary = json.loads((tmp_path / "hurried.json").read_text())
    assert (summary["requested"], summary["measured"], summary["left_out"]) == (12, 0, 12)
    assert summary["promised_seconds"] is None
    plenty = f"{SMALL} --num-shards 40 --seconds 600 --json all.json"
    done = run("collect_costs.py", plenty, tmp_path)
    summary = json.loads((tmp_path / "all.json").read_text())
    assert (summary["measured"], summary["left_out"]) == (40, 0)
    assert "stopped" not in done.stdout
    assert re.search(r"this will take \d+ s, \d+ more", done.stdout)
    assert summary["promised_seconds"] > 0


def test_help_says_what_everything_is(tmp_path: Path) -> None:
    text = run("collect_costs.py", "--help", tmp_path).stdout
    for part in ("--tables", "--num-shards", "NeuroShard", "MLFLOW_TRACKING_URI"):
        assert part in text
