"""Commands as a user runs them: from another folder, in a process of their own."""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import ClassVar

import psutil
from mlflow import MlflowClient

PATIENCE = 240.0  # seconds
EXPERIMENTS = Path(__file__).parents[1] / "experiments"

LOGGING = ("collect_costs.py", "compare.py", "ppo_shard.py", "train_cost_model.py", "tune_shard.py")


def command(script: str, arguments: str) -> list[str]:
    return [sys.executable, str(EXPERIMENTS / script), *arguments.split()]


def environment() -> dict[str, str]:
    """Ours, without what MLflow has put there when tests of this process logged."""
    return {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}


@cache
def empty_mlflow() -> Path:
    """A file with MLflow's tables, which take it seconds to make."""
    path = Path(tempfile.mkdtemp(prefix="autoshard-mlflow-")) / "mlflow.db"
    atexit.register(shutil.rmtree, path.parent)
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def spare_mlflow_its_tables(script: str, arguments: str, folder: Path) -> None:
    """Where a command would make MLflow's file in that folder, put one there."""
    here = script in LOGGING and "--mlflow-uri" not in arguments
    if here and not (folder / "mlflow.db").exists():
        shutil.copy(empty_mlflow(), folder / "mlflow.db")


def run(
    script: str, arguments: str, folder: Path, code: int = 0, **changes: str
) -> subprocess.CompletedProcess[str]:
    if code == 0:
        spare_mlflow_its_tables(script, arguments, folder)
    done = subprocess.run(
        command(script, arguments),
        cwd=folder,
        env={**environment(), **changes},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


class Watched:
    """A command in a process of its own, watched line by line; it ends with the test."""

    running: ClassVar[list["Watched"]] = []

    def __init__(self, script: str, arguments: str, folder: Path, **changes: str) -> None:
        self.log = folder / f"{Path(script).stem}-{time.monotonic_ns()}.log"
        spare_mlflow_its_tables(script, arguments, folder)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command(script, arguments),
                cwd=folder,
                env={**environment(), **changes},
                stdout=log,
                stderr=log,
            )
        self.running.append(self)

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self.log.read_text()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def end(self, code: int = 0) -> str:
        assert self.process.wait(PATIENCE) == code, self.log.read_text()
        return self.log.read_text()

    def kill(self) -> None:
        """With -9, as a machine that goes down does."""
        self.process.kill()
        self.process.wait()

    @classmethod
    def end_all(cls) -> None:
        """Those that a test has left behind, as it does when it fails, would slow all others."""
        while cls.running:
            cls.running.pop().kill()


def kill_actors(name: str, most: int | None = None) -> int:
    """Kill actors of that class with -9; those of this cluster, as no other runs beside tests."""
    found = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]
    victims = [p for p in found if p.info["cmdline"][0].startswith(f"ray::{name}")][:most]
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    return len(victims)
