"""A Ray cluster that is lost while a command uses it."""

import subprocess
import sys
import tempfile

from commands import PATIENCE, environment

COMMAND = """
from dataclasses import dataclass
import psutil
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import ray_cluster

@dataclass(frozen=True)
class Config:
    "A command."

def main(config: Config) -> None:
    with ray_cluster():
        for process in psutil.Process().children(recursive=True):
            if process.name() == "gcs_server":
                process.kill()
                process.wait()
        raise RuntimeError("an error of Ray's\\nof many lines")

cli.run_command(main, Config)
"""


def test_a_cluster_that_is_lost_is_one_line() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND],
            env={**environment(), "RAY_ADDRESS": "local", "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert "was lost (an error of Ray's): start it, and run again, with --resume" in done.stderr
    assert "Traceback" not in done.stderr
