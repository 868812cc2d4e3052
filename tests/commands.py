"""Commands as a user runs them: from another folder, with the output that a user sees."""

import contextlib
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import ray
from mlflow import MlflowClient

from autoshard.benchmark import BenchmarkPool
from autoshard.benchmark.machine.hardware import physical_cores

PATIENCE = 480.0  # seconds
EXPERIMENTS = Path(__file__).parents[1] / "experiments"

LOGGING = ("collect_costs.py", "compare.py", "ppo_shard.py", "train_cost_model.py", "tune_shard.py")


def command(script: str, arguments: str) -> list[str]:
    return [sys.executable, str(EXPERIMENTS / script), *arguments.split()]


def said_by(
    words: Sequence[str],
    folder: Path | None = None,
    code: int = 0,
    patience: float = PATIENCE,
    env: Mapping[str, str] | None = None,
) -> str:
    """What any command says, with its errors; an AssertionError with it if it ends otherwise."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def environment() -> dict[str, str]:
    """Ours, without what MLflow has put there when tests of this process logged."""
    return {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}


@contextlib.contextmanager
def few_test_tasks() -> Iterator[None]:
    """Trainings and sweeps of this process test their policies on two tasks each.

    It is the same work for each task. Commands in processes of their own test as they do for users.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in ("training.report", "sweeps.winner"):
            patch.setattr(f"autoshard.experiments.{module}._TEST_TASKS", 2)
        yield


def empty_mlflow(path: Path) -> str:
    """The address of a store of MLflow's without runs, in a file that is put there."""
    shutil.copy(_mlflow_tables(), path)
    return f"sqlite:///{path}"


@cache
def _mlflow_tables() -> Path:
    """A file with MLflow's tables, which take it seconds to make; among the session's own files."""
    path = Path(tempfile.mkdtemp(prefix="mlflow-")) / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def spare_mlflow_its_tables(script: str, arguments: str, folder: Path) -> None:
    """Where a command would make MLflow's file in that folder, put one there."""
    here = script in LOGGING and "--mlflow-uri" not in arguments
    if here and not (folder / "mlflow.db").exists():
        empty_mlflow(folder / "mlflow.db")


def run(
    script: str, arguments: str, folder: Path, code: int = 0, apart: bool = False, **changes: str
) -> subprocess.CompletedProcess[str]:
    """The command's output. It runs in this process, where all that is slow to load is loaded.

    `apart`: in a process of its own; so it does with `changes` of the environment.
    """
    if code == 0:
        spare_mlflow_its_tables(script, arguments, folder)
    done = (_run_apart if apart or changes else _run_here)(script, arguments, folder, **changes)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def _run_apart(
    script: str, arguments: str, folder: Path, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(script, arguments),
        cwd=folder,
        env={**environment(), **changes},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def _run_here(script: str, arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    asked = command(script, arguments)[1:]
    main, argv, before = sys.modules["__main__"], sys.argv, dict(os.environ)
    output, error = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(error),
        warnings.catch_warnings(),
    ):
        # As Python itself tells of them, not as pytest collects them.
        warnings.showwarning = _tell_warning
        warnings.simplefilter("default")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        form = warnings.formatwarning
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        sys.argv = asked
        try:
            runpy.run_path(asked[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.argv, sys.modules["__main__"] = argv, main
            warnings.formatwarning = form
            os.environ.clear()
            os.environ.update(before)
    return subprocess.CompletedProcess(asked, code, output.getvalue(), error.getvalue())


def _tell_warning(*told: Any, **_: Any) -> None:
    message, category, filename, lineno = told[:4]
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


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


def in_pool(pool: BenchmarkPool, question: Callable[[Any], Any]) -> Any:
    """What a function returns in the process of the pool's actor."""
    return ray.get(pool._actor.__ray_call__.remote(question))


def backlog(pool: BenchmarkPool) -> int:
    """Shards that wait for a device or are being measured."""
    return int(in_pool(pool, lambda coordinator: len(coordinator._jobs)))


def process_id(pool: BenchmarkPool) -> int:
    return int(in_pool(pool, lambda _: os.getpid()))


def actors(name: str) -> list[psutil.Process]:
    """Processes of actors of that class in the cluster that these tests have started."""
    found = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    return [process for process in found if _title(process).startswith(f"ray::{name}")]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str((process.cmdline() or [""])[0])
    return ""


def kill_actors(name: str, most: int | None = None) -> int:
    """Kill actors of that class with -9: all, or so many at most."""
    victims = actors(name)[:most]
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    return len(victims)


def wait_until(what: str, condition: Callable[[], object], patience: float = 240) -> None:
    """Return as soon as the condition holds; an error that names it if it never does."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience:.0f} s for {what}"
        time.sleep(0.1)


def whole(pool: BenchmarkPool) -> BenchmarkPool:
    """The pool with all its actors: tests before, which use the same, may have killed some."""
    on_cores = pool.devices()[0].kind == "cpu"
    count = len(physical_cores()) if on_cores else int(ray.cluster_resources()["GPU"])  # type: ignore[no-untyped-call]
    wait_until("all actors", lambda: len(pool.devices()) == count)
    return pool
