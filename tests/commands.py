"""Commands as a user runs them: from another folder, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def command(script: str, arguments: str) -> list[str]:
    return [sys.executable, str(EXPERIMENTS / script), *arguments.split()]


def environment() -> dict[str, str]:
    """Ours, without what MLflow has put there when tests of this process logged."""
    return {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}


def run(
    script: str, arguments: str, folder: Path, code: int = 0, **changes: str
) -> subprocess.CompletedProcess[str]:
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
