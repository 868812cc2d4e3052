"""Sweeps on three nodes that lose a node, then the head, then the driver.

Each is killed with -9 while trials train. The nodes are this test's own, for no other would outlive
that. After the head, another cluster goes on with what the storage holds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import psutil
import pytest
from commands import PATIENCE, Watched, empty_mlflow, environment, wait_until
from mlflow import MlflowClient
from ports import free_port
from trainings import SWEPT

ITERATIONS = 5
OPEN = {"RAY_AUTH_MODE": "disabled"}  # the session's own cluster has another token
# As Tune's users do.
RESTORE = """
import sys

import fsspec
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.tune import Tuner

from autoshard.experiments.tune_shard import trainable_of

sweep = sys.argv[1]
filesystem, path = fsspec.core.url_to_fs(sweep)
where = {"storage_filesystem": PyFileSystem(FSSpecHandler(filesystem))} if "://" in sweep else {}
Tuner.restore(f"{path}/trials", trainable_of(sweep), resume_errored=True, **where).fit()
"""


class Node:
    """A Ray node with one CPU, in processes of its own.

    Ray ends every process that has talked to a head that is lost, so these tests do not.
    """

    def __init__(self, log: Path, options: str) -> None:
        words = f"-m ray.scripts.scripts start --block --num-cpus 1 --disable-usage-stats {options}"
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *words.split()],
                env={**environment(), **OPEN},
                stdout=output,
                stderr=output,
            )
        wait_until(f"a node, see {log}", lambda: "Ray runtime started" in log.read_text())

    def children(self) -> list[psutil.Process]:
        """Its processes; none once it is lost."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """With -9, as a machine that goes down does."""
        for process in [*self.children(), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def trains(self, sweep: str) -> bool:
        """Whether a trial that has made an iteration is on it."""
        here = {child.pid for child in self.children()}
        return any(status == "RUNNING" and pid in here for status, pid in noted(sweep).values())


@contextmanager
def three_nodes() -> Iterator[tuple[str, list[Node]]]:
    """The address of a cluster and its nodes, the head first; they end with the block."""
    # A short path, for sockets are in it.
    with TemporaryDirectory(prefix="as", dir="/tmp", ignore_cleanup_errors=True) as folder:
        address, nodes = f"127.0.0.1:{free_port()}", list[Node]()
        head = f"--head --port {address.rpartition(':')[2]} --include-dashboard=false"
        local = "--node-ip-address 127.0.0.1"
        try:
            for options in (f"{head} --temp-dir {folder}/r", *[f"--address {address}"] * 2):
                nodes.append(Node(Path(folder) / f"{len(nodes)}.log", f"{options} {local}"))
            yield address, nodes
        finally:
            for node in reversed(nodes):
                node.kill()


def noted(sweep: str) -> dict[str, tuple[str, int]]:
    """Status of each trial in Tune's latest state, and the process of its last result."""
    files, path = fsspec.core.url_to_fs(sweep)
    files.invalidate_cache()
    states = sorted(files.glob(f"{path}/trials/experiment_state-*"))
    try:
        found = json.loads(files.cat_file(states[-1]))["trial_data"] if states else []
    except ValueError:
        return {}
    trials = [(json.loads(trial), json.loads(more)["last_result"]) for trial, more in found]
    return {
        trial["trial_id"]: (trial["status"], (last or {}).get("pid", 0)) for trial, last in trials
    }


def ended(sweep: str) -> set[str]:
    return {trial for trial, (status, _) in noted(sweep).items() if status == "TERMINATED"}


def histories(uri: str) -> dict[str, tuple[str, int | None, list[int]]]:
    """Status and end of each trial in MLflow, and the iterations that were logged."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("autoshard")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.kind = 'trial'")
    assert len({run.data.tags["key"] for run in runs}) == len(runs)
    return {
        run.data.tags["key"]: (
            run.info.status,
            run.info.end_time,
            [p.step for p in client.get_metric_history(run.info.run_id, "work/steps")],
        )
        for run in runs
    }


OBJECT_STORE = pytest.mark.skipif("OBJECT_STORE" not in os.environ, reason="two minutes more")


@pytest.mark.parametrize(
    ("place", "trials", "moments"),
    [
        ("folder", 20, (1, 6, 13)),
        pytest.param("object store", 8, (1, 3, 5), marks=OBJECT_STORE),
    ],
)
def test_nothing_is_lost_or_done_twice(
    place: str,
    trials: int,
    moments: tuple[int, int, int],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """The moments are numbers of trials that have ended."""
    bucket = f"{request.getfixturevalue('bucket')}/sweep" if place == "object store" else None
    sweep, uri = bucket or str(tmp_path / "sweep"), empty_mlflow(tmp_path / "mlflow.db")
    kept: dict[str, Any] = {}  # what was known of trials that had ended

    def kill_after(count: int, driver: Watched, kill: Any) -> None:
        def reached() -> bool:
            assert driver.process.poll() is None, driver.log.read_text()
            return len(ended(sweep)) >= count

        wait_until(f"{count} trials", reached, 400)
        kill()
        known = histories(uri)
        kept.update({trial: known[trial] for trial in ended(sweep)})

    with three_nodes() as (address, nodes):
        options = f"{SWEPT} --num-samples {trials} --max-iterations {ITERATIONS}"
        # Ray ends a driver that finds no head for so long; its default is a minute.
        known = {**OPEN, "RAY_ADDRESS": address, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
        driver = Watched("tune_shard.py", f"{options} --storage {sweep}", tmp_path, **known)
        head, *workers = nodes
        busy: list[Node] = []
        wait_until(
            "a trial on a worker",
            lambda: busy.extend(node for node in workers if node.trains(sweep)) or busy,
        )
        kill_after(moments[0], driver, busy[0].kill)
        driver.wait_for("crashed and continues from its checkpoint")
        kill_after(moments[1], driver, head.kill)
        assert driver.process.wait(PATIENCE) != 0
    (tmp_path / "restore.py").write_text(RESTORE)
    with three_nodes() as (address, _):
        known = {**OPEN, "RAY_ADDRESS": address}
        driver = Watched(str(tmp_path / "restore.py"), sweep, tmp_path, **known)
        kill_after(moments[2], driver, driver.kill)
        options = f"--resume --storage {sweep} --json result.json"
        Watched("tune_shard.py", options, tmp_path, **known).end()
    result = json.loads((tmp_path / "result.json").read_text())
    found = histories(uri)
    assert len(result["trials"]) == len(found) == trials
    assert {trial["trial_id"] for trial in result["trials"]} == found.keys()
    for trial in result["trials"]:
        assert (trial["status"], trial["iterations"]) == ("finished", ITERATIONS)
    for status, _, steps in found.values():
        assert status == "FINISHED"
        assert sorted(set(steps)) == [*range(1, ITERATIONS + 1)]
    assert len(kept) >= moments[2]
    assert {trial: found[trial] for trial in kept} == kept
