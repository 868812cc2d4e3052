"""Runs the commands and code of docs/torchrec.md, from a model to training and back."""

import math
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run
from pages import python_blocks, shell_lines, text_of
from ranks import run_ranks

from autoshard.workload import ShardingPlan

PAGE = text_of("docs/torchrec.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provides a working folder with the page's code blocks as files."""
    # tests/e2e/test_ray_train.py runs the example with Ray Train.
    names = ("drop_in", "one_call", "my_model", "in_python", "train", "of_groups", "in_ray", "back")
    blocks = zip(names, python_blocks(PAGE), strict=True)
    for name, code in blocks:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_model", None)


def test_one_name_changes_and_one_call_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))  # where the probe is kept
    first, second = run_ranks(folder / "drop_in.py", 2)
    assert "planned for" in first
    assert second == ""
    runpy.run_path("one_call.py")
    assert float(capsys.readouterr().out.split()[0]) > 0
    assert ShardingPlan.load("planned.json").num_devices == 4


def test_the_page_leads_from_a_model_to_a_training_and_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = [line for line in shell_lines(PAGE) if "shard.py" in line]
    run("shard.py", f"{shlex.join(shlex.split(line)[2:])} --no-probe", folder)  # as the code below
    by_command = ShardingPlan.load("plan.json")
    runpy.run_path("in_python.py")
    assert ShardingPlan.load("plan.json") == by_command

    first, second = run_ranks(folder / "train.py", 2)
    losses = [float(line.split()[1]) for line in first.splitlines()]
    assert len(set(losses)) == 10
    assert all(map(math.isfinite, losses))
    assert second == ""

    plan = ShardingPlan.load("plan.json")
    whole = [
        replace(p, row_blocks=1, device=(p.device + p.row_blocks) % 2) for p in plan.placements
    ]
    assert tuple(whole) != plan.placements
    replace(plan, placements=tuple(whole)).save("plan.json")
    again, _ = run_ranks(folder / "train.py", 2)
    assert [int(line.split()[0]) for line in again.splitlines()] == list(range(10, 20))
    plan.save("plan.json")

    capsys.readouterr()
    runpy.run_path("back.py")
    assert float(capsys.readouterr().out) > 0
