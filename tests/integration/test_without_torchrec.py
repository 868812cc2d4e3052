"""Where TorchRec is not installed."""

import re
import subprocess
import sys
from pathlib import Path

from commands import PATIENCE

WITHOUT = """
import sys, warnings
sys.modules["torchrec"] = None  # as if it were not installed
from autoshard.experiments import compare
from autoshard.experiments.console import cli
from autoshard.experiments.shard import ShardConfig, main
from autoshard.sharders import SHARDERS, make_sharder, usable_sharders
from autoshard.workload import Device, ShardingTask, load_tables
task = ShardingTask(load_tables("synthetic:5:1:small"), Device.uniform(2, 2**30), 64)
make_sharder("dim").shard(task).check(task)
with warnings.catch_warnings(record=True) as notes:
    assert set(usable_sharders(measure=True)) == set(SHARDERS) - {"torchrec"}
print(*(note.message for note in notes))
for asked in ("--tables synthetic:5 --sharder torchrec", "--model my_module:build_model"):
    sys.argv = ["shard.py", "--num-devices", "2", "--memory-gb", "1", *asked.split()]
    try:
        cli.run_command(main, ShardConfig)
    except SystemExit as left:
        assert left.code == 2
"""


def test_without_torchrec_all_else_is_there_and_one_line_says_what_to_install(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    (note,) = [line for line in done.stdout.splitlines() if "TorchRec" in line]
    assert note.startswith("torchrec is left out: TorchRec cannot be")
    said = [line for line in done.stderr.splitlines() if "TorchRec" in line]
    assert len(said) == 2
    for line in said:
        assert re.fullmatch(r"TorchRec cannot be imported \(.*\): .*; make setup does both", line)
    assert "Traceback" not in done.stderr
