"""Sharders on the same tasks: what comes out, whether it adds up, what is said of bad input."""

import json
import math
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import mlflow
import numpy as np
import pytest
from commands import Watched, empty_mlflow, run
from rich.console import Console

from autoshard.benchmark import DeviceCost, MeasurementStore, PlanCost, price_plan
from autoshard.cost_model import EstimatedCosts, load_model, save_model
from autoshard.experiments import compare
from autoshard.experiments.compare import CompareConfig
from autoshard.experiments.evaluation.planners import Outcome, steps_of
from autoshard.experiments.evaluation.posterior import as_samples
from autoshard.experiments.evaluation.report import Score, score_all, score_tables, verdict
from autoshard.sharders import SHARDERS, Policy, save_policy
from autoshard.sharders.policy.network import PolicyNetwork, PolicyShape
from autoshard.workload import Objective, OperatorOptions, ShardingPlan, ShardingTask, UserError
from autoshard.workload.tables.parts import part_of

TABLES = "synthetic:120:3:small"
STEP = Objective("operators")
SCORES = {
    "step_ms_mean", "step_ms", "balance_mean", "oom", "seconds_mean", "measuring_seconds_mean",
    "win_rate", "ratio", "ratio_low", "ratio_high", "ratio_variance", "task_ratios", "improvement",
    "better_than_heuristic", "better_than_next", "promise", "gap",
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
        f"--no-probe --sharders dim,size,cost,autoshard --policy {policy} "
        "--objective operators --json compare.json --out out",
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
        f"--objective operators --no-probe --sharders size,cost,autoshard_verified "
        f"--policy {policy} --measure --precision 1000 --verify-seconds 8 "
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
    return cost.step_ms, cost.balance


def assert_adds_up(folder: Path, oracle: Any, slack: float = 1e-6) -> None:
    """Every figure follows from the plans and their costs.

    `slack`: by how much steps may be told off the sum of the largest costs, which reads high.
    """
    figures = figures_of(folder)
    scores = figures["sharders"]
    count = figures["tasks"]
    columns = list(zip(*(score["step_ms"] for score in scores.values()), strict=True))
    least = [min(ms for ms in column if ms is not None) for column in columns]
    theirs = scores[figures["best_heuristic"]]["step_ms"]
    for name, score in scores.items():
        assert set(score) == SCORES
        costs = [recomputed(folder, name, number, oracle) for number in range(count)]
        found = [cost for cost in costs if cost is not None]
        assert [ms is None for ms in score["step_ms"]] == [cost is None for cost in costs]
        known = [ms for ms in score["step_ms"] if ms is not None]
        for told, (largest, _) in zip(known, found, strict=True):
            assert told == pytest.approx(largest, rel=slack)
        assert score["step_ms_mean"] == pytest.approx(sum(known) / len(known))
        balances = [b * largest / told for told, (largest, b) in zip(known, found, strict=True)]
        assert score["balance_mean"] == pytest.approx(sum(balances) / len(balances))
        assert score["oom"] == count - len(known)
        wins = sum(
            ms == pytest.approx(best) for ms, best in zip(score["step_ms"], least, strict=True)
        )
        assert score["win_rate"] == wins / count
        pairs = zip(score["step_ms"], theirs, strict=True)
        ratios = [a / b if a and b else None for a, b in pairs]
        assert score["task_ratios"] == [r and pytest.approx(r) for r in ratios]
        ratio = geometric_mean(r for r in ratios if r)
        assert score["ratio"] == pytest.approx(ratio, abs=1e-9)
        assert score["improvement"] == pytest.approx(1 - ratio, abs=1e-9)
        middle = geometric_mean((score["ratio_low"], score["ratio_high"]))
        assert middle == pytest.approx(ratio, abs=1e-9)
        assert (score["ratio_high"] == score["ratio_low"]) == (name == figures["best_heuristic"])
        assert (score["better_than_heuristic"] is None) == (name == figures["best_heuristic"])
        assert score["seconds_mean"] > 0
    *sure, last = [score["better_than_next"] for score in scores.values()]
    assert last is None
    for name, chance in zip(scores, sure, strict=False):
        if scores[name]["oom"] == 0 and scores[name]["win_rate"] == 1:
            assert chance > 0.5


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
        r"autoshard: step time ([\d.]+)% lower than (\w+), the best heuristic \(95% CI "
        r"([\d.]+)% to ([\d.]+)%; objective operators, without all-to-alls; "
        r"estimated, not measured\)",
        said.splitlines()[-1],
    )
    assert found is not None, said
    assert found[2] == figures["best_heuristic"]
    score = figures["sharders"]["autoshard"]
    assert float(found[1]) == pytest.approx(100 * score["improvement"], abs=0.06)
    assert float(found[3]) == pytest.approx(100 * (1 - score["ratio_high"]), abs=0.06)
    assert float(found[4]) == pytest.approx(100 * (1 - score["ratio_low"]), abs=0.06)


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
    assert found.data.metrics["step_ms_mean/autoshard"] == pytest.approx(score["step_ms_mean"])
    assert found.data.metrics["oom/autoshard"] == 0
    of_tasks = client.get_metric_history(found.info.run_id, "task_ratio/autoshard")
    ratios = figures_of(folder)["sharders"]["autoshard"]["task_ratios"]
    assert [point.value for point in of_tasks] == [pytest.approx(r) for r in ratios if r]

    def names(within: str | None = None) -> set[str]:
        return {entry.path for entry in client.list_artifacts(found.info.run_id, within)}

    assert names() == {"tasks", "plans", "pictures", "compare.json"}
    assert names("pictures") == {"pictures/step_ms.png", "pictures/best_plan.png"}
    assert len(names("plans/autoshard")) == 6
    assert {f"plans/{number}.html" for number in range(6)} <= names("plans")
    steps = figures_of(folder)["sharders"]["autoshard"]["step_ms"]
    for number, ms in enumerate(steps):
        page = (folder / "out" / "plans" / f"{number}.html").read_text()
        found = json.loads(page.split('id="figures">')[1].split("</script>")[0])
        assert found["title"].startswith(f"Task {number}, sharded by ")
        assert found["step_ms"] <= ms * (1 + 1e-4)  # of the fastest plan
        assert found["others"][-1]["ratio"][0] < 1.01  # the best heuristic's


def test_measured_plans_add_up(measured_run: tuple[Path, str]) -> None:
    folder, said = measured_run
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (logged,) = client.search_runs(["1"])
    assert len(logged.inputs.dataset_inputs) == 2  # tables, and measurements
    figures = figures_of(folder)
    assert figures["measured"] is True
    assert "estimated" not in said.splitlines()[-1]
    model = load_model("cpu")
    with MeasurementStore(folder / "costs.db") as store:
        kept = store.measurements()
    here = (model.provenance.hardware, model.provenance.versions)
    level = model.provenance.reference_level
    judged = {
        m.shard.digest: m.normalized_to(level if (m.hardware, m.versions) == here else None).cost()
        for m in kept
        if m.settings.seed % 2 == 0
    }
    # Once with one batch is enough for so coarse a precision; what chose had batches of its own.
    assert {m.settings.seed for m in kept} == {0, 1}

    class Store:
        def costs(self, shards: Sequence[Any], hardware: Sequence[str] = ()) -> list[Any]:
            return [judged[shard.digest] for shard in shards]

    assert_adds_up(folder, Store(), slack=0.1)
    assert figures["ended"] == "all intervals are within +-100000.0%"
    assert f"({figures['tasks']} tasks, {figures['visits']} measurements in " in said
    assert figures["visits"] == len(judged)
    assert 0 < figures["measuring_seconds"] < figures["seconds"]
    verified = figures["sharders"]["autoshard_verified"]
    assert verified["measuring_seconds_mean"] > 0
    assert figures["sharders"]["cost"]["measuring_seconds_mean"] == 0
    tasks = [ShardingTask.load(folder / "out" / "tasks" / f"{n}.json") for n in range(2)]
    promised = [
        recomputed(folder, "cost", number, EstimatedCosts(model, 128)) for number in range(2)
    ]
    assert len(tasks) == figures["tasks"]
    score = figures["sharders"]["cost"]
    predicted = geometric_mean(found[0] for found in promised if found is not None)
    assert score["promise"] == pytest.approx(predicted / geometric_mean(score["step_ms"]))


def outcomes_of(*maxima: float | None) -> list[Outcome]:
    return [
        Outcome(None, 0.5)
        if ms is None
        else Outcome(PLAN, 1.0, 0.5, PlanCost((DeviceCost("d", 1, 1, ms, 0, 0, 0, 0),), STEP))
        for ms in maxima
    ]


PLAN = ShardingPlan((), 1)


def scored(
    outcomes: dict[str, list[Outcome]], bounds_ms: Sequence[float], **promised: Sequence[float]
) -> tuple[dict[str, Score], str | None]:
    steps = {name: as_samples(some) for name, some in steps_of(outcomes).items()}
    return score_all(outcomes, steps, bounds_ms, promised)


def test_training_judges_what_a_step_takes(measured_run: tuple[Path, str]) -> None:
    """A plan that two have made is trained once, so they are told apart by nothing."""
    folder, _ = measured_run
    shutil.copytree(folder / "out" / "tasks", folder / "more")
    first = ShardingTask.load(folder / "more" / "0.json")
    replace(first, devices=first.devices[:2]).save(folder / "more" / "2.json")
    done = run(
        "compare.py",
        "--tasks more --plans same=out/plans/size --sharders size,cost,torchrec_default "
        f"--judge training --no-probe --seconds 1 --policy {folder.parent / 'policy'} "
        "--json trained.json",
        folder,
    )
    figures = json.loads((folder / "trained.json").read_text())
    assert (figures["trained"], figures["measured"], figures["tasks"]) == (True, False, 3)
    scores = figures["sharders"]
    assert set(scores) == {"size", "cost", "same", "torchrec_default"}
    same = scores.pop("same")
    assert same["step_ms"] == [*scores["size"]["step_ms"][:2], None]  # it has no plan for two
    assert same["ratio"] == 1
    for score in scores.values():
        assert all(ms > 0 for ms in score["step_ms"])
        assert score["promise"] is None  # a cost model does not speak of steps
    low, high = scores["cost"]["ratio_low"], scores["cost"]["ratio_high"]
    assert low < scores["cost"]["ratio"] < high
    said = " ".join(done.stdout.split())
    assert "training step time (objective " in said
    assert "; with TorchRec)" in said
    assert "3/3 tasks trained" in said


def test_scores_by_hand() -> None:
    scores, best = scored(
        {
            "dim": outcomes_of(4.0 * (1 + 1e-9), None, 2.0),
            "size": outcomes_of(5.0, 6.0, 3.0),
            "ours": outcomes_of(4.0, 3.0, None),
            "never": outcomes_of(None, None, None),
        },
        [4.0, 3.0, 2.0],
        ours=[2.0, 1.5, 9.0],
    )
    assert best == "size"  # dim is faster where it has a plan, and has one less
    assert list(scores) == ["dim", "ours", "size", "never"]
    ours, never = scores["ours"], scores["never"]
    assert (ours.step_ms_mean, ours.oom) == (3.5, 1)
    assert (ours.seconds_mean, ours.measuring_seconds_mean) == (1.0, 0.5)
    assert ours.win_rate == pytest.approx(2 / 3)  # one of them is a tie, but for rounding
    assert scores["dim"].win_rate == pytest.approx(2 / 3)
    assert ours.ratio == pytest.approx(0.4**0.5)
    assert ours.task_ratios == (0.8, 0.5, None)
    assert ours.promise == pytest.approx(0.5)
    assert scores["dim"].promise is None
    # By hand: both logs deviate by half of that of 1.6, and Student's t is 12.7.
    deviation = math.log(1.6) / 2
    assert ours.ratio_high == pytest.approx(0.4**0.5 * math.exp(12.706 * deviation), rel=1e-3)
    assert ours.ratio_variance == {"measuring": 0, "tasks": pytest.approx(deviation**2)}
    assert ours.improvement == pytest.approx(1 - 0.4**0.5)
    assert ours.gap == pytest.approx(0.0)
    assert scores["size"].improvement == 0
    assert (never.step_ms_mean, never.seconds_mean, never.improvement, never.gap) == (None,) * 4
    assert (never.oom, never.win_rate) == (3, 0)
    said = verdict(scores, best, "measured")
    assert "ours: step time not significantly different from size" in said


def test_no_head_of_a_table_is_cut() -> None:
    """With all columns, and names of sharders and tasks that are as long as ours."""
    some = {
        "size_lookup": outcomes_of(123.0, 456.0, 5000.0),
        "autoshard_verified": outcomes_of(100.0, None, 3000.0),
    }
    scores, best = scored(some, [], autoshard_verified=[99.0, 5.0, 3000.0])
    assert (scores["autoshard_verified"].oom, best) == (1, "size_lookup")
    printed = StringIO()
    names = [f"hot4-7{number}-of-a-long-name" for number in range(3)]
    shown = score_tables(scores, best, "measured", "step", names)
    Console(file=printed, width=80, force_terminal=False).print(*shown)
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in printed.getvalue()
    for heads in (
        [
            "sharder",
            "ms",
            "bal.",
            "oom",
            "ratio",
            "95% CI",
            "P",
            "P next",
            "pred",
            "plan s",
            "meas s",
        ],
        ["sharder", "least", "task", "largest", "task"],
    ):
        assert any(re.split(r"\s+", line.strip()) == " ".join(heads).split() for line in lines)
    assert "0.600 hot4-72" in printed.getvalue()


def test_one_measured_task_has_the_interval_of_its_noise() -> None:
    bar = outcomes_of(10.0)
    noise = 0.01 * np.random.default_rng(0).standard_normal((1000, 1))
    steps = {"dim": np.full((1000, 1), 10.0), "ours": 9 * (1 + noise)}
    scores, best = score_all({"dim": bar, "ours": outcomes_of(9.0)}, steps, [], {})
    said = verdict(scores, best, "measured")
    assert said.startswith("ours: step time 10.0% lower than dim, the best heuristic (95% CI 8.")
    assert said.endswith("% on this task alone; measured)")


def test_a_gain_is_told_where_it_is_larger_than_its_interval() -> None:
    bar = [5.0, 6.0, 5.5, 5.0]
    clear = {"size": outcomes_of(*bar), "ours": outcomes_of(*(0.9 * ms + 0.01 for ms in bar))}
    scores, best = scored(clear, bar)
    said = verdict(scores, best, "measured")
    assert said.startswith("ours: step time 9.8% lower than size, the best")
    assert "significant" not in said
    close = {**clear, "like": outcomes_of(*(ms + 0.3 * (-1) ** n for n, ms in enumerate(bar)))}
    close["also"] = outcomes_of(*(0.9 * ms + 0.02 * (-1) ** n for n, ms in enumerate(bar)))
    scores, best = scored(close, bar)
    assert list(scores)[:2] == ["also", "ours"]
    said = verdict(scores, best, "measured")
    assert said.endswith("; the difference from ours is not significant")
    del close["ours"], close["also"]
    close["like"][0] = outcomes_of(4.0)[0]
    scores, best = scored(close, bar)
    said = verdict(scores, best, "measured")
    assert "like: step time not significantly different from size" in said


def test_without_a_heuristic_nothing_is_claimed() -> None:
    scores, best = scored({"ours": outcomes_of(4.0), "never": outcomes_of(None)}, [4.0])
    assert best is None
    assert scores["ours"].improvement is None
    assert "no heuristic" in verdict(scores, best, "measured")
    scores, best = scored({"dim": outcomes_of(4.0), "ours": outcomes_of(5.0)}, [4.0])
    assert "no sharder beats dim, the best heuristic" in verdict(scores, best, "measured")
    scores, best = scored({"dim": outcomes_of(4.0), "ours": outcomes_of(2.0)}, [4.0])
    assert (scores["ours"].ratio_low, scores["ours"].ratio_variance) == (None, None)
    assert verdict(scores, best, "measured") == (
        "ours: step time not significantly different from dim, the best heuristic (ratio 0.500, "
        "one task; measured)"
    )
    scores, best = scored({"dim": outcomes_of(None)}, [4.0])
    assert "no sharder found a plan" in verdict(scores, best, "measured")


def test_tasks_and_plans_from_elsewhere(
    estimated: tuple[Path, str], policy: Path, tmp_path: Path
) -> None:
    """What one run has saved is compared by another, as if it came from another planner."""
    folder, _ = estimated
    saved = tmp_path / "saved"
    compare.main(
        CompareConfig(
            TABLES, probe=False, num_tasks=6, num_tables=12, num_devices=3, memory_fill=0.9,
            sharders="dim", policy=policy, save_tasks=saved, objective="operators",
            mlflow_uri=f"sqlite:///{folder / 'mlflow.db'}",
        )
    )  # fmt: skip
    for number in range(6):
        there = (folder / "out" / "tasks" / f"{number}.json").read_text()
        assert (saved / f"{number}.json").read_text() == there
    theirs = tmp_path / "theirs"
    shutil.copytree(folder / "out" / "plans" / "autoshard", theirs)
    (theirs / "5.json").unlink()
    again = CompareConfig(
        probe=False, tasks=saved, sharders="dim,size", policy=policy, json=tmp_path / "again.json",
        plans=(f"theirs={theirs}", f"size2={folder / 'out' / 'plans' / 'size'}"),
        out=tmp_path / "out", mlflow_uri=f"sqlite:///{folder / 'mlflow.db'}",
    )  # fmt: skip
    compare.main(again)
    figures = json.loads((tmp_path / "again.json").read_text())
    first = figures_of(folder)["sharders"]
    scores = figures["sharders"]
    assert (figures["tasks"], figures["devices"], figures["tables"]) == (6, 3, 12)
    # What is priced beside other tables, or in another order, may differ in its last bits.
    for name, steps_ms in (
        ("size", first["size"]["step_ms"]),
        ("size2", first["size"]["step_ms"]),
        ("theirs", [*first["autoshard"]["step_ms"][:5], None]),
    ):
        near = [None if ms is None else pytest.approx(ms, rel=1e-6) for ms in steps_ms]
        assert scores[name]["step_ms"] == near
    assert scores["theirs"]["oom"] == 1
    assert scores["theirs"]["seconds_mean"] is None
    assert scores["dim"]["seconds_mean"] > 0
    assert len(list((tmp_path / "out" / "plans" / "theirs").iterdir())) == 5


def test_further_policies_stand_beside_ours(policy: Path, tmp_path: Path) -> None:
    """Each by its own name makes the plan that it makes as `policy`."""
    whole = Policy(PolicyNetwork(PolicyShape(sharpness=0, kinds=())), max_devices=3)
    save_policy(whole, tmp_path / "whole")
    common = CompareConfig(
        TABLES, probe=False, num_tasks=3, num_tables=12, num_devices=3, sharders="dim,policy",
        policy=policy, mlflow_uri=empty_mlflow(tmp_path / "mlflow.db"),
    )  # fmt: skip
    named = f"same={policy},dreamshard={tmp_path / 'whole'}"
    compare.main(replace(common, policies=named, out=tmp_path / "both"))
    compare.main(replace(common, policy=tmp_path / "whole", out=tmp_path / "alone"))
    both, alone = (figures_of(tmp_path / name) for name in ("both", "alone"))
    assert set(both["sharders"]) == {"dim", "policy", "same", "dreamshard"}
    steps_ms = {name: score["step_ms"] for name, score in both["sharders"].items()}
    assert steps_ms["same"] == pytest.approx(steps_ms["policy"], rel=1e-6)
    of_whole = pytest.approx(alone["sharders"]["policy"]["step_ms"], rel=1e-6)
    assert steps_ms["dreamshard"] == of_whole != steps_ms["same"]
    assert both["policies"] == {"same": str(policy), "dreamshard": str(tmp_path / "whole")}
    assert len(list((tmp_path / "both" / "plans" / "dreamshard").iterdir())) == 3


def test_bad_tasks_and_plans_are_one_line(
    estimated: tuple[Path, str], policy: Path, tmp_path: Path
) -> None:
    out = estimated[0] / "out"
    plain = CompareConfig(probe=False, tasks=out / "tasks", sharders="size", policy=policy)
    tasks, plans = tmp_path / "tasks", tmp_path / "plans"
    for broken in ("schema", "batch", "other", "nothing"):
        shutil.copytree(out / "tasks", tmp_path / f"tasks_{broken}")
    (tmp_path / "tasks_schema" / "3.json").write_text("{}")
    task = ShardingTask.load(tasks_batch := tmp_path / "tasks_batch" / "3.json")
    replace(task, batch_size=512).save(tasks_batch)
    for file in (tmp_path / "tasks_other").iterdir():
        replace(ShardingTask.load(file), batch_size=512).save(file)
    for file in (tmp_path / "tasks_nothing").iterdir():
        file.unlink()
    half = OperatorOptions(weights="fp16")
    shutil.copytree(out / "tasks", tmp_path / "tasks_fp16")
    for file in (tmp_path / "tasks_fp16").iterdir():
        replace(ShardingTask.load(file), operator=half).save(file)
    for broken in ("json", "fit", "none"):
        shutil.copytree(out / "plans" / "size", plans / broken)
    (plans / "json" / "1.json").write_text("[")
    shutil.copy(plans / "fit" / "0.json", plans / "fit" / "1.json")
    for file in (plans / "none").iterdir():
        file.rename(file.with_suffix(".plan"))
    here = sorted(tmp_path.rglob("*"))
    for changes, says in (
        ({"tables": TABLES}, "name tables to draw tasks from with --tables, or a folder with"),
        ({"tasks": None}, "name tables to draw tasks from with --tables, or a folder with"),
        ({"family": "small"}, "or a family of tasks with --family"),
        ({"tasks": tasks}, "tasks: is no folder of tasks, as --save-tasks writes them"),
        ({"tasks": tmp_path / "tasks_nothing"}, "tasks_nothing: holds no tasks"),
        ({"tasks": tmp_path / "tasks_schema"}, "3.json: is not a document of schema"),
        ({"tasks": tmp_path / "tasks_batch"}, "3.json: its batch size is "),
        ({"tasks": tmp_path / "tasks_fp16"}, "tasks_fp16: the task's weights is fp16, the oracle"),
        ({"save_tasks": out / "tasks"}, "holds tasks already: name another folder"),
        ({"save_tasks": out / "tasks" / "0.json"}, "is a file: name a folder for --save-tasks"),
        ({"plans": ("x",)}, "--plans must be NAME=FOLDER, got 'x'"),
        ({"plans": ("=x",)}, "--plans must be NAME=FOLDER"),
        ({"plans": ("a/b=x",)}, "--plans must be NAME=FOLDER"),
        ({"plans": ("size=x",)}, "'size' is taken: choose another name"),
        ({"plans": ("dim=x",)}, "'dim' is taken: choose another name"),
        ({"plans": (f"x={plans / 'json'}",) * 2}, "'x' is taken: choose another name"),
        ({"plans": (f"x={plans / 'nowhere'}",)}, "nowhere: holds a plan for none of the tasks"),
        ({"plans": (f"x={plans / 'none'}",)}, "none: holds a plan for none of the tasks"),
        ({"plans": (f"x={plans / 'json'}",)}, "json/1.json: line 1, column 2"),
        ({"plans": (f"x={plans / 'fit'}",)}, "fit/1.json: table"),
        ({"plans": ("x=y",), "tasks": None, "tables": TABLES}, "--plans needs the tasks of"),
        ({"objective": "step"}, "define what counts: leave out --objective and --link"),
        ({"link": "25GB/s"}, "define what counts: leave out --objective and --link"),
    ):
        with pytest.raises(UserError, match=re.escape(says)) as caught:
            compare.main(replace(plain, **changes))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == here


def test_interrupted_it_says_where_measurements_are(
    cluster: object, policy: Path, tmp_path: Path
) -> None:
    """And goes on from them: what was measured is not measured again."""
    options = (
        f"--tables {TABLES} --num-tasks 2 --num-tables 4 --num-devices 2 --batch-size 128 "
        f"--no-probe --sharders size,dim --policy {policy} --measure --precision 0.0001 "
        "--seconds 10000"
    )
    first = Watched("compare.py", options, tmp_path)
    first.wait_for("2/2 tasks measured")
    first.process.send_signal(signal.SIGINT)
    said = first.end(code=130)
    assert "interrupted: what was measured is in costs.db; run again to continue" in said
    with MeasurementStore(tmp_path / "costs.db") as store:
        kept = len(store)
    assert kept >= 4
    second = Watched("compare.py", options.replace("0.0001", "1000"), tmp_path)
    assert "(2 tasks, 0 measurements in " in second.end()


def test_too_few_unseen_tables_are_told_of(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.main(
        CompareConfig(
            tables="synthetic:20:1:small",
            num_tasks=1,
            probe=False,
            num_tables=20,
            num_devices=2,
            sharders="cost,cost",
            policy=policy,
            mlflow_uri=empty_mlflow(tmp_path / "mlflow.db"),
        )
    )
    said = capsys.readouterr().out
    assert said.count("note:") == 1
    assert "too few for tasks of 20: all 20 are used" in said
    assert "cost is best" in said


def test_all_sharders_that_can_run_here_are_compared(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.sharders.ANNEAL_SECONDS", 1.0)  # instead of a minute
    compare.main(
        CompareConfig(
            tables=TABLES,
            num_tasks=1,
            probe=False,
            num_tables=6,
            num_devices=2,
            sharders="all",
            policy=policy,
            out=tmp_path / "out",
            mlflow_uri=empty_mlflow(tmp_path / "mlflow.db"),
        )
    )
    found = set(figures_of(tmp_path / "out")["sharders"])
    names = {name for name, spec in SHARDERS.items() if "pool" not in spec.needs}
    assert found == names | {"torchrec_all"}


def test_bad_input_is_one_line_before_any_work(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.json").write_text('{"schema": "autoshard.cost_model"}')
    plain = CompareConfig(
        TABLES, probe=False, num_tables=10, num_devices=3, policy=policy, sharders="size,autoshard"
    )
    here = {entry.name for entry in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    for changes, says in (
        ({"sharders": "size,best"}, "sharder 'best' is not one of round_robin, random"),
        ({"sharders": ""}, "sharder '' is not one of"),
        ({"sharders": "size,all"}, "--sharders all names all sharders: leave out the others"),
        ({"sharders": "autoshard_verified"}, "measures while it plans: add --measure"),
        ({"sharders": "size,torchrec_default"}, "compare it with --judge training"),
        ({"judge": "training", "measure": True}, "--measure excludes --judge training"),
        ({"tables": "none.csv"}, "none.csv: does not exist"),
        ({"family": "giants"}, "name tables to draw tasks from with --tables"),
        ({"tables": None, "family": "giant"}, "--family: 'giant' is not one of small, large"),
        ({"num_devices": 0}, "--num-devices must be at least 1, got 0"),
        ({"num_devices": 4}, "the policy serves up to 3 devices, 4 are requested"),
        ({"link": "fast"}, "or 25GB/s,30us or 25GB/s,30us,20GB/s,50us, got 'fast'"),
        (
            {"link": "25GB/s", "objective": "compute"},
            "which has no all-to-alls",
        ),
        ({"link": "25GB/s", "num_devices": 1}, "--link connects devices, and there is one"),
        ({"num_tasks": -1}, "--num-tasks must be at least 1, got -1"),
        ({"num_tables": 0}, "--num-tables must be at least 1"),
        ({"num_tables": 121}, "--num-tables 121 is more than the 120 tables"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"memory_fill": 0.0}, "--memory-fill must lie between 0 and 1, got 0.0"),
        ({"memory_fill": 1.1}, "--memory-fill must lie between 0 and 1"),
        ({"memory_fill": float("nan")}, "--memory-fill must lie between 0 and 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"seeds": 0}, "--seeds must be at least 1, got 0"),
        ({"precision": 0.0}, "--precision must be more than 0, got 0.0"),
        ({"seconds": float("nan")}, "--seconds must be more than 0, got nan"),
        ({"verify_seconds": -1.0}, "--verify-seconds must be more than 0, got -1.0"),
        ({"policy": tmp_path}, "holds no policy"),
        ({"policies": "mine"}, "--policies must be NAME=FOLDER, got 'mine'"),
        ({"policies": f"mine={policy},"}, "--policies must be NAME=FOLDER, got ''"),
        ({"policies": f"policy={policy}"}, "'policy' is taken: choose another name"),
        ({"policies": f"a={policy},a={policy}"}, "'a' is taken: choose another name"),
        ({"policies": f"mine={tmp_path}"}, "holds no policy"),
        ({"policies": f"a={policy}", "num_devices": 4}, "the policy serves up to 3 devices"),
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
    done = run("compare.py", "--tables none.csv --sharders nobody", tmp_path, code=2, apart=True)
    assert done.stderr.startswith("sharder 'nobody' is not one of")
    assert done.stderr.count("\n") == 1


def test_tasks_of_a_family_are_compared(policy: Path, tmp_path: Path) -> None:
    answer = tmp_path / "c.json"
    compare.main(
        CompareConfig(
            family="directions:tight",
            num_tasks=2,
            probe=False,
            sharders="dim,cost_fused",
            policy=policy,
            cost_model=Path("cpu"),
            out=tmp_path / "out",
            json=answer,
            mlflow_uri=empty_mlflow(tmp_path / "mlflow.db"),
        )
    )
    told = json.loads(answer.read_text())
    assert (told["tasks"], told["tables"], told["devices"]) == (2, 40, 8)
    assert told["memory_fill"] is None
    task = ShardingTask.load(tmp_path / "out" / "tasks" / "0.json")
    assert all(table.name.startswith("directions:") for table in task.tables)
