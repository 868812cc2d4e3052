"""What is installed from the wheel, in an environment that does not see the checkout."""

import json
import os
import sys
from pathlib import Path

import pytest
from commands import PATIENCE, said_by
from wheels import build_wheel

from autoshard.workload import ShardingPlan, load_tables

TABLES = "synthetic:40:1:small"


def run(command: list[str], folder: Path, code: int = 0, **changes: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return said_by(command, folder, code, PATIENCE, {**kept, **changes})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git knows, and of nothing that an earlier build left behind."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment with the wheel, and with our dependencies."""
    return environment(wheel, tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def without_fbgemm(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment as `pip install .` makes it, without an extra."""
    return environment(wheel, tmp_path_factory.mktemp("plain"), left_out="fbgemm")


def environment(wheel: Path, venv: Path, left_out: str = "autoshard") -> Path:
    """Makes an environment that sees neither the checkout nor packages that are `left_out`."""
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], venv)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", str(wheel)], venv)
    (site,) = venv.glob("lib/python*/site-packages")
    packages = venv / "dependencies"
    packages.mkdir()
    for folder in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for each in folder.iterdir():
            # What .pth files say is not heard in a folder that is named in one itself.
            if not each.name.startswith((left_out, "autoshard", "__editable__")):
                (packages / each.name).unlink(missing_ok=True)
                (packages / each.name).symlink_to(each)
    (site / "dependencies.pth").write_text(str(packages))
    where = "import autoshard.experiments.shard as found; print(found.__file__)"
    assert run([str(python), "-c", where], venv).startswith(str(site))
    return venv / "bin" / "autoshard"


def test_it_plans_measures_and_compares(installed: Path, tmp_path: Path) -> None:
    autoshard = str(installed)
    # Actors of a cluster that others have started would run in their environment.
    own = {"RAY_ADDRESS": "local"}
    planning = ["shard", "--tables", TABLES, "--num-devices", "4", "--memory-gb", "1"]
    assert "the plan is in plan.json" in run([autoshard, *planning], tmp_path)
    ShardingPlan.load(tmp_path / "plan.json").check_columns(load_tables(TABLES))
    measuring = f"collect-costs --tables {TABLES} --num-shards 4 --devices cpu --seconds 60"
    run([autoshard, *measuring.split()], tmp_path, **own)
    assert (tmp_path / "costs.db").is_file()
    comparing = (
        f"compare --tables {TABLES} --num-tasks 1 --num-tables 10 --num-devices 2 "
        "--sharders dim,autoshard --measure --precision 0.5 --seconds 20 --json scores.json"
    )
    run([autoshard, *comparing.split()], tmp_path, **own)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["measured"]
    assert set(scores["sharders"]) == {"dim", "autoshard"}


def test_without_fbgemm_it_plans_and_says_what_measuring_needs(
    without_fbgemm: Path, tmp_path: Path
) -> None:
    planning = f"shard --tables {TABLES} --num-devices 4 --memory-gb 1"
    assert "the plan is in plan.json" in run([str(without_fbgemm), *planning.split()], tmp_path)
    measuring = f"collect-costs --tables {TABLES} --num-shards 4 --devices cpu"
    said = run([str(without_fbgemm), *measuring.split()], tmp_path, 2, RAY_ADDRESS="local")
    assert "pip install 'autoshard[cpu]'" in said.splitlines()[-1]
    assert "Traceback" not in said
