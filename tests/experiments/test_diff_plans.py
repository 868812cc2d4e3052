"""From one plan to another: what moves, what is gained, when it has paid; and bad input."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run

from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.experiments import diff_plans
from autoshard.experiments.diff_plans import DiffConfig
from autoshard.sharders import make_sharder
from autoshard.workload import (
    Device,
    ShardingPlan,
    ShardingTask,
    UserError,
    load_tables,
)
from autoshard.workload.plans.moves import moved_bytes, moves_between, traffic_of

TABLES = "synthetic:24:5:small"


@pytest.fixture
def config(tmp_path: Path) -> DiffConfig:
    """From the plan by dimensions, which is uneven, to one by cost."""
    task, oracle = task_and_oracle()
    slow, fast = sorted(
        (make_sharder(name).shard(task) for name in ("dim", "size_lookup")),
        key=lambda plan: -StepPredictor(oracle, task).expected_ms(plan.placed(task)),
    )
    slow.save(tmp_path / "old.json")
    fast.save(tmp_path / "new.json")
    return DiffConfig(
        tmp_path / "old.json", tmp_path / "new.json", TABLES, store=tmp_path / "costs.db",
        json=tmp_path / "diff.json", objective="operators",
    )  # fmt: skip


def task_and_oracle() -> tuple[ShardingTask, EstimatedCosts]:
    task = ShardingTask(load_tables(TABLES), Device.uniform(3, 2**30), 1024)
    return task, EstimatedCosts(load_model("cpu"), 1024)


def plans(config: DiffConfig) -> tuple[ShardingPlan, ShardingPlan]:
    return ShardingPlan.load(config.old), ShardingPlan.load(config.new)


def test_what_moves_is_gained_and_paid(config: DiffConfig, tmp_path: Path) -> None:
    done = run(
        "diff_plans.py",
        f"old.json new.json --tables {TABLES} --link-gb-s 0.001 --memory-gb 1 --json diff.json "
        "--objective operators",
        tmp_path,
    )
    (task, oracle), (old, new) = task_and_oracle(), plans(config)
    moves = moves_between(old, new, task)
    traffic = traffic_of(moves, 3)
    predictor = StepPredictor(oracle, task)
    before, after = predictor.of(old), predictor.of(new)
    than = after.over(before)
    most = max(each.most for each in traffic)
    told = json.loads((tmp_path / "diff.json").read_text())
    assert told["schema"] == "autoshard.plan_diff"
    assert told["moves"] == [vars(move) for move in moves]
    assert told["moved_bytes"] == moved_bytes(moves)
    assert [(d["out_bytes"], d["in_bytes"]) for d in told["devices"]] == list(traffic)
    assert told["old"] == {
        "expected_ms": pytest.approx(before.expected_ms),
        "interval_90_ms": pytest.approx(before.interval_ms),
    }
    assert told["ratio"] == pytest.approx(than.ratio)
    assert told["ratio_90"] == pytest.approx([than.low, than.high])
    assert told["probability_faster"] == pytest.approx(than.probability)
    assert told["moving_s"] == pytest.approx(most / 1e6)  # at a thousandth of a GB a second
    gain_ms = before.expected_ms - after.expected_ms
    assert told["gain_ms"] == pytest.approx(gain_ms)
    assert told["steps_until_paid"] - 1 < told["moving_s"] / (gain_ms / 1000)
    assert told["moving_s"] / (gain_ms / 1000) <= told["steps_until_paid"]
    names = {move.table for move in moves}
    assert f"{len(names)} of 24 tables, {moved_bytes(moves) / 1e6:,.1f} MB" in done.stdout
    for device, each in enumerate(traffic):
        row = rf"device{device} +{each.out / 1e6:,.1f} +{each.into / 1e6:,.1f}$"
        assert re.search(row, done.stdout, re.MULTILINE)
    first = max(moves, key=lambda move: move.bytes)
    row = (
        rf"{first.table} +all {first.width} +device{first.source} +device{first.target} "
        rf"+{first.bytes / 1e6:.1f}$"
    )
    assert re.search(row, done.stdout, re.MULTILINE)
    line = next(line for line in done.stdout.splitlines() if line.startswith("gained: "))
    for number in (before.expected_ms, after.expected_ms, *before.interval_ms):
        assert f"{number:.2f}" in line
    assert f"{than.ratio:.3f} of it" in line
    assert f"after {told['steps_until_paid']:,} steps" in done.stdout


def test_a_slower_plan_never_pays(config: DiffConfig, capsys: pytest.CaptureFixture[str]) -> None:
    diff_plans.main(replace(config, old=config.new, new=config.old))
    assert "it does not pay off" in capsys.readouterr().out
    assert config.json is not None
    assert json.loads(config.json.read_text())["steps_until_paid"] is None


def test_the_same_columns_on_the_same_devices_move_nothing(
    config: DiffConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """However they are sliced there, and in whichever order they stand."""
    old, _ = plans(config)
    cut = [
        replace(p, start=start, width=p.width // 2)
        for p in reversed(old.placements)
        for start in (0, p.width // 2)
        if p.width % 8 == 0
    ]
    rest = [p for p in old.placements if p.width % 8]
    ShardingPlan((*cut, *rest), 3).save(config.new)
    diff_plans.main(config)
    assert capsys.readouterr().out == "nothing moves: each column stays on its device\n"
    assert config.json is not None
    told = json.loads(config.json.read_text())
    assert (told["moves"], told["moved_bytes"], told["steps_until_paid"]) == ([], 0, 0)


def test_devices_are_renumbered_where_asked(
    config: DiffConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = plans(config)
    turned = [replace(p, device=(p.device + 1) % 3) for p in old.placements]
    ShardingPlan(tuple(turned), 3).save(config.new)
    with pytest.raises(UserError, match="--renumber needs --memory-gb"):
        diff_plans.main(replace(config, renumber=config.old.with_name("near.json")))
    config = replace(config, memory_gb="1")
    diff_plans.main(config)
    assert re.search(r"note: .* would move 0.0 MB in place of [\d.]+", capsys.readouterr().out)
    near = config.old.with_name("near.json")
    diff_plans.main(replace(config, renumber=near))
    assert "nothing moves" in capsys.readouterr().out
    assert ShardingPlan.load(near) == old
    rules = config.old.with_name("constraints.yaml")
    first = old.placements[0]
    rules.write_text(f"tables: {{{first.table}: {{not_on: {first.device}}}}}")
    diff_plans.main(replace(config, renumber=near, constraints=rules))
    assert ShardingPlan.load(near) != old  # the devices are no longer equal


def test_plans_for_other_numbers_of_devices(config: DiffConfig, tmp_path: Path) -> None:
    """The device that goes sends what it had, over the link of all-to-alls."""
    old, _ = plans(config)
    for ranks, name in ((2, "two.json"), (1, "one.json")):
        placements = tuple(replace(p, device=p.device % ranks) for p in old.placements)
        ShardingPlan(placements, ranks).save(tmp_path / name)
    link = "--link 0.01GB/s,10us"
    done = run(
        "diff_plans.py", f"old.json two.json --tables {TABLES} {link} --json diff.json", tmp_path
    )
    task = ShardingTask(load_tables(TABLES), Device.uniform(2, 2**40), 1024)
    told = json.loads((tmp_path / "diff.json").read_text())
    moved = moved_bytes(moves_between(old, ShardingPlan.load(tmp_path / "two.json"), task))
    assert told["moved_bytes"] == moved > 0
    assert [device["out_bytes"] for device in told["devices"]] == [0, 0, moved]
    assert told["moving_s"] == pytest.approx(moved / 1e7)
    assert "from 3 devices to 2; gone: device2" in done.stdout
    assert "at 0.01 GB/s (as all-to-alls)" in " ".join(done.stdout.split())
    back = run("diff_plans.py", f"two.json old.json --tables {TABLES} --memory-gb 1", tmp_path)
    assert "from 2 devices to 3; new: device2" in back.stdout
    alone = run("diff_plans.py", f"old.json one.json --tables {TABLES} {link}", tmp_path)
    assert "from 3 devices to 1; gone: device1, device2" in alone.stdout


def test_bad_input_is_one_line(config: DiffConfig, tmp_path: Path) -> None:
    replace(plans(config)[1], num_devices=4).save(tmp_path / "four.json")
    (tmp_path / "broken.json").write_text("{")
    for changes, says in (
        ({"old": tmp_path / "none.json"}, "none.json: cannot be read"),
        ({"new": tmp_path / "broken.json"}, "broken.json: line 1"),
        ({"tables": "synthetic:23:5:small"}, "old.json: table"),
        (
            {"tables": "synthetic:25:5:small"},
            "old.json: slice: columns 0 to 128 exceed the 32 columns of table t01",
        ),
        ({"tables": "none.csv"}, "none.csv: does not exist"),
        ({"memory_gb": "1,1"}, "--memory-gb names 2 devices and"),
        ({"memory_gb": "0.001"}, "new.json: device"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"link_gb_s": 0.0}, "--link-gb-s must be more than 0"),
        ({"cost_model": tmp_path / "none"}, "holds no cost model"),
        ({"json": tmp_path}, "is a folder: name a file for --json"),
        ({"renumber": tmp_path}, "is a folder: name a file for --renumber"),
    ):
        with pytest.raises(UserError, match=re.escape(says)) as caught:
            diff_plans.main(replace(config, **changes))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    done = run("diff_plans.py", "old.json four.json --tables synthetic:9", tmp_path, code=2)
    assert done.stderr.splitlines()[-1].startswith("old.json: ")
