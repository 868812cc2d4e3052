"""Progress in a log: a line at each fifth, and none for long."""

import time
from queue import Queue
from types import SimpleNamespace

import pytest

from autoshard.experiments.console import progress
from autoshard.experiments.console.progress import following
from autoshard.experiments.evaluation.planners import Outcome, PlannedTask
from autoshard.experiments.evaluation.trained import _Rest
from autoshard.workload import Device, EmbeddingTable, ShardingPlan, ShardingTask

TASK = ShardingTask((EmbeddingTable("t", 10, 8, 1.0),), Device.uniform(2, 2**30), 64)


def test_a_line_at_each_fifth(capsys: pytest.CaptureFixture[str]) -> None:
    with following(20, "things") as step:
        for _ in range(20):
            step()
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["4/20", "8/20", "12/20", "16/20", "20/20"]


def test_no_silence_while_one_thing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Queue[str]()
    shown = SimpleNamespace(is_terminal=False, print=lambda line, **_: told.put(line))
    monkeypatch.setattr(progress, "console", shown)
    monkeypatch.setattr(progress, "SILENT_S", 0.01)
    with following(6, "tasks trained", lambda: 90.4) as step:
        step(0, "task hot: 1 of at least 21 rounds")
        lines = [told.get(timeout=60), told.get(timeout=60)]  # while nothing is done
        step(0, "task hot: 2 of at least 21 rounds")
        while "2 of at least" not in lines[-1]:
            lines.append(told.get(timeout=60))
    assert "  0/6 tasks trained (task hot: 1 of at least 21 rounds), 0 s, about 90 s left" in lines


def test_what_training_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of rounds, each as long as it has ranks, and at least until the deadline."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    plans = {"a": Outcome(ShardingPlan((), 2)), "like a": Outcome(ShardingPlan((), 2))}
    rest = _Rest([PlannedTask(TASK, plans | {"none": Outcome()})] * 2, 1, deadline=130.0)
    now = 105.0
    rest.at(0, 0, 6)
    assert rest.left_s() is None
    rest.at(0, 2, 4)  # two plans of two tasks, three rounds each
    now = 115.0
    assert rest.left_s() == pytest.approx(5.0 * (4 + 6))
    rest.at(0, 6, 0)
    rest.at(1, 6, 0)
    now = 120.0
    assert rest.left_s() == pytest.approx(10.0)  # further rounds for steps that are not precise
    rest.end()
    rest.end()
    assert rest.left_s() == 0
