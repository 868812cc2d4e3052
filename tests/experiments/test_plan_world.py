"""The same tables on several numbers of devices: what is planned, and what is said of bad input."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run
from formula import measurement

from autoshard.benchmark import MeasurementStore
from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.experiments import plan_world
from autoshard.experiments.plan_world import PlanWorldConfig, World, gain, knee_of
from autoshard.sharders import Policy, SharderContext, make_sharder, save_policy
from autoshard.workload import (
    Device,
    Link,
    Objective,
    Shard,
    ShardingTask,
    UserError,
    load_tables,
)

GB = 2**30
TABLES = "synthetic:24:5:small"
LINK = "1GB/s,50us"


@pytest.fixture
def config(tmp_path: Path) -> PlanWorldConfig:
    """Two dozen tables on one, two and four devices."""
    save_policy(Policy.untrained(max_devices=8), tmp_path / "policy")
    return PlanWorldConfig(
        tables=TABLES, num_devices="4,1,2", memory_gb="1", link=LINK, policy=tmp_path / "policy",
        store=tmp_path / "costs.db", probe=False, objective="operators", json=tmp_path / "out.json",
    )  # fmt: skip


def task_of(devices: int, memory_bytes: int = GB, batch_size: int = 1024) -> ShardingTask:
    objective = Objective("operators", None if devices == 1 else Link.parse(LINK))
    return ShardingTask(
        load_tables(TABLES), Device.uniform(devices, memory_bytes), batch_size, objective=objective
    )


def oracle_of(batch_size: int = 1024) -> EstimatedCosts:
    return EstimatedCosts(load_model("cpu"), batch_size)


def outcome(config: PlanWorldConfig) -> dict[str, Any]:
    plan_world.main(config)
    assert config.json is not None
    told: dict[str, Any] = json.loads(config.json.read_text())
    return told


def test_each_number_of_devices_has_the_plan_of_its_own(tmp_path: Path) -> None:
    """As a user runs it, with what is shipped and a price."""
    done = run(
        "plan_world.py",
        f"--tables {TABLES} --num-devices 4,1,2 --memory-gb 1 --link {LINK} --no-probe "
        "--objective operators --sharder cost_fused --device-hour 3.6 --json out.json",
        tmp_path,
    )
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["schema"] == "autoshard.world_sizes"
    assert [world["num_devices"] for world in told["worlds"]] == [1, 2, 4]
    first = told["worlds"][0]["samples_s"]
    for world in told["worlds"]:
        number, oracle = world["num_devices"], oracle_of()
        task = task_of(number)
        plan = make_sharder("cost_fused", SharderContext(oracle)).shard(task)
        found, cost = StepPredictor(oracle, task).of(plan), oracle.plan_cost(plan, task)
        fullest = max(parts.total for parts in plan.device_memory(task))
        speed = 1024 / found.expected_ms * 1000
        assert world["step_ms"] == pytest.approx(found.expected_ms)
        assert world["interval_90_ms"] == pytest.approx(found.interval_ms)
        assert world["idle"] == pytest.approx(1 - cost.balance)
        assert world["full"] == pytest.approx(fullest / GB)
        assert world["samples_s"] == pytest.approx(speed)
        price = f"{1e6 * number * 0.001 / speed:,.3g}"
        row = (
            rf"^ +{number} +{found.expected_ms:.2f} .* {speed:,.0f} +{speed / number / first:.0%} "
        )
        row += rf".* {fullest / GB:.0%} +{price}$"
        assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    assert (
        "24 tables, batches of 1,024 samples, operators, all-to-alls from 2 devices on over "
        f"{Link.parse(LINK)}" in (" ".join(done.stdout.split()))
    )
    cheapest = min(told["worlds"], key=lambda world: world["num_devices"] / world["samples_s"])
    assert f"cheapest: {cheapest['num_devices']} devices" in done.stdout


def test_the_dense_part_is_in_proportion_to_a_rank_s_samples(config: PlanWorldConfig) -> None:
    config = replace(config, objective=None)
    without, beside = (outcome(replace(config, dense_ms=ms)) for ms in (None, 8.0))
    added = [
        b["step_ms"] - a["step_ms"]
        for a, b in zip(without["worlds"], beside["worlds"], strict=True)
    ]
    assert added == pytest.approx([8, 4, 2])
    for one, two in zip(without["worlds"], beside["worlds"], strict=True):
        assert one["idle"] * one["step_ms"] == pytest.approx(two["idle"] * two["step_ms"], rel=0.01)


def test_batches_grow_with_the_devices(config: PlanWorldConfig) -> None:
    told = outcome(replace(config, batch_per_device=512, dense_ms=8, objective=None))
    alike = outcome(replace(config, batch_size=2048, objective=None, num_devices="4"))
    assert [world["batch_size"] for world in told["worlds"]] == [512, 1024, 2048]
    assert told["worlds"][-1]["step_ms"] == pytest.approx(alike["worlds"][0]["step_ms"] + 8)


def test_on_gpus_by_their_data_sheet_links_differ(
    config: PlanWorldConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = replace(
        config, hardware="h100-80gb", probe=True, objective=None, link=None, num_devices="2,8,16",
        memory_gb="8", policy=Path("cpu"), sharder="cost_fused",
    )  # fmt: skip
    report, beside = outcome(changed), outcome(replace(changed, dense_ms=5))
    two, node, among = links = [
        "337.5 GB/s, 21 us, rings 382.5 GB/s, 35 us",
        "337.5 GB/s, 27 us, rings 382.5 GB/s, 35 us",
        "337.5 GB/s, 27 us, rings 382.5 GB/s, 35 us inside nodes of 8 devices, "
        "45 GB/s, 44 us, rings 45 GB/s, 60 us between them",
    ]
    assert [world["link"] for world in report["worlds"]] == links
    added = [
        b["step_ms"] - a["step_ms"] for a, b in zip(report["worlds"], beside["worlds"], strict=True)
    ]
    assert added == pytest.approx([5, 5 / 4, 5 / 8])
    costly = [
        replace(measurement(Shard.of_tables([table])), hardware="cuda: NVIDIA H100 80GB HBM3 sm90")
        for table in load_tables(TABLES)
    ]  # as a CPU's core takes
    with MeasurementStore(config.store) as store:
        store.put(costly)
    for corrected, before in zip(outcome(changed)["worlds"], report["worlds"], strict=True):
        assert corrected["step_ms"] > 5 * before["step_ms"]
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"from 2 devices on over {two}, from 8 devices on over {node}, "
        f"from 16 devices on over {among}" in said
    )
    assert "does not know what training takes" not in said


def test_planning_can_be_limited(config: PlanWorldConfig) -> None:
    assert len(outcome(replace(config, seconds=0.3))["worlds"]) == 3


def test_a_number_without_a_plan_says_why(
    config: PlanWorldConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [table.name for table in load_tables(TABLES)[:3]]
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"groups: {{big: {names}}}\ntables: {{big: {{apart: true}}}}\n")
    config = replace(config, constraints=rules, num_devices="2,4")
    told = outcome(config)
    assert [world["num_devices"] for world in told["worlds"]] == [4]
    assert list(told["missing"]) == ["2"]
    why = "no plan for 2 devices: the constraint 'big: apart' cannot be kept"
    assert why in capsys.readouterr().out


def test_no_plan_at_all_ends_with_one_line(tmp_path: Path) -> None:
    done = run(
        "plan_world.py",
        f"--tables {TABLES} --num-devices 1,2 --memory-gb 0.01 --link {LINK} --no-probe",
        tmp_path,
        code=2,
    )
    line = done.stderr.splitlines()[-1]  # after notes
    assert re.match(r"no plan for 2 devices, nor for fewer: .* MiB", line), line


def test_the_knee_is_where_devices_bring_less_than_half() -> None:
    def worlds(**speeds: float) -> list[World]:
        return [
            World(int(name[1:]), 1000, 1e6 / speed, (1.0, 2.0), 0.0, 0.5, None)
            for name, speed in speeds.items()
        ]

    assert knee_of(worlds(n1=1, n2=1.6, n4=2.7, n8=3.5)).num_devices == 4
    assert knee_of(worlds(n1=1, n2=1.5, n4=3)).num_devices == 4  # just half is enough
    assert knee_of(worlds(n8=8, n16=7, n32=30)).num_devices == 32  # beyond a fall
    assert knee_of(worlds(n8=8, n16=7, n32=12)).num_devices == 8
    first, _, last = worlds(n8=8, n16=7, n32=14)
    assert gain(first, last) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": ""}, "--num-devices must be whole numbers of at least 1"),
        ({"num_devices": "4,"}, "as in 8,16,32, got '4,'"),
        ({"num_devices": "0,4"}, "at least 1, separated by commas"),
        ({"num_devices": "2,-4"}, "at least 1, separated by commas"),
        ({"num_devices": "2.5"}, "got '2.5'"),
        ({"num_devices": "4,2,4"}, "--num-devices names 4 twice"),
        ({"num_devices": "2,16"}, "the policy serves up to 8 devices, 16 are requested"),
        ({"memory_gb": "0"}, "--memory-gb must be a number more than 0"),
        ({"memory_gb": "1,2"}, "--memory-gb names 2 devices and --num-devices 1"),
        ({"device_hour": 0.0}, "--device-hour must be more than 0"),
        ({"device_hour": -1.0}, "--device-hour must be more than 0"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"batch_per_device": 0}, "--batch-per-device must be at least 1"),
        ({"batch_size": 8, "batch_per_device": 8}, "exclude each other"),
        ({"link": None}, "all-to-alls of 4 devices have no price"),
        ({"dense_ms": 1.0}, "--dense-ms is a part of training"),
        ({"dense_ms": -1.0, "objective": "step"}, "--dense-ms must be at least 0"),
        ({"sharder": "autoshard_verified"}, "--sharder autoshard_verified measures"),
        ({"sharder": "best"}, "sharder 'best' is not one of"),
        ({"seconds": 0.0}, "--seconds must be more than 0"),
        ({"seconds": 1.0, "sharder": "dim"}, "--seconds is not supported by sharder dim"),
        ({"json": Path("/proc/none/out.json")}, "cannot be written"),
        ({"hardware": "h100-80gb", "probe": True, "memory_gb": "96"}, "--memory-gb 96 is more"),
    ],
)
def test_bad_input(config: PlanWorldConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        plan_world.main(replace(config, **changes))
