"""Sharding one's own tables: the plan, what is said of it, and what is said of bad input."""

import csv
import errno
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run
from formula import measurement

from autoshard.benchmark import MachineProbe, MeasurementStore, save_probe
from autoshard.benchmark.backends.cuda import CudaBackend
from autoshard.benchmark.machine.hardware import cpu_fingerprint
from autoshard.benchmark.probe.report import Passes, ProbedShard
from autoshard.benchmark.probe.shards import PROBE_SHARDS
from autoshard.cost_model import (
    EstimatedCosts,
    StepPredictor,
    load_model,
    save_model,
    slowest_by_phase,
)
from autoshard.cost_model.learning.probed_machine import on_machine
from autoshard.cost_model.models.checkpoint import OtherHardware
from autoshard.experiments import shard
from autoshard.experiments.console import cli, machine
from autoshard.experiments.evaluation.measured_plan import FIRST_SEED
from autoshard.experiments.shard import ShardConfig
from autoshard.sharders import Policy, make_sharder, next_steps, save_policy
from autoshard.sharders.explaining.summary import memory_parts
from autoshard.workload import (
    Device,
    Link,
    Objective,
    PlanError,
    Shard,
    ShardingPlan,
    ShardingTask,
    UserError,
    documents,
    load_tables,
)
from autoshard.workload.plans.moves import moved_bytes, moves_between
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.sizes import format_bytes

GB = 2**30


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy for few devices."""
    save_policy(Policy.untrained(max_devices=4), tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def config(tmp_path: Path, policy: Path) -> ShardConfig:
    """Two dozen tables on three devices."""
    return ShardConfig(
        "synthetic:24:5:small", 3, "1", out=tmp_path / "plan.json", policy=policy,
        store=tmp_path / "costs.db", probe=False, objective="operators",
    )  # fmt: skip


def task_of(config: ShardConfig, *memory_gb: float) -> ShardingTask:
    devices = tuple(Device(f"device{n}", int(gb * GB)) for n, gb in enumerate(memory_gb))
    return ShardingTask(load_tables(config.tables), devices, config.batch_size)


def test_a_user_s_own_tables_by_what_is_shipped(tmp_path: Path) -> None:
    """No Ray, no network, no options but what must be said: on devices of different sizes."""
    with open(tmp_path / "my.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["name", "rows", "dim", "pooling_factor"])
        rows.writerows(
            [f"mine{n}", 20_000 + 1000 * n, 16 * (1 + n % 4), 1 + n * n % 13] for n in range(12)
        )
    done = run(
        "shard.py",
        "--tables my.csv --num-devices 3 --memory-gb 0.025,0.025,0.05 --picture devices.png "
        "--no-probe",
        tmp_path,
        RAY_ADDRESS="127.0.0.1:1",  # where nothing answers: a command that tried would say so
    )
    config = ShardConfig(str(tmp_path / "my.csv"), 3, "")
    task = replace(task_of(config, 0.025, 0.025, 0.05), objective=Objective("step"))
    plan = ShardingPlan.load(tmp_path / "plan.json")
    plan.check(task)
    oracle = EstimatedCosts(
        load_model("cpu").for_objective(task.objective, len(task.devices)), 1024
    )
    cost = oracle.plan_cost(plan, task)
    for device in cost.devices:
        assert re.search(
            rf"{device.name} .* {device.tables} .* {device.total_ms:.2f} ", done.stdout
        )
    predictor = StepPredictor(oracle, task)
    ours = predictor.of(plan)
    assert f"expected, with uncertain costs: {ours.expected_ms:.2f} ms (step, " in done.stdout
    told = re.search(
        r"90% interval ([\d.]+) to ([\d.]+)\), .* less than by the best heuristic "
        r"\((\w+), ([\d.]+) ms\): ([\d.]+) to ([\d.]+) of it, faster with probability ([\d.]+)",
        done.stdout,
    )
    assert told is not None, done.stdout
    theirs = predictor.of(make_sharder(told[3]).shard(task))
    than = ours.over(theirs)
    expected = [*ours.interval_ms, theirs.expected_ms, than.low, than.high, than.probability]
    found = [float(told[number]) for number in (1, 2, 4, 5, 6, 7)]
    assert found == pytest.approx(expected, abs=0.006)
    assert "the plan is in plan.json" in done.stdout
    assert (tmp_path / "devices.png").read_bytes().startswith(b"\x89PNG")
    assert {entry.name for entry in tmp_path.iterdir()} == {"my.csv", "plan.json", "devices.png"}


def test_any_sharder_may_decide(config: ShardConfig, capsys: pytest.CaptureFixture[str]) -> None:
    for sharder in ("autoshard", "cost", "dim", "round_robin"):
        shard.main(replace(config, sharder=sharder))
        ShardingPlan.load(config.out).check(task_of(config, 1, 1, 1))
        assert f"{sharder}, estimated" in capsys.readouterr().out
    shard.main(replace(config, num_devices=1))
    assert "the least of any heuristic" in capsys.readouterr().out


def test_the_dense_part_adds_to_a_step_and_changes_no_plan(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    plans, steps = [], []
    for dense_ms in (None, 7.0):
        shard.main(replace(config, objective=None, dense_ms=dense_ms))
        said = " ".join(capsys.readouterr().out.split())
        plans.append(ShardingPlan.load(config.out))
        found = re.search(r"a step takes ([\d.]+) ms .* ([\d.]+) ms of it are the same", said)
        assert found is not None
        steps.append((float(found[1]), float(found[2])))
    assert plans[0] == plans[1]
    assert steps[1] == pytest.approx((steps[0][0] + 7, steps[0][1] + 7), abs=0.02)


def test_a_model_that_knows_no_training_prices_operators_and_says_so(
    config: ShardConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(replace(load_model("cpu"), overhead=None), tmp_path / "model")
    shard.main(replace(config, objective=None, cost_model=tmp_path / "model"))
    streams = capsys.readouterr()
    assert "plans are priced by --objective operators" in " ".join(
        (streams.err + streams.out).split()
    )
    assert "(operators, without all-to-alls" in " ".join(streams.out.split())


def test_what_counts_is_asked_for_and_said(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = replace(
        config, objective=None, link="100MB/s,50us", save_task=config.out.with_name("task.json")
    )
    shard.main(slow)
    said = " ".join(capsys.readouterr().out.split())
    task = ShardingTask.load(config.out.with_name("task.json"))
    assert task.objective == Objective("step", Link.parse("100MB/s,50us"))
    model, plan = (
        load_model("cpu").for_objective(task.objective, len(task.devices)),
        ShardingPlan.load(config.out),
    )
    oracle = EstimatedCosts(model, 1024)
    cost = oracle.plan_cost(plan, task)
    assert f"a step takes {cost.step_ms:.2f} ms (step, all-to-alls over 0.1 GB/s, 50 us" in said
    expected = StepPredictor(oracle, task).of(plan).expected_ms
    assert f"expected, with uncertain costs: {expected:.2f} ms (step, all-to-alls over" in said
    shard.main(replace(config, objective="compute"))
    assert f"{task.objective}" not in capsys.readouterr().out
    compute = StepPredictor(oracle, task).of(ShardingPlan.load(config.out))
    assert expected < compute.expected_ms  # whoever is asked for something else serves it less
    for changes, says in (
        ({"link": "fast"}, "or 25GB/s,30us,20GB/s,50us, got 'fast'"),
        (
            {"link": "1GB/s", "objective": "compute"},
            "which has no all-to-alls",
        ),
        ({"link": "1GB/s", "num_devices": 1}, "--link connects devices, and there is one"),
        ({"dense_ms": -1.0, "objective": "step"}, "--dense-ms must be at least 0, got -1"),
        ({"dense_ms": 5.0, "objective": "operators"}, "which --objective operators does not count"),
        ({"dense_ms": 5.0, "objective": "compute"}, "which --objective compute does not count"),
    ):
        with pytest.raises(UserError, match=says):
            shard.main(replace(config, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("dense_ms", [None, 2.0])
def test_a_pipelined_step_without_a_dense_part_says_what_is_assumed(
    config: ShardConfig, capsys: pytest.CaptureFixture[str], dense_ms: float | None
) -> None:
    shard.main(replace(config, sharder="dim", objective="pipelined", dense_ms=dense_ms))
    said = "note: --dense-ms is not given: the dense part is taken to last at least as long as"
    assert (said in capsys.readouterr().out) == (dense_ms is None)


def test_memory_is_told_part_by_part(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(replace(config, memory_gb="1,1,2"))
    task = task_of(config, 1, 1, 2)
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    parts = ShardingPlan.load(config.out).device_memory(task)
    for device, mine in zip(task.devices, parts, strict=True):
        assert mine.gradients == 0  # of copies, of which there are none: no column
        sizes = [*mine[:-1], device.memory_bytes - mine.total, device.memory_bytes]
        row = [device.name, *(f"{size / 1e6:,.1f}" for size in sizes)]
        assert [*row, f"{mine.total / device.memory_bytes:.1%}"] in told
    kept = replace(task, devices=tuple(replace(d, reserved_bytes=GB // 8) for d in task.devices))
    cli.show(memory_parts(ShardingPlan.load(config.out), kept))
    _, head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    column = head.index("reserve")
    assert [row[column] for row in rows] == [f"{GB / 8 / 1e6:,.1f}"] * 3
    for row, device, mine in zip(rows, task.devices, parts, strict=True):
        assert row[column + 1] == f"{(device.memory_bytes - GB / 8 - mine.total) / 1e6:,.1f}"


def test_a_plan_is_explained(config: ShardConfig, capsys: pytest.CaptureFixture[str]) -> None:
    shard.main(replace(config, sharder="dim", explain=True))
    made = capsys.readouterr().out
    task, oracle = task_of(config, 1, 1, 1), EstimatedCosts(load_model("cpu"), 1024)
    plan = ShardingPlan.load(config.out)
    for phase in slowest_by_phase(oracle, plan, task):
        named = [
            rf"{each.piece.table.name} +all {each.piece.width} +{each.ms:.2f} +{each.share:.1%}"
            for each in phase.pieces[:3]
            if each.ms >= 0.005
        ]
        sent = r"[\d,]+ of [\d,]+ sent " if phase.is_exchange else ""
        head = rf"{phase.phase}: device{phase.device} +{sent} *{phase.ms:.2f} +{phase.mean_ms:.2f}"
        assert re.search(r" *\n +".join([head, *named]), made), phase
        assert named or phase.is_exchange
    now = StepPredictor(oracle, task).expected_ms(plan.placed(task))
    assert f"in place of {now:.2f} ms" in made
    for step in next_steps(oracle, task, plan):
        assert f"  {step.expected_ms:.2f} ms ({step.expected_ms / now - 1:+.1%}): " in made
    assert re.search(r"compared with the best heuristic's plan, \w+ ", made)
    shares = re.search(r"(\d+) of 24 tables, (\d+)% of the cost, are on other devices", made)
    assert shares is not None
    assert 0 < int(shares[1]) <= 24
    assert 0 < int(shares[2]) <= 100
    named = re.findall(r"^   (\w+) +device\d+ +device\d+ +\d+ +([\d.]+)$", made, re.MULTILINE)
    costs = [float(ms) for _, ms in named]
    assert costs
    assert costs == sorted(costs, reverse=True)


def test_a_page_is_written_after_the_plan(
    config: ShardConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard.main(replace(config, sharder="dim", report=tmp_path / "plan.html"))
    *_, first, second = capsys.readouterr().out.splitlines()
    assert (first, second) == (
        f"the plan is in {config.out}", f"the report is in {tmp_path / 'plan.html'}",
    )  # fmt: skip
    assert "synthetic:24:5:small, sharded by dim" in (tmp_path / "plan.html").read_text()
    config.out.unlink()

    write_text = Path.write_text

    def full(path: Path, text: str, **options: str) -> int:
        if "new.html" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"new.html: the report cannot be written: No space left"):
        shard.main(replace(config, sharder="dim", report=tmp_path / "new.html"))
    ShardingPlan.load(config.out).check(task_of(config, 1, 1, 1))
    assert not (tmp_path / "new.html").exists()


def test_a_plan_file_is_priced_in_place_of_making_one(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(replace(config, explain=True))
    made = capsys.readouterr().out
    kept = config.out.with_name("kept.json")
    config.out.rename(kept)
    given = replace(config, plan=kept, explain=True)
    shard.main(given)
    read = capsys.readouterr().out
    assert "kept.json, estimated" in read
    assert made.splitlines()[1:-1] == read.splitlines()[1:]  # but who made it, and where it is
    assert not config.out.exists()
    plan = ShardingPlan.load(kept)
    other = kept.with_name("other.json")
    for changed, says in (
        (replace(plan, placements=plan.placements[1:]), "are nowhere"),
        (replace(plan, num_devices=4), "the plan is for 4 devices, the task has 3"),
    ):
        changed.save(other)
        with pytest.raises(UserError, match=f"{other.name}: .*{says}"):
            shard.main(replace(given, plan=other))
    with pytest.raises(UserError, match=r"kept.json: device . .* would hold .*weights .* more th"):
        shard.main(replace(given, memory_gb="0.001"))


def test_the_best_heuristic_s_plan_does_not_differ_from_itself(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(config)
    best = re.search(r"best heuristic \((\w+),", capsys.readouterr().out)
    assert best is not None
    shard.main(replace(config, sharder=best[1], explain=True))
    assert "  0 of 24 tables, 0% of the cost, are on other devices" in capsys.readouterr().out


def test_what_tells_most_is_measured_and_the_plan_itself(
    config: ShardConfig, cluster: object, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(
        config,
        tables="synthetic:8:5:small",
        num_devices=2,
        batch_size=128,
        measure=True,
        seconds=8.0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard.main(small)
    said = capsys.readouterr().out
    found = re.search(
        r"measured: a step takes ([\d.]+) ms \(95% CI ([\d.]+) to ([\d.]+) ms; objective", said
    )
    assert found is not None, said
    told, low, high = map(float, found.groups())
    assert low < told < high
    plan, model = ShardingPlan.load(config.out), load_model("cpu")
    with MeasurementStore(config.store) as store:
        kept = store.measurements()
    here = (model.provenance.hardware, model.provenance.versions)
    level = model.provenance.reference_level
    means = []
    for shard_ in plan.shards(task_of(small, 1, 1)):
        assert shard_ is not None
        mine = [m for m in kept if m.shard == shard_ and m.settings.seed >= FIRST_SEED]
        assert {m.settings.seed for m in mine} == {
            FIRST_SEED,
            FIRST_SEED + 2,
            FIRST_SEED + 4,
        }  # none that the plan was chosen by
        same = [m.normalized_to(level if (m.hardware, m.versions) == here else None) for m in mine]
        costs = [m.cost() for m in same]
        means.append((sum(c.forward_ms for c in costs) / 3, sum(c.backward_ms for c in costs) / 3))
    learned = [m for m in kept if m.settings.seed < FIRST_SEED]
    assert {m.settings.seed for m in learned} >= {1}
    assert any(len(m.shard) == 1 for m in learned)  # a table alone
    ratio = re.search(r"pred/meas ([\d.]+)", said)
    assert ratio is not None
    assert 0.5 < float(ratio[1]) < 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard.main(replace(small, measure=False))  # by what the store knows
    again = capsys.readouterr().out
    assert "autoshard, estimated" in again
    assert "measured" not in again
    # The slowest device forward, the slowest backward, and both all-to-alls between the two.
    task = task_of(small, 1, 1)
    objective = Objective(link=EstimatedCosts(model, small.batch_size).link(2))
    columns = np.array([shard_.total_dim for shard_ in plan.shards(task) if shard_ is not None])
    price = StepPrice.of(objective, small.batch_size, len(columns), columns.sum())
    exchange = float(price.exchange_stage(columns).max())
    slowest = sum(max(ms) for ms in zip(*means, strict=True))
    fastest = sum(min(ms) for ms in zip(*means, strict=True))
    assert fastest + exchange - 0.02 <= told <= slowest + exchange + 0.02


def test_strange_tables_and_batches_are_told_of_in_one_line(config: ShardConfig) -> None:
    tables = config.out.parent / "strange.json"
    wide = [
        {"name": f"w{n}", "rows": 5000 + n, "dim": 8192, "pooling_factor": 3.0} for n in range(9)
    ]
    usual = [table.to_json() for table in load_tables("synthetic:20:5:small")]
    tables.write_text(json.dumps([*usual, *wide]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard.main(replace(config, tables=str(tables), memory_gb="99", batch_size=20_000))
    others = (w for w in caught if not issubclass(w.category, OtherHardware))  # true or not here
    batches, strange = (str(warning.message) for warning in others)
    assert batches.startswith("the cost model learned from batches of 128, 256, ")
    assert re.match(r"\d+ of 29 tables, \d+% of the cost, are outside of .*; farthest is", strange)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", OtherHardware)
        shard.main(config)  # which has nothing strange


def test_a_plan_is_for_the_machine_of_a_probe(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine on which a distinct row takes long to update: backward passes cost more."""
    shards = [
        ProbedShard(name, Passes(1.0, 40.0 if of.batch_size == 4096 else 10.0))
        for name, of in PROBE_SHARDS.items()
    ]
    probe = MachineProbe("cpu: Some CPU 1.2, avx2, 8 MiB cache", "torch", shards=tuple(shards))
    file = config.out.with_name("probe.json")
    save_probe(probe, file)
    for_it = replace(config, probe=True, hardware=str(file))
    shard.main(for_it)
    said = " ".join(capsys.readouterr().out.split())
    line = f"planned for {probe.hardware} by 17 shards of its probe; of the 5 machines"
    assert line in said
    assert re.search(r"costs deviate by \d+%, 90% of them by less than \d+%", said)
    plan = ShardingPlan.load(config.out)
    task = task_of(config, 1, 1, 1)
    plan.check(task)
    model = on_machine(load_model("cpu"), probe)
    cost = EstimatedCosts(model, 1024).plan_cost(plan, task)
    assert f"{cost.devices[0].backward_ms:.2f}" in said
    assert cost.devices[0].backward_ms > 2 * cost.devices[0].forward_ms
    assert not config.store.exists()  # this machine was not probed
    save_probe(replace(probe, hardware="cuda: Some GPU"), file)
    with pytest.raises(UserError, match=r'probe.json: describes "cuda: Some GPU", but a device'):
        shard.main(for_it)
    with pytest.raises(
        UserError, match="--no-probe takes the cost model as it is: leave out --hardware"
    ):
        shard.main(replace(for_it, probe=False))


def test_this_machine_is_probed_once(
    config: ShardConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = replace(config, probe=True)
    model = load_model("cpu")
    assert model.machines is not None
    names = (f"cpu: CPU {n}.1, avx2, 8 MiB cache" for n in range(9))  # this machine is none of them
    trained_on = tuple(each._replace(hardware=next(names)) for each in model.machines.trained_on)
    elsewhere = replace(model.provenance, hardware=trained_on[0].hardware)
    machines = replace(model.machines, trained_on=trained_on)
    save_model(replace(model, provenance=elsewhere, machines=machines), tmp_path / "model")
    probed_at = set()
    for _ in range(2):
        shard.main(replace(here, cost_model=tmp_path / "model"))
        said = " ".join(capsys.readouterr().out.split())
        # A busy machine measures fewer of the 17 in the probe's time.
        here_by = rf"planned for {re.escape(cpu_fingerprint())} by \d+ shards of its probe"
        assert re.search(here_by, said)
        with MeasurementStore(config.store) as store:
            (probe,) = store.probes()
        assert probe.shards
        probed_at.add(probe.measured_at)
    assert len(probed_at) == 1


def test_memory_is_known_of_gpus_that_are_named(config: ShardConfig, tmp_path: Path) -> None:
    count, task = config.num_devices, tmp_path / "task"
    mixed = f"h100-80gb:1,a100-40gb:{count - 1}"
    for hardware, sizes in (("h100-80gb", [68.0] * count), (mixed, [68.0] + [34.0] * (count - 1))):
        shard.main(replace(config, memory_gb=None, hardware=hardware, probe=True, save_task=task))
        found = [device.memory_bytes / GB for device in ShardingTask.load(task).devices]
        assert found == pytest.approx(sizes)
    with pytest.raises(UserError, match="--memory-gb is missing: name the memory of a device"):
        shard.main(replace(config, memory_gb=None))


def test_a_plan_for_gpus_is_made_without_any(
    config: ShardConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, memory_gb="8")
    figures = {"memory_gb": 40, "memory_gb_s": 1000, "link_gb_s": 100, "network_gb_s": 10}
    sheet = tmp_path / "gpu.json"
    documents.write(sheet, {"schema": "autoshard.data_sheet", "version": 1, **figures})
    for hardware, says in (
        ("h100-80gb", "planned for NVIDIA H100 80GB HBM3 by its data sheet"),
        (f"My GPU={sheet}", "has no field 'gpus_per_node'"),
        ("h100", "--hardware h100 is no file, and none of the GPUs a100-40gb, "),
    ):
        if says.startswith("planned"):
            shard.main(replace(config, hardware=hardware, probe=True, save_task=tmp_path / "task"))
            said = " ".join(capsys.readouterr().out.split())
            assert says in said
            assert "over 337.5 GB/s, 22 us, rings 382.5 GB/s, 35 us; 90% interval" in said
            task = ShardingTask.load(tmp_path / "task")
            assert task.objective == Objective("operators", Link(337.5e9, 22e-6, 382.5e9, 35e-6))
            ShardingPlan.load(config.out).check(task)
            assert "reserve" in said
            assert min(device.reserved_bytes for device in task.devices) > GB
        else:
            with pytest.raises(UserError, match=re.escape(says)):
                shard.main(replace(config, hardware=hardware, probe=True))
    documents.write(
        sheet, {"schema": "autoshard.data_sheet", "version": 1, **figures, "gpus_per_node": 2}
    )
    own = replace(config, hardware=f"My GPU={sheet}", probe=True)
    shard.main(own)
    said = " ".join(capsys.readouterr().out.split())
    assert "over 9 GB/s, 41 us, rings 9 GB/s, 60 us" in said  # three devices are on two nodes
    for changes, wrong in (
        ({"memory_gb": "1"}, "device0 has 1.000 GiB, and training takes"),
        ({"memory_gb": "41"}, "--memory-gb 41 is more than My GPU has, which is at most 40"),
        ({"cost_model": tmp_path}, "and --cost-model names"),
        ({"devices": "cpu"}, "--devices cpu asks for CPUs: leave one out"),
        ({"hardware": None, "devices": "cuda"}, "the cost model knows CPUs only: name the GPU"),
    ):
        with pytest.raises(UserError, match=re.escape(wrong)):
            shard.main(replace(own, **changes))  # type: ignore[arg-type]


def test_a_machine_with_gpus_is_not_planned_for_as_a_cpu(
    config: ShardConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpu_is_here", lambda: True)
    with pytest.raises(UserError, match="plans are for GPUs, and the cost model knows CPUs only"):
        shard.main(config)
    shard.main(replace(config, devices="cpu"))
    assert config.out.exists()


@pytest.mark.skipif(CudaBackend().is_here(), reason="there is an NVIDIA GPU here")
def test_a_gpu_that_is_not_here_cannot_be_measured(config: ShardConfig) -> None:
    with pytest.raises(UserError, match=r"plans for --hardware .* would be measured on cpu: "):
        shard.main(replace(config, memory_gb="8", hardware="h100-80gb", probe=True, measure=True))


def test_a_store_of_other_hardware_is_left_alone_and_told_of(config: ShardConfig) -> None:
    with MeasurementStore(config.store) as store:
        store.put([measurement(Shard.of_tables(load_tables(config.tables)[:2]))])
    with pytest.warns(UserWarning, match="costs.db is not used: what it has is of other hardware"):
        shard.main(config)
    ShardingPlan.load(config.out).check(task_of(config, 1, 1, 1))


def test_measurements_of_such_a_gpu_correct_its_data_sheet(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, memory_gb="8", hardware="h100-80gb", probe=True)

    def step_ms() -> float:
        shard.main(config)
        said = " ".join(capsys.readouterr().out.split())
        found = re.search(r"with uncertain costs: ([\d.]+) ms", said)
        assert found, said
        return float(found[1])

    before = step_ms()
    kept = [
        replace(
            measurement(Shard.of_tables([table])),
            hardware="cuda: NVIDIA H100 80GB HBM3 sm90, 79 GiB",
        )
        for table in load_tables(config.tables)
    ]
    with MeasurementStore(config.store) as store:
        store.put(kept)
    assert step_ms() > 5 * before  # they cost what a CPU's core takes


def test_tables_that_do_not_fit(config: ShardConfig) -> None:
    for memory, says in (
        ("0.001", r"the tables need .* and the 3 devices have .* of memory are missing"),
        ("0.000001,0.000001,0.000001", "memory are missing"),
    ):
        with pytest.raises(PlanError, match=says):
            shard.main(replace(config, memory_gb=memory))
    assert not config.out.exists()


def test_bad_input_is_one_line_before_any_work(config: ShardConfig, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.json").write_text("{")
    (tmp_path / "a_file").write_text("x")
    here = {entry.name for entry in tmp_path.iterdir()}
    for changes, says in (
        ({"sharder": "best"}, "sharder 'best' is not one of round_robin, random"),
        ({"tables": "none.csv"}, "none.csv: does not exist"),
        ({"num_devices": 0}, "--num-devices must be at least 1, got 0"),
        ({"num_devices": 5}, "the policy serves up to 4 devices, 5 are requested"),
        ({"memory_gb": "-1"}, "--memory-gb must be a number more than 0"),
        ({"memory_gb": "0"}, "--memory-gb must be a number more than 0"),
        ({"memory_gb": "nan"}, "--memory-gb must be a number more than 0"),
        ({"memory_gb": "32GB"}, "got '32GB'"),
        ({"memory_gb": ""}, "got ''"),
        ({"memory_gb": "1,,1"}, "got '1,,1'"),
        ({"memory_gb": "1,2"}, "--memory-gb names 2 devices and --num-devices 3"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"seconds": 0.0}, "--seconds must be more than 0, got 0.0"),
        ({"policy": tmp_path}, "holds no policy"),
        ({"cost_model": tmp_path / "none"}, "none: holds no cost model"),
        ({"cost_model": tmp_path / "broken"}, "model.json: line 1, column 2"),
        ({"out": tmp_path}, "is a folder: name a file for --out"),
        ({"out": tmp_path / "a_file" / "plan.json"}, "plan.json: cannot be written"),
        ({"out": Path("/proc/none/plan.json")}, "plan.json: cannot be written"),
        ({"picture": tmp_path / "plan.txt"}, "name a file that ends in .png or .svg for --picture"),
        ({"report": tmp_path / "plan.txt"}, "name a file that ends in .html for --report"),
        ({"report": tmp_path}, "is a folder: name a file for --report"),
        ({"report": tmp_path / "a_file" / "plan.html"}, "plan.html: cannot be written"),
        ({"sharder": "autoshard_verified", "store": tmp_path}, "is a folder"),
        ({"plan": tmp_path / "none.json"}, "none.json: cannot be read"),
        ({"plan": tmp_path / "a_file"}, "a_file: line 1, column 1"),
        ({"plan": tmp_path / "a_file", "measure": True}, "leave out --sharder and --measure"),
        (
            {"sharder": "dim", "measure": True},
            "--measure corrects a cost model, which dim does not",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(says)) as caught:
            shard.main(replace(config, **changes))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert {entry.name for entry in tmp_path.iterdir()} == here
    done = run(
        "shard.py",
        "--tables synthetic:9:1:small --num-devices 2 --memory-gb 0.001 --policy policy",
        tmp_path,
        code=2,
    )
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert "memory are missing" in line


def test_a_plan_obeys_a_file_of_constraints(
    config: ShardConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "constraints.yaml"
    file.write_text(
        "groups: {pair: [t03, t07]}\n"
        "tables: {pair: {together: true, on: [2]}, 't1*': {not_on: device1}}\n"
        "devices: {all: {reserve: 0.9 GB}}\n"
    )
    shard.main(replace(config, constraints=file, save_task=tmp_path / "task.json"))
    plan = ShardingPlan.load(config.out)
    plan.check(ShardingTask.load(tmp_path / "task.json"))
    assert load_tables(str(tmp_path / "task.json")) == load_tables(config.tables)
    homes = {placement.table: placement.device for placement in plan.placements}
    assert homes["t03"] == homes["t07"] == 2
    assert all(p.device != 1 for p in plan.placements if p.table.startswith("t1"))
    task = task_of(config, 1, 1, 1)
    assert max(plan.device_bytes(task)) <= 0.1 * GB + 1
    assert "reserve" in capsys.readouterr().out
    file.write_text("tables: {t03: {pinned: 1, not_on: 1}}\n")
    for sharder in ("autoshard", "policy", "size"):
        with pytest.raises(UserError, match="'t03: pinned 1' and 't03: not_on 1' cannot be kept"):
            shard.main(replace(config, constraints=file, sharder=sharder))
    file.write_text("tables: {t99: {whole: true}}\n")
    with pytest.raises(UserError, match=r"constraints.yaml: tables: 't99' is no table"):
        shard.main(replace(config, constraints=file))


def test_a_plan_in_use_is_improved_within_what_may_move(
    config: ShardConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(replace(config, sharder="dim"))
    old = (tmp_path / "plan.json").rename(tmp_path / "old.json")
    shard.main(replace(config, start_plan=old, max_moved_gb=0.01))
    task = task_of(config, 1, 1, 1)
    before, after = ShardingPlan.load(old), ShardingPlan.load(config.out)
    moves = moves_between(before, after, task)
    assert 0 < moved_bytes(moves) <= 0.01 * GB
    assert f"near {old}: {len(moves)} moves" in " ".join(capsys.readouterr().out.split())
    fewer = replace(config, start_plan=old, max_moved_gb=0.0, num_devices=2)
    shard.main(fewer)
    after = ShardingPlan.load(config.out)
    moves = moves_between(before, after, task_of(config, 1, 1))
    assert {move.source for move in moves} == {2}
    said, size = " ".join(capsys.readouterr().out.split()), format_bytes(moved_bytes(moves))
    assert f"near {old}: {len(moves)} moves, {size} that have to move, and 0 bytes of at" in said
    assert "of the present one on 3 devices" in said
    with pytest.raises(UserError, match="has to move and needs"):
        shard.main(replace(fewer, memory_gb="0.05"))
    for wrong, says in (
        ({"start_plan": old}, "go together"),
        ({"start_plan": old, "max_moved_gb": -1.0}, "max_moved_gb|max-moved-gb"),
        ({"start_plan": old, "max_moved_gb": 1.0, "sharder": "dim"}, "leave out --sharder"),
        ({"start_plan": tmp_path / "none", "max_moved_gb": 1.0}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=says):
            shard.main(replace(config, **wrong))
