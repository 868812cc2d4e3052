"""Sharders on the same tasks: what comes out, whether it adds up, what is said of bad input."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from commands import run

from benchmark import DeviceCost, MeasurementStore, PlanCost, price_plan
from cost_model import EstimatedCosts, load_model, save_model
from experiments import compare
from experiments.compare import CompareConfig
from experiments.comparing import Outcome, measured
from experiments.score_report import verdict
from experiments.scoring import score_all
from sharders import Policy, make_sharder, save_policy
from workload import Device, EmbeddingTable, ShardingPlan, ShardingTask, UserError
from workload.parts import part_of

TABLES = "synthetic:120:3:small"
SCORES = {
    "max_ms_mean", "max_ms", "balance_mean", "oom", "seconds_mean", "win_rate", "improvement",
    "improvement_low", "improvement_high", "gap",
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a cost model beside it, as training leaves them."""
    folder = tmp_path_factory.mktemp("compare") / "policy"
    save_policy(Policy.untrained(max_devices=3), folder)
    save_model(load_model("cpu"), folder / "cost_model")
    return folder


@pytest.fixture(scope="module")
def estimated(policy: Path) -> tuple[Path, str]:
    """Tight tasks, priced: the folder it ran in, and what it said."""
    folder = policy.parent / "estimated"
    folder.mkdir()
    done = run(
        "compare.py",
        f"--tables {TABLES} --num-tasks 6 --num-tables 12 --num-devices 3 --memory-fill 0.9 "
        f"--sharders dim,size,cost,autoshard --policy {policy} --json compare.json --out out",
        folder,
    )
    return folder, done.stdout


@pytest.fixture(scope="module")
def measured_run(policy: Path, cluster: object) -> tuple[Path, str]:
    """A few shards measured for real."""
    folder = policy.parent / "measured"
    folder.mkdir()
    done = run(
        "compare.py",
        f"--tables {TABLES} --num-tasks 2 --num-tables 10 --num-devices 2 --batch-size 128 "
        f"--sharders size,cost,autoshard_verified --verified 2 --policy {policy} --measure "
        "--json compare.json --out out",
        folder,
    )
    return folder, done.stdout


def figures_of(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return figures


def recomputed(folder: Path, name: str, number: int, oracle: Any) -> tuple[float, float] | None:
    """Maximum and balance of a plan that was written; None without."""
    file = folder / "out" / "plans" / name / f"{number}.json"
    if not file.exists():
        return None
    task = ShardingTask.load(folder / "out" / "tasks" / f"{number}.json")
    cost = price_plan(ShardingPlan.load(file), task, oracle)
    return cost.max_compute_ms, cost.balance


def assert_adds_up(folder: Path, oracle: Any) -> None:
    """Every figure follows from the plans and their costs."""
    figures = figures_of(folder)
    scores = figures["sharders"]
    count = figures["tasks"]
    columns = list(zip(*(score["max_ms"] for score in scores.values()), strict=True))
    least = [min(ms for ms in column if ms is not None) for column in columns]
    theirs = scores[figures["best_heuristic"]]["max_ms"]
    for name, score in scores.items():
        assert set(score) == SCORES
        costs = [recomputed(folder, name, number, oracle) for number in range(count)]
        found = [cost for cost in costs if cost is not None]
        assert [ms is None for ms in score["max_ms"]] == [cost is None for cost in costs]
        known = [ms for ms in score["max_ms"] if ms is not None]
        assert known == pytest.approx([ms for ms, _ in found])
        assert score["max_ms_mean"] == pytest.approx(sum(known) / len(known))
        assert score["balance_mean"] == pytest.approx(sum(b for _, b in found) / len(found))
        assert score["oom"] == count - len(known)
        wins = sum(ms == best for ms, best in zip(score["max_ms"], least, strict=True))
        assert score["win_rate"] == wins / count
        both = [(a, b) for a, b in zip(score["max_ms"], theirs, strict=True) if a and b]
        saved = 1 - sum(a for a, _ in both) / sum(b for _, b in both)
        assert score["improvement"] == pytest.approx(saved, abs=1e-9)
        assert score["improvement_low"] <= saved + 1e-9
        assert score["improvement_high"] >= saved - 1e-9
        assert score["seconds_mean"] > 0


def test_estimated_plans_add_up_and_are_said_to_be_estimated(
    estimated: tuple[Path, str], policy: Path
) -> None:
    folder, said = estimated
    figures = figures_of(folder)
    assert figures["measured"] is False
    assert "estimated, not measured" in said
    assert (figures["tasks"], figures["devices"], figures["tables"]) == (6, 3, 12)
    assert figures["cost_model"] == str(policy / "cost_model")
    model = load_model("cpu")
    assert figures["hardware"] == model.provenance.hardware
    assert_adds_up(folder, EstimatedCosts(model, 1024))
    assert figures["sharders"]["dim"]["oom"] > 0  # or nothing was tight
    assert figures["sharders"]["autoshard"]["oom"] == 0
    assert figures["sharders"]["autoshard"]["gap"] < figures["sharders"]["size"]["gap"]


def test_tasks_are_of_tables_that_nothing_learned_from(estimated: tuple[Path, str]) -> None:
    folder, _ = estimated
    tasks = [ShardingTask.load(folder / "out" / "tasks" / f"{n}.json") for n in range(6)]
    assert {part_of(table) for task in tasks for table in task.tables} == {"test"}
    assert len({frozenset(table.name for table in task.tables) for task in tasks}) == 6


def test_the_last_line_says_by_how_much(estimated: tuple[Path, str]) -> None:
    folder, said = estimated
    figures = figures_of(folder)
    found = re.match(
        r"the slowest device computes ([\d.]+)% less by autoshard than by (\w+), the best "
        r"heuristic \(estimated, not measured; 95 % interval ([\d.]+)% to ([\d.]+)%\)",
        said.splitlines()[-1],
    )
    assert found is not None, said
    assert found[2] == figures["best_heuristic"]
    score = figures["sharders"]["autoshard"]
    assert float(found[1]) == pytest.approx(100 * score["improvement"], abs=0.06)
    assert float(found[3]) == pytest.approx(100 * score["improvement_low"], abs=0.06)


def test_mlflow_holds_all_of_it(estimated: tuple[Path, str]) -> None:
    folder, _ = estimated
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("autoshard")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.tags["kind"] == "compare"
    assert found.data.params["num_tables"] == "12"
    score = figures_of(folder)["sharders"]["autoshard"]
    assert found.data.metrics["max_ms_mean/autoshard"] == pytest.approx(score["max_ms_mean"])
    assert found.data.metrics["oom/autoshard"] == 0

    def names(within: str | None = None) -> set[str]:
        return {entry.path for entry in client.list_artifacts(found.info.run_id, within)}

    assert names() == {"tasks", "plans", "pictures", "compare.json"}
    assert names("pictures") == {"pictures/max_ms.png", "pictures/best_plan.png"}
    assert len(names("plans/autoshard")) == 6


def test_measured_plans_add_up(measured_run: tuple[Path, str]) -> None:
    folder, said = measured_run
    figures = figures_of(folder)
    assert figures["measured"] is True
    assert "estimated" not in said.splitlines()[-1]
    model = load_model("cpu")
    with MeasurementStore(folder / "costs.db") as store:
        kept = store.measurements()
    quiet_ms = model.provenance.quiet_ms
    same = figures["hardware"] == model.provenance.hardware
    known = {
        m.shard.digest: (m.told_at(quiet_ms) if same else m).cost()
        for m in kept
        if m.settings.seed == 0
    }
    assert {m.settings.seed for m in kept} == {0, 1}  # those that judge, those that chose

    class Store:
        def costs(self, shards: Sequence[Any]) -> list[Any]:
            return [known[shard.digest] for shard in shards]

    assert_adds_up(folder, Store())


class Judge:
    """Keeps the order that plans were measured in."""

    def __init__(self) -> None:
        self.seen: list[list[ShardingPlan]] = []

    def costs(self, task: ShardingTask, plans: Sequence[ShardingPlan]) -> list[PlanCost | None]:
        self.seen.append(list(plans))
        return [None for _ in plans]


def test_each_task_begins_with_another_sharder(tables: tuple[EmbeddingTable, ...]) -> None:
    task = ShardingTask(tables[:9], Device.uniform(3, 2**40), 256)
    names = ("random", "dim", "size")
    plans = {name: make_sharder(name).shard(task) for name in names}
    outcomes = {name: [Outcome(0.1, plan)] * 4 for name, plan in plans.items()}
    outcomes["dim"][2] = Outcome(0.1)  # it has no plan for this one
    judge = Judge()
    measured(outcomes, [task] * 4, judge)  # type: ignore[arg-type]
    order = [[names[list(plans.values()).index(plan)] for plan in seen] for seen in judge.seen]
    assert order == [
        ["random", "dim", "size"],
        ["dim", "size", "random"],
        ["size", "random"],
        ["random", "dim", "size"],
    ]


def outcomes_of(*maxima: float | None) -> list[Outcome]:
    return [
        Outcome(0.5)
        if ms is None
        else Outcome(1.0, None, PlanCost((DeviceCost("d", 1, 1, ms, 0, 0, 0, 0),)))
        for ms in maxima
    ]


def test_scores_by_hand() -> None:
    scores, best = score_all(
        {
            "dim": outcomes_of(4.0, None, 2.0),
            "size": outcomes_of(5.0, 6.0, 3.0),
            "ours": outcomes_of(4.0, 3.0, None),
            "never": outcomes_of(None, None, None),
        },
        [4.0, 3.0, 2.0],
    )
    assert best == "size"  # dim is faster where it has a plan, and has one less
    assert list(scores) == ["dim", "ours", "size", "never"]
    ours, never = scores["ours"], scores["never"]
    assert (ours.max_ms_mean, ours.oom, ours.seconds_mean) == (3.5, 1, 1.0)
    assert ours.win_rate == pytest.approx(2 / 3)  # one of them is a tie
    assert scores["dim"].win_rate == pytest.approx(2 / 3)
    assert ours.improvement == pytest.approx(1 - 7 / 11)
    assert ours.improvement_low == pytest.approx(1 - 4 / 5)
    assert ours.improvement_high == pytest.approx(1 - 3 / 6)
    assert ours.gap == pytest.approx(0.0)
    assert scores["size"].improvement == 0
    assert (never.max_ms_mean, never.seconds_mean, never.improvement, never.gap) == (None,) * 4
    assert (never.oom, never.win_rate) == (3, 0)
    assert "36.4% less by ours than by size" in verdict(scores, best, "measured")


def test_without_a_heuristic_nothing_is_claimed() -> None:
    scores, best = score_all({"ours": outcomes_of(4.0), "never": outcomes_of(None)}, [4.0])
    assert best is None
    assert scores["ours"].improvement is None
    assert "no heuristic" in verdict(scores, best, "measured")
    scores, best = score_all({"dim": outcomes_of(4.0), "ours": outcomes_of(5.0)}, [4.0])
    assert "nothing beats the best heuristic, dim" in verdict(scores, best, "measured")
    scores, best = score_all({"dim": outcomes_of(None)}, [4.0])
    assert "no sharder found a plan" in verdict(scores, best, "measured")


def test_too_few_unseen_tables_are_told_of(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.main(
        CompareConfig(
            tables="synthetic:20:1:small",
            num_tasks=1,
            num_tables=20,
            num_devices=2,
            sharders="cost,cost",
            policy=policy,
            mlflow_uri=f"sqlite:///{tmp_path}/mlflow.db",
        )
    )
    said = capsys.readouterr().out
    assert said.count("note:") == 1
    assert "too few for tasks of 20: all 20 are used" in said
    assert "cost is best" in said


def test_bad_input_is_one_line_before_any_work(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.json").write_text('{"schema": "autoshard.cost_model"}')
    plain = CompareConfig(
        TABLES, num_tables=10, num_devices=3, policy=policy, sharders="size,autoshard"
    )
    here = {entry.name for entry in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    for changes, says in (
        ({"sharders": "size,best"}, "sharder 'best' is not one of round_robin, random"),
        ({"sharders": ""}, "sharder '' is not one of"),
        ({"sharders": "autoshard_verified"}, "measures its best plans: add --measure"),
        ({"tables": "none.csv"}, "none.csv: does not exist"),
        ({"num_devices": 0}, "--num-devices must be at least 1, got 0"),
        ({"num_devices": 4}, "the policy serves up to 3 devices, 4 are asked for"),
        ({"num_tasks": -1}, "--num-tasks must be at least 1, got -1"),
        ({"num_tables": 0}, "--num-tables must be at least 1"),
        ({"num_tables": 121}, "--num-tables 121 is more than the 120 tables"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"verified": 0}, "--verified must be at least 1"),
        ({"memory_fill": 0.0}, "--memory-fill must lie between 0 and 1, got 0.0"),
        ({"memory_fill": 1.1}, "--memory-fill must lie between 0 and 1"),
        ({"memory_fill": float("nan")}, "--memory-fill must lie between 0 and 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"policy": tmp_path}, "holds no policy"),
        ({"cost_model": tmp_path / "none"}, "none: holds no cost model"),
        ({"cost_model": tmp_path / "broken"}, "has version None of autoshard.cost_model"),
        ({"json": tmp_path}, "is a folder: name a file for --json"),
        ({"json": Path("/proc/none/x.json")}, "x.json: cannot be written"),
        ({"out": tmp_path / "a_file"}, "is a file: name a folder for --out"),
        ({"out": tmp_path / "a_file" / "out"}, "out: cannot be written"),
        ({"mlflow_uri": "nonsense://x"}, "MLflow cannot be used"),
        ({"measure": True, "store": tmp_path}, "is a folder"),
    ):
        with pytest.raises(UserError, match=re.escape(says)) as caught:
            compare.main(replace(plain, **changes))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert {entry.name for entry in tmp_path.iterdir()} == here
    done = run("compare.py", "--tables none.csv --sharders nobody", tmp_path, code=2)
    assert done.stderr.startswith("sharder 'nobody' is not one of")
    assert done.stderr.count("\n") == 1
