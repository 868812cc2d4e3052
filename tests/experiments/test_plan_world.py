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
from autoshard.experiments.explaining.world_report import World, WorldSizes, gain
from autoshard.experiments.plan_world import PlanWorldConfig
from autoshard.sharders import Policy, SharderContext, make_sharder, save_policy
from autoshard.workload import (
    Device,
    Link,
    Objective,
    PlanError,
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


def fits(devices: int, memory_bytes: float) -> bool:
    context = SharderContext(oracle_of())
    try:
        make_sharder("cost_fused_search", context).shard(task_of(devices, int(memory_bytes)))
    except PlanError:
        return False
    return True


def test_each_number_of_devices_has_the_plan_of_its_own(tmp_path: Path) -> None:
    """As a user runs it, with what is shipped and a price."""
    done = run(
        "plan_world.py",
        f"--tables {TABLES} --num-devices 4,1,2 --memory-gb 1 --link {LINK} --no-probe "
        "--objective operators --sharder cost_fused --device-hour 3.6 --json out.json "
        "--picture worlds.png",
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
        assert (world["memory_bytes"], world["full"]) == (fullest, pytest.approx(fullest / GB))
        assert world["samples_s"] == pytest.approx(speed)
        assert world["efficiency"] == pytest.approx(speed / number / first)
        assert world["price_of_million"] == pytest.approx(1e6 * number * 0.001 / speed)
        row = rf"^ +{number} +{found.expected_ms:.2f} .* {speed:,.0f} .*\({fullest / GB:.0%}\)"
        assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    assert (
        f"24 tables, batches of 1,024 samples, operators, all-to-alls over {Link.parse(LINK)}"
        in (" ".join(done.stdout.split()))
    )
    cheapest = min(told["worlds"], key=lambda world: world["price_of_million"])
    assert f"cheapest: {cheapest['num_devices']} devices, " in done.stdout
    assert (tmp_path / "worlds.png").read_bytes().startswith(b"\x89PNG")


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
    """The dense part counts, though operators alone are priced."""
    changed = replace(
        config, hardware="h100-80gb", probe=True, objective=None, link=None, num_devices="2,8,16",
        memory_gb="8", policy=Path("cpu"), sharder="cost_fused",
    )  # fmt: skip
    told, beside = outcome(changed), outcome(replace(changed, dense_ms=5))
    inside = "450 GB/s, 20 us"
    among = f"{inside} inside nodes of 8 devices, 50 GB/s, 20 us between them"
    links = [(world["link"], world["nodes"]) for world in told["worlds"]]
    assert links == [(inside, 1), (inside, 1), (among, 2)]
    added = [
        b["step_ms"] - a["step_ms"] for a, b in zip(told["worlds"], beside["worlds"], strict=True)
    ]
    assert added == pytest.approx([5, 5 / 4, 5 / 8])
    costly = [
        replace(measurement(Shard.of_tables([table])), hardware="cuda: NVIDIA H100 80GB HBM3 sm90")
        for table in load_tables(TABLES)
    ]  # as a CPU's core takes
    with MeasurementStore(config.store) as store:
        store.put(costly)
    for corrected, before in zip(outcome(changed)["worlds"], told["worlds"], strict=True):
        assert corrected["step_ms"] > 5 * before["step_ms"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"over {inside}, from 16 devices over {among}" in said
    assert said.count("does not know what training takes") == 3  # once for each command


def test_planning_can_be_limited(config: PlanWorldConfig) -> None:
    told = outcome(replace(config, seconds=0.3, picture=config.store.with_name("a.svg")))
    assert len(told["worlds"]) == 3
    assert "<svg" in config.store.with_name("a.svg").read_text()


def test_too_little_memory_names_the_least_that_fits(
    config: PlanWorldConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_of(1)
    size = sum(map(task.table_bytes, task.tables))
    little = size / 5.5 / GB
    told = outcome(replace(config, memory_gb=str(little), num_devices="2,8"))
    (lack,) = told["missing"]
    assert lack["num_devices"] == 2
    assert fits(2, lack["needed_bytes"])
    assert not fits(2, lack["needed_bytes"] / 1.02)
    least = told["least_devices"]
    assert 2 < least <= 8
    assert fits(least, little * GB)
    assert not fits(least - 1, little * GB)
    said = capsys.readouterr().out
    assert re.search(r"^ +2 +no plan +needs 0\.1$", said, re.MULTILINE)
    assert f"the least number of devices whose memory suffices: {least}" in said
    assert "there is a plan for one number of devices only" in said


def test_memory_that_is_needed_is_by_rows_and_with_constraints(
    config: PlanWorldConfig, tmp_path: Path
) -> None:
    """A table of four columns is larger than any device's memory."""
    rows = ["name,rows,dim,pooling_factor", "narrow,1000000,4,1.0"]
    (tmp_path / "tables.csv").write_text("\n".join([*rows, "other,1000,16,1.0"]))
    config = replace(config, tables=str(tmp_path / "tables.csv"), memory_gb="0.004")
    told = outcome(replace(config, num_devices="2,8"))
    size = 1e6 * (4 + 1) * 4  # with row-wise Adagrad's state
    (lack,) = told["missing"]
    assert size / 2 < lack["needed_bytes"] < 0.6 * size
    assert told["least_devices"] == 5
    (tmp_path / "rules.yaml").write_text("tables: {narrow: {ways: [table_wise, column_wise]}}")
    ruled = replace(config, num_devices="2", constraints=tmp_path / "rules.yaml")
    with pytest.raises(
        UserError, match=r"each of 2 has 4.096 MiB and needs (\d+\.\d+) MiB"
    ) as error:
        plan_world.main(ruled)
    needs = float(str(error.value).split("needs ")[1].split(" MiB")[0])
    assert size < needs * 2**20 < 1.1 * size


def test_no_plan_at_all_ends_with_one_line(config: PlanWorldConfig, tmp_path: Path) -> None:
    done = run(
        "plan_world.py",
        f"--tables {TABLES} --num-devices 1,2 --memory-gb 0.01 --link {LINK} --no-probe",
        tmp_path,
        code=2,
    )
    line = done.stderr.splitlines()[-1]  # after notes
    found = re.fullmatch(
        r"no number of devices has a plan: each of 2 has 10\.240 MiB and needs ([\d.]+) MiB: "
        r"add memory, or take (\d+) devices",
        line,
    )
    assert found is not None, line
    assert fits(2, float(found[1]) * 2**20)
    assert fits(int(found[2]), 0.01 * GB)
    assert not fits(int(found[2]) - 1, 0.01 * GB)


def test_constraints_of_which_one_number_has_no_plan(
    config: PlanWorldConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [table.name for table in load_tables(TABLES)[:3]]
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"groups: {{big: {names}}}\ntables: {{big: {{apart: true}}}}\n")
    config = replace(config, constraints=rules, num_devices="2,4")
    told = outcome(config)
    assert [world["num_devices"] for world in told["worlds"]] == [4]
    assert told["missing"][0]["needed_bytes"] is None
    assert told["least_devices"] is None
    assert "2 devices: the constraint 'big: apart' cannot be kept" in capsys.readouterr().out
    with pytest.raises(UserError, match="no plan for 2 devices: the constraint 'big: apart'"):
        plan_world.main(replace(config, num_devices="2"))


def test_the_knee_is_where_devices_bring_less_than_half() -> None:
    def worlds(**speeds: float) -> WorldSizes:
        made = [
            World(int(name[1:]), 1, 1000, 1e6 / speed, (1.0, 2.0), 0.0, 1, 0.5, None)
            for name, speed in speeds.items()
        ]
        return WorldSizes(made, [], None, "", None)

    assert worlds(n1=1, n2=1.6, n4=2.7, n8=3.5).knee.num_devices == 4
    assert worlds(n1=1, n2=1.5, n4=3).knee.num_devices == 4  # just half is enough
    assert worlds(n8=8, n16=7, n32=30).knee.num_devices == 32  # beyond a fall
    assert worlds(n8=8, n16=7, n32=12).knee.num_devices == 8
    found = worlds(n8=8, n16=7, n32=14)
    assert gain(found.worlds[0], found.worlds[2]) == pytest.approx(0.25)
    *_, line = found.parts()
    assert line == (
        "knee: 8 devices: each one added brings less than half of the throughput of one there (at "
        "most 25%, up to 32)"
    )
    *_, line = worlds(n1=1, n2=2).parts()
    assert str(line).startswith("knee: none up to 2 devices: ")


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
        ({"picture": Path("worlds.pdf")}, "name a file that ends in .png or .svg for --picture"),
        ({"json": Path("/proc/none/out.json")}, "cannot be written"),
        ({"hardware": "h100-80gb", "probe": True, "memory_gb": "96"}, "--memory-gb 96 is more"),
    ],
)
def test_bad_input(config: PlanWorldConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        plan_world.main(replace(config, **changes))
