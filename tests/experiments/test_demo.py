"""The tour: that it ends in time, whatever its parts take, and what it ends with."""

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import empty_mlflow

from autoshard.cost_model import DataError
from autoshard.experiments import demo
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.sharders import load_policy
from autoshard.workload import UserError

PARTS = ("collect_costs", "train_cost_model", "ppo_shard", "compare")


class Parts:
    """Takes the place of the commands: each takes a while, and tells what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spend: Callable[[Any], float]) -> None:
        self.now = 0.0
        self.asked: dict[str, Any] = {}
        self.fault: Exception | None = None  # what the calibration raises, if anything
        self._spend = spend
        monkeypatch.setattr(demo, "Budget", partial(Budget, clock=lambda: self.now))
        monkeypatch.setattr(demo, "ray_cluster", contextlib.nullcontext)
        for name in PARTS:
            monkeypatch.setattr(getattr(demo, name), "main", partial(self._take, name))

    def _take(self, name: str, config: Any) -> None:
        self.asked[name] = config
        self.now += 5.0 if name == "train_cost_model" else self._spend(config.seconds)
        if name == "train_cost_model" and self.fault is not None:
            raise self.fault


@pytest.mark.parametrize(
    ("spend", "least_for_comparing"),
    [
        (lambda seconds: seconds, 0.25),  # each part takes all that it may
        (lambda seconds: seconds + 10.0, 0.25),  # and a little more
        (lambda _: 10.0, 0.7),  # what fast parts leave is the last one's
    ],
)
def test_all_parts_fit_into_the_seconds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    spend: Callable[[float], float],
    least_for_comparing: float,
) -> None:
    parts = Parts(monkeypatch, spend)
    demo.main(demo.DemoConfig(out=tmp_path, seconds=270.0))
    assert tuple(parts.asked) == PARTS
    assert parts.now <= 270.0
    assert parts.asked["compare"].seconds > least_for_comparing * 270
    assert parts.asked["ppo_shard"].cost_model == str(tmp_path / "cost_model")


def test_plans_are_compared_even_if_all_before_took_too_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = Parts(monkeypatch, lambda seconds: seconds + 100.0)
    demo.main(demo.DemoConfig(out=tmp_path, seconds=200.0))
    assert parts.asked["ppo_shard"].seconds >= 1.0
    assert parts.asked["compare"].seconds == 60.0


def test_too_few_shards_to_calibrate_with_end_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = Parts(monkeypatch, lambda seconds: seconds)
    parts.fault = DataError("3 shards are too few to calibrate with")
    demo.main(demo.DemoConfig(out=tmp_path))
    assert parts.asked["ppo_shard"].cost_model == "cpu"
    assert "the shipped model is used as it is: 3 shards are too few" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seconds": 0.0}, "--seconds must be more than 0, got 0"),
        ({"precision": 0.0}, "--precision must be more than 0, got 0"),
        ({"iterations": 0}, "--iterations must be at least 1, got 0"),
    ],
)
def test_bad_options_are_told(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        demo.main(demo.DemoConfig(out=tmp_path / "demo", **options))
    assert not (tmp_path / "demo").exists()


def test_the_demo(
    cluster: object,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its seconds are what a slow machine needs; what would fill them is made small."""
    monkeypatch.setattr(demo, "_COLLECTING_SHARE", 0.012)
    monkeypatch.setattr(demo, "_VERIFYING_SHARE", 0.002)
    monkeypatch.setattr(demo, "USUAL_HEURISTICS", ("dim", "size_lookup"))
    few = partial(PPOShardConfig, num_envs=32, check_tasks=2)
    monkeypatch.setattr(demo, "PPOShardConfig", few)
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    empty_mlflow(tmp_path / "demo" / "mlflow.db")
    demo.main(demo.DemoConfig(iterations=1, num_tasks=2, precision=1000, seconds=1000))
    said = capsys.readouterr().out
    assert re.search(r"the best heuristic", said.strip().splitlines()[-1])
    assert "all intervals are within" in said or "stopped by --seconds" in said
    plans = tmp_path / "demo" / "plans"
    assert (plans / "plans" / "autoshard" / "0.json").is_file()
    assert (plans / "pictures" / "step_ms.png").stat().st_size > 5000
    assert load_policy(tmp_path / "demo" / "policy").trained["iterations"] <= 1
