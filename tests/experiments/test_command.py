"""The command `autoshard`, and how little it loads to plan."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import EXPERIMENTS, PATIENCE, environment

from autoshard import __version__
from autoshard.experiments.console.commands import COMMANDS
from autoshard.workload import ShardingPlan, load_tables

PACKAGES = (
    "workload", "benchmark", "cost_model", "envs", "sharders", "integration", "experiments",
)  # fmt: skip
PLANNING = "--no-probe --tables synthetic:12:1:small --num-devices 2 --memory-gb 1"
# What a planning run must not wait for.
HEAVY = ("ray", "mlflow", "matplotlib", "fbgemm_gpu", "torchrec", "pandas", "pyarrow")
# Runs a command as the installed `autoshard` does, then prints what of `HEAVY` is loaded, and how
# many of our own modules, without packages.
COUNTED = f"""
import sys
from autoshard.experiments.console.commands import main
try:
    main()
finally:
    print([name for name in {HEAVY!r} if name in sys.modules])
    ours = [each for name, each in sys.modules.items() if name.startswith("autoshard.")]
    print(sum(not hasattr(each, "__path__") for each in ours))
"""


def autoshard(arguments: str, folder: Path, code: int = 0, *python: str) -> tuple[str, str]:
    """Output and errors of `python -m autoshard ARGUMENTS`, or of other arguments of Python's."""
    done = subprocess.run(
        [sys.executable, *(python or ("-m", "autoshard")), *arguments.split()],
        cwd=folder,
        env={**environment(), "RAY_ADDRESS": "127.0.0.1:1"},  # where nothing answers
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_each_package_is_installed() -> None:
    project = tomllib.loads((EXPERIMENTS.parent / "pyproject.toml").read_text())
    found = {
        ".".join(("autoshard", *path.parent.relative_to(EXPERIMENTS.parent).parts))
        for room in ("", *PACKAGES)
        for path in (EXPERIMENTS.parent / room).glob("**/__init__.py" if room else "__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_each_script_is_a_subcommand(tmp_path: Path) -> None:
    scripts = {path.stem for path in EXPERIMENTS.glob("[!_]*.py")}
    assert {script.replace("_", "-"): script for script in scripts} == COMMANDS
    told, _ = autoshard("--help", tmp_path)
    for name in COMMANDS:
        assert f"  {name} " in told
    assert autoshard("", tmp_path)[0] == told
    assert autoshard("--version", tmp_path)[0] == f"autoshard {__version__}\n"


def test_planning_loads_little(tmp_path: Path) -> None:
    told, _ = autoshard(f"shard {PLANNING}", tmp_path, 0, "-c", COUNTED)
    *_, heavy, files = told.splitlines()
    assert heavy == "[]"
    assert int(files) <= 100
    plan = ShardingPlan.load(tmp_path / "plan.json")
    plan.check_columns(load_tables("synthetic:12:1:small"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("shrad", "autoshard shrad: there is no such command: use shard, compare, collect-costs, "),
        ("shard --memory-gb 2", "Missing from autoshard shard:"),
        (
            f"shard {PLANNING} --policy nowhere",
            "autoshard ppo-shard --out makes one",
        ),
        ("store inform costs.db", "autoshard store"),
    ],
)
def test_faults_name_the_command_as_it_was_typed(arguments: str, line: str, tmp_path: Path) -> None:
    _, error = autoshard(arguments, tmp_path, code=2)
    assert line in error
    assert "Traceback" not in error
    assert ".py" not in error


def test_the_shell_completes_commands_and_options(tmp_path: Path) -> None:
    script, _ = autoshard("--tyro-print-completion bash", tmp_path)
    (tmp_path / "completion").write_text(script)
    asked = (
        "source ./completion; complete -p autoshard | grep -q autoshard && "
        "grep -c -- --start-plan ./completion"
    )
    done = subprocess.run(
        ["bash", "-c", asked],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in script
