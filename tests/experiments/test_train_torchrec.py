"""Training by a plan from the command line: what is told, and how it ends when it cannot go on."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from commands import PATIENCE, Watched, actors, kill_actors, run

from autoshard.experiments.train_torchrec import TrainTorchRecConfig, main
from autoshard.sharders import make_sharder
from autoshard.workload import Device, ShardingPlan, ShardingTask, UserError, load_tables

TABLES = "synthetic:6:5:small"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Six tables on two devices."""
    task = ShardingTask(load_tables(TABLES), Device.uniform(2, 2**32), 64)
    make_sharder("dim").shard(task).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ("--steps 12 --at-once", "median of 12"),
        ("--steps 21", "mean of 3 rounds, composed of ranks that took turns"),
        ("--steps 21 --pipelined", "mean of 3 rounds, composed of ranks that took turns"),
    ],
)
def test_what_a_step_takes_phase_by_phase(
    options: str, how: str, plan: Path, cluster: object
) -> None:
    done = run(
        "train_torchrec.py",
        f"--tables {TABLES} --plan plan.json --batch-size 64 {options} --json times.json "
        "--devices cpu",
        plan.parent,
    )
    told = re.search(
        rf"plan.json: ([\d.]+) ms a step \({how}; 95 % interval ([\d.]+) to ([\d.]+)\)",
        " ".join(done.stdout.split()),
    )
    assert told is not None, done.stdout
    step, low, high = map(float, told.groups())
    assert low <= step <= high
    document = json.loads((plan.parent / "times.json").read_text())
    assert document["step_ms"] == pytest.approx(step, abs=0.01)
    assert document["in_turns"] == ("turns" in how)
    tables = [len({p.table for p in ShardingPlan.load(plan).placements if p.device == n})
              for n in range(2)]  # fmt: skip
    assert [rank["tables"] for rank in document["ranks"]] == tables
    for number, rank in enumerate(document["ranks"]):
        assert len(rank["phases_ms"]) == len(rank["waits_ms"]) == len(document["phases"])
        assert re.search(rf"^ {number} cpu\d+ +{tables[number]} ", done.stdout, re.MULTILINE)
    assert f"loss: {document['losses'][0]:.4f} in the first step" in done.stdout
    none_are_left()


def endless_training(plan: Path) -> Watched:
    """One that is under way."""
    command = Watched(
        "train_torchrec.py",
        f"--tables {TABLES} --plan {plan} --batch-size 64 --steps 10000000 --devices cpu",
        plan.parent,
    )
    command.wait_for("training 6 tables on")
    return command


def test_a_rank_that_dies_ends_all_in_one_line(plan: Path, cluster: object) -> None:
    command = endless_training(plan)
    assert kill_actors("RehearsalRank", most=1) == 1
    said = command.end(code=2)
    assert re.search(r"^rank \d \(cpu\d+@.*\) died, killed or out of memory, and the others were "
                     r"ended: .*$", said, re.MULTILINE)  # fmt: skip
    assert "Traceback" not in said
    none_are_left()


def test_ctrl_c_ends_the_ranks(plan: Path, cluster: object) -> None:
    command = endless_training(plan)
    command.process.send_signal(signal.SIGINT)
    assert "interrupted" in command.end(code=130)
    none_are_left()


def none_are_left() -> None:
    deadline = time.monotonic() + PATIENCE
    while actors("RehearsalRank"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_plan_for_other_tables(plan: Path) -> None:
    others = TrainTorchRecConfig("synthetic:5:5:small", plan)
    with pytest.raises(UserError, match=r"plan.json: table .* of the plan is not among the 5 tabl"):
        main(others)
    more = TrainTorchRecConfig("synthetic:9:5:small", plan)
    with pytest.raises(UserError, match=r"plan.json: "):
        main(more)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "name a plan with --plan, or let TorchRec plan with --planner"),
        ("--plan plan.json --planner torchrec", "name a plan with --plan, or let"),
        ("--planner torchrec", "--num-devices goes with --planner"),
        ("--planner dim --num-devices 2", "--planner dim: is not TorchRec's: name torchrec"),
        (
            "--planner torchrec_wide --num-devices 2",
            "torchrec_ comes all, or some of columns",
        ),
        ("--plan plan.json --num-devices 2", "--num-devices goes with --planner"),
        ("--planner torchrec --num-devices 0", "--num-devices must be at least 1, got 0"),
        ("--plan plan.json --steps 0", "--steps must be at least 1, got 0"),
        ("--plan plan.json --json .", "is a folder: name a file for --json"),
        ("--plan nowhere.json", "nowhere.json: cannot be read"),
    ],
)
def test_bad_options_end_in_one_line(plan: Path, options: str, said: str) -> None:
    done = run("train_torchrec.py", f"--tables {TABLES} {options}", plan.parent, code=2)
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_ranks_cannot_do_ends_in_one_line(plan: Path, cluster: object) -> None:
    odd = f"--tables {TABLES} --plan plan.json --batch-size 65 --devices cpu"
    said = run("train_torchrec.py", odd, plan.parent, code=2).stderr
    assert "65 samples cannot be split evenly among 2 ranks: take 64" in said
    gpus = f"--tables {TABLES} --plan plan.json --batch-size 64 --devices cuda"
    said = run("train_torchrec.py", gpus, plan.parent, code=2).stderr
    assert "2 ranks need a GPU each, and the cluster has 0" in said


def test_torchrec_plans_by_itself(tmp_path: Path, cluster: object) -> None:
    done = run(
        "train_torchrec.py",
        f"--tables {TABLES} --planner torchrec_columns --num-devices 2 --batch-size 64 "
        "--steps 3 --devices cpu",
        tmp_path,
    )
    assert "torchrec_columns: " in done.stdout
