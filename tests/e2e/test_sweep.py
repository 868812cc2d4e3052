"""Sweeps that are interrupted, and sweeps in an object store: nothing is lost, nothing repeated."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from commands import PATIENCE, Watched, run
from mlflow import MlflowClient
from ray._private.state import actors
from trainings import SWEPT

from autoshard.experiments.tracking.storage import Storage
from autoshard.sharders import load_policy

SWEEP = (
    "--tables synthetic:80:1:small --num-tables 10 --num-devices 2 --num-envs 32 --check-tasks 2 "
    "--check-every 2 --batch-size 512 --memory-fill 0.1-0.6"
)


def trials_of(uri: str) -> dict[str, Any]:
    """Runs of trials by name, with the iterations of each one's curve."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("autoshard")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "tags.kind = 'trial'")
    return {
        run.info.run_name: (
            run,
            [p.step for p in client.get_metric_history(run.info.run_id, "work/steps")],
        )
        for run in found
    }


def test_ctrl_c_and_crashed_trials(cluster: object, tmp_path: Path) -> None:
    unhurried = "--scheduler none --search random --num-samples 2 --max-iterations 30"
    options = f"{SWEEP} {unhurried} --storage sweep --json sweep.json"
    sweep = Watched("tune_shard.py", options, tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    wait_for_iterations(sweep, uri, 3)
    os.kill(next(iter(pids_of("ResourceTrainable"))), signal.SIGKILL)
    sweep.wait_for("crashed and continues from its checkpoint")
    sweep.process.send_signal(signal.SIGINT)
    assert f"interrupted: continue with --resume --storage {tmp_path}/sweep" in sweep.end(code=130)
    assert not (tmp_path / "sweep.json").exists()
    assert {found.info.status for found, _ in trials_of(uri).values()} == {"KILLED"}
    run("tune_shard.py", "--resume --storage sweep", tmp_path)
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert [trial["iterations"] for trial in told["trials"]] == [30, 30]
    assert sum(trial["failures"] for trial in told["trials"]) >= 1
    for found, steps in trials_of(uri).values():
        assert found.info.status == "FINISHED"
        assert sorted(set(steps)) == list(range(1, 31))


def pids_of(kind: str) -> list[int]:
    """Of all living actors of a class."""
    return [
        actor["Pid"]
        for actor in actors().values()
        if kind in actor["ActorClassName"] and actor["State"] == "ALIVE"
    ]


def wait_for_iterations(sweep: Watched, uri: str, count: int) -> None:
    """Until every trial has made so many."""
    deadline = time.monotonic() + PATIENCE
    while True:
        assert sweep.process.poll() is None, sweep.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.5)
        client = MlflowClient(uri)
        if client.get_experiment_by_name("autoshard") is None:
            continue
        trials = trials_of(uri)
        if len(trials) == 2 and all(max(steps, default=0) >= count for _, steps in trials.values()):
            return


def test_a_sweep_whose_seconds_are_over_has_a_winner(cluster: object, tmp_path: Path) -> None:
    options = (
        f"{SWEEP} --num-samples 100 --max-iterations 1000 --scheduler none --search random "
        "--seconds 40 --storage sweep --json sweep.json"
    )
    done = run("tune_shard.py", options, tmp_path)
    told = json.loads((tmp_path / "sweep.json").read_text())
    ended = [trial for trial in told["trials"] if trial["status"] == "finished"]
    assert 1 <= len(ended) < 100
    assert f"stopped by --seconds 40: {100 - len(ended)} of 100 trials have no score" in done.stdout
    assert told["best"]["score"] == min(trial["score"] for trial in ended)
    assert load_policy(tmp_path / "sweep" / "winner").trained["iterations"] >= 0


def test_a_sweep_and_a_training_in_an_object_store(
    cluster: object, tmp_path: Path, bucket: str
) -> None:
    options = f"{SWEPT} --num-samples 2 --max-iterations 2 --storage {bucket}/sweep"
    # Trials run in actors, which must know the store: Ray is started by the command.
    done = run("tune_shard.py", options, tmp_path, RAY_ADDRESS="local")
    assert f"the winner is in {bucket}/sweep/winner" in done.stdout
    assert Storage(f"{bucket}/sweep/winner").fetch_folder(tmp_path / "winner")
    assert load_policy(tmp_path / "winner").trained["tables"] == "synthetic:80:1:small"
    tiny = (
        "--tables synthetic:80:1:small --num-tables 6 --num-devices 2 --num-envs 8 --check-tasks 2 "
        "--check-every 1 --batch-size 512 --memory-fill 0.1-0.6 --test-seconds 0"
    )
    where = f"--storage {bucket}/runs"
    run("ppo_shard.py", f"{tiny} --iterations 1 --out here/mine {where}", tmp_path)
    # The machine is lost, another goes on; MLflow is where it was.
    (tmp_path / "here").rename(tmp_path / "lost")
    more = f"--resume --iterations 2 --out there/mine {where} --json told.json"
    done = run("ppo_shard.py", more, tmp_path)
    assert "resuming after iteration 1" in done.stdout
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["iterations"] == 2
    assert Storage(f"{bucket}/runs/mine").read_json("training.json")["checkpoint"] == "checkpoint-2"
