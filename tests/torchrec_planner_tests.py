#!/usr/bin/env python
"""Run TorchRec's own tests of its planner with `AutoShardPlanner` in the place of its class.

    git clone --branch release/v1.8.0 https://github.com/meta-pytorch/torchrec
    python tests/torchrec_planner_tests.py torchrec

The tests are those of the clone, and of the version that is installed. With --theirs, they run with
TorchRec's own class, for comparison.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = "torchrec/distributed/planner/tests"
OURS = """
import torchrec.distributed.planner
from torchrec.distributed.planner import planners
from autoshard import AutoShardPlanner

torchrec.distributed.planner.EmbeddingShardingPlanner = AutoShardPlanner
planners.EmbeddingShardingPlanner = AutoShardPlanner
"""


def main(clone: Path, theirs: bool) -> int:
    """Returns pytest's exit code."""
    if not (clone / FOLDER).is_dir():
        sys.exit(f"{clone} is no clone of TorchRec: it has no {FOLDER}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # beside the clone, whose package would hide the installed one
        for test in sorted((clone / FOLDER).glob("test_*.py")):
            text = test.read_text()
            if "EmbeddingShardingPlanner(" in text:
                (folder / test.name).write_text(text)
        (folder / "conftest.py").write_text("" if theirs else OURS)
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "-W", "ignore", str(folder)]
        return subprocess.run([*command, "-p", "no:cacheprovider"], check=False).returncode


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--theirs"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    sys.exit(main(Path(arguments[0]), "--theirs" in sys.argv))
