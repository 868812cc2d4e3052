"""Sweeps as a user runs them: real trials in Ray actors, real PPO, a real store."""

import json
import math
import re
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
from commands import run
from mlflow import MlflowClient
from ray.tune import ExperimentAnalysis, Tuner
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from autoshard.experiments.sweeps.config import TuneShardConfig
from autoshard.experiments.sweeps.mlflow_trials import MLflowTrials
from autoshard.experiments.sweeps.search_space import (
    command_line,
    default_point,
    hyperparameters,
    search_space,
    within,
)
from autoshard.experiments.sweeps.tuning import make_scheduler, make_search
from autoshard.experiments.tune_shard import main, trainable_of
from autoshard.sharders import load_policy
from autoshard.workload import UserError

TINY = (
    "--tables synthetic:80:1:small --num-tables 6 --num-devices 2 --num-envs 8 --check-tasks 2 "
    "--check-every 2 --batch-size 512 --memory-fill 0.1-0.6 --max-iterations 4"
)
SPACE = search_space(population_based=False)


def runs_of(folder: Path, kind: str) -> list[Any]:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("autoshard")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], f"tags.kind = '{kind}'"))


@pytest.fixture(scope="module")
def swept(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    options = "--num-samples 3 --storage sweep --json sweep.json"
    done = run("tune_shard.py", f"{TINY} {options}", folder)
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_a_sweep_has_a_winner_that_serves(swept: Path) -> None:
    told = json.loads((swept / "sweep.json").read_text())
    assert [trial["status"] for trial in told["trials"]] == ["finished"] * 3
    assert told["best"]["score"] == min(trial["score"] for trial in told["trials"])
    assert told["overhead"] == pytest.approx(
        told["seconds"] * told["at_once"] / told["train_seconds"]
    )
    assert default_point(SPACE) in [trial["values"] for trial in told["trials"]]
    assert {"test/winner", "test/defaults", "test/size"} <= told["test"].keys()
    policy = load_policy(swept / "sweep" / "winner")
    hyper = hyperparameters(told["best"]["values"])
    assert policy.network.shape == hyper.shape
    assert policy.trained["hyper"]["learning_rate"] == hyper.learning_rate
    options = "--tables synthetic:80:1:small --num-devices 2 --memory-gb 1 --out plan.json"
    run("shard.py", f"{options} --policy sweep/winner", swept)
    shutil.copytree(swept / "sweep" / "winner", swept / "more")
    done = run("ppo_shard.py", "--resume --out more --iterations 5 --json more.json", swept)
    assert "resuming after iteration 4" in done.stdout
    assert json.loads((swept / "more.json").read_text())["iterations"] == 5


def test_trials_are_runs_under_the_sweeps(swept: Path) -> None:
    told = json.loads((swept / "sweep.json").read_text())
    client = MlflowClient(f"sqlite:///{swept}/mlflow.db")
    (sweep,) = runs_of(swept, "tune_shard")
    assert sweep.info.run_id == told["mlflow_run"]
    assert sweep.info.status == "FINISHED"
    assert sweep.data.metrics["score"] == pytest.approx(told["best"]["score"])
    trials = {trial["mlflow_run"]: trial for trial in told["trials"]}
    found = runs_of(swept, "trial")
    assert {trial.info.run_id for trial in found} == trials.keys()
    for trial in found:
        assert trial.data.tags["mlflow.parentRunId"] == sweep.info.run_id
        assert trial.info.status == "FINISHED"
        values = trials[trial.info.run_id]["values"]
        logged = {name: float(trial.data.params[name]) for name in values}
        assert logged == pytest.approx(values)
        assert trial.data.params["num_tables"] == "6"
        curve = client.get_metric_history(trial.info.run_id, "episodes/step_over_bound")
        assert [point.step for point in curve] == [1, 2, 3, 4]
        policy = {item.path for item in client.list_artifacts(trial.info.run_id, "policy")}
        assert {"policy/policy.json", "policy/policy.safetensors", "policy/cost_model"} <= policy
        assert client.list_artifacts(trial.info.run_id, "checkpoint")
    pictures = {item.path for item in client.list_artifacts(sweep.info.run_id)}
    assert "plans" in pictures
    version = client.get_model_version_by_alias("autoshard-policy", "winner")
    assert version.run_id == sweep.info.run_id
    assert version.tags["num_devices"] == "2"
    assert version.tags["trial"] == told["best"]["trial_id"]


def test_a_sweep_is_not_replaced_unasked(swept: Path) -> None:
    done = run("tune_shard.py", f"{TINY} --storage sweep", swept, code=2)
    assert "sweep: holds a sweep: continue with --resume, replace it with --force" in done.stderr


def test_a_finished_sweep_that_is_resumed_trains_nothing(swept: Path) -> None:
    before = json.loads((swept / "sweep.json").read_text())
    run("tune_shard.py", "--resume --storage sweep --json again.json", swept)
    assert json.loads((swept / "again.json").read_text()) == before
    versions = MlflowClient(f"sqlite:///{swept}/mlflow.db").search_model_versions()
    assert [version.version for version in versions] == [1]


def test_tunes_users_open_a_sweep(swept: Path) -> None:
    document = json.loads((swept / "sweep.json").read_text())
    trials = str(swept / "sweep" / "trials")
    scores = sorted(trial["score"] for trial in document["trials"])
    assert sorted(ExperimentAnalysis(trials).results_df["score"]) == pytest.approx(scores)
    results = Tuner.restore(trials, trainable_of(str(swept / "sweep"))).get_results()
    assert results.get_best_result().metrics["score"] == document["best"]["score"]


def test_what_mattered_in_a_sweep(swept: Path) -> None:
    """Only the learning rate does."""
    search = make_search(TuneShardConfig(num_samples=40), SPACE)
    points = [search.suggest(str(n)) for n in range(40)]  # type: ignore[union-attr]
    scores = [4 + math.log10(point["learning_rate"]) for point in points]
    document = json.loads((swept / "sweep" / "sweep.json").read_text())
    document["result"]["trials"] = [
        {"values": point, "score": score, "status": "finished"}
        for point, score in zip(points, scores, strict=True)
    ]
    document["result"]["trials"].append({"values": {}, "score": None, "status": "failed"})
    (swept / "many").mkdir()
    (swept / "many" / "sweep.json").write_text(json.dumps(document))
    done = run("analyze_sweep.py", "--storage many --out pictures --json mattered.json", swept)
    assert re.search(r"40 trials:\n.*\n *learning_rate +0\.[6-9]", done.stdout)
    found = json.loads((swept / "mattered.json").read_text())["hyperparameters"]
    assert found.keys() == SPACE.keys()
    low, high = found["learning_rate"]["interval"]
    assert 0.5 < low <= high <= 1
    (sweep,) = runs_of(swept, "tune_shard")
    value = found["learning_rate"]["importance"]
    assert sweep.data.metrics["importance/learning_rate"] == pytest.approx(value)
    client = MlflowClient(f"sqlite:///{swept}/mlflow.db")
    logged = {item.path for item in client.list_artifacts(sweep.info.run_id, "importance")}
    assert logged == {"importance/importance.png", "importance/slices.png"}


def test_a_sweep_without_enough_trials_is_not_analyzed(swept: Path) -> None:
    done = run("analyze_sweep.py", "--storage sweep", swept, code=2)
    assert re.search(r"3 finished trials, \d different scores: importances need 10", done.stderr)
    document = json.loads((swept / "sweep" / "sweep.json").read_text())
    (swept / "unfinished").mkdir()
    (swept / "unfinished" / "sweep.json").write_text(json.dumps({**document, "result": None}))
    done = run("analyze_sweep.py", "--storage unfinished", swept, code=2)
    assert "the sweep is not finished: continue with tune_shard.py --resume" in done.stderr
    assert not (swept / "sweep-analysis").exists()


def test_population_based_training_measures_on_the_one_pool(
    cluster: object, tmp_path: Path
) -> None:
    # Trials measure as precisely as for users, so of half as many games.
    options = (
        "--num-samples 2 --scheduler pbt --reward measured --num-envs 4 --storage sweep "
        "--json sweep.json"
    )
    run("tune_shard.py", f"{TINY} {options}", tmp_path)
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert told["finished"] == 2
    for trial in told["trials"]:
        assert within(SPACE, dict(trial["values"])) == trial["values"]
    found = runs_of(tmp_path, "trial")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    curves = [client.get_metric_history(trial.info.run_id, "measured/shards") for trial in found]
    asked = sum(point.value for curve in curves for point in curve)
    database = sqlite3.connect(tmp_path / "sweep" / "costs.db")
    count, last = database.execute("SELECT COUNT(*), MAX(id) FROM measurements").fetchone()
    assert 10 < count < asked  # trials asked for shards that others had measured
    assert last == count  # a shard that is measured again gets another number
    assert all("hyper/learning_rate" in trial.data.metrics for trial in found)
    (sweep,) = runs_of(tmp_path, "tune_shard")
    inputs = {item.dataset.name for item in sweep.inputs.dataset_inputs}
    assert inputs == {"synthetic:80:1:small", "costs.db"}


def test_step_against_memory_and_planning_has_a_front(cluster: object, tmp_path: Path) -> None:
    options = "--objectives memory,step,planning --num-samples 4 --storage sweep --json sweep.json"
    done = run("tune_shard.py", f"{TINY} --max-iterations 2 {options}", tmp_path)
    told = json.loads((tmp_path / "sweep.json").read_text())
    trials = {trial["mlflow_run"]: trial for trial in told["trials"]}
    values = {run: tuple(trial["objectives"].values()) for run, trial in trials.items()}
    for trial in told["trials"]:
        assert [*trial["objectives"]] == ["memory", "step", "planning"]
        assert trial["objectives"]["step"] == trial["score"]
        assert trial["objectives"]["memory"] > 0
        assert trial["objectives"]["planning"] > 0

    def is_best(own: tuple[float, ...]) -> bool:
        others = set(values.values()) - {own}
        return not any(all(a <= b for a, b in zip(o, own, strict=True)) for o in others)

    assert {values[run] for run in told["front"]} == set(filter(is_best, values.values()))
    assert told["front"][0] == told["best"]["mlflow_run"]
    assert f"{len(told['front'])} trials are on the Pareto front" in done.stdout
    (sweep,) = runs_of(tmp_path, "tune_shard")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    picture = client.download_artifacts(sweep.info.run_id, "front/front.png", str(tmp_path))
    assert matplotlib.image.imread(picture).size > 0
    for trial in runs_of(tmp_path, "trial"):
        logged = trial.data.metrics["check/memory_mb"]
        assert logged == pytest.approx(trials[trial.info.run_id]["objectives"]["memory"])
    done = run("analyze_sweep.py", "--storage sweep", tmp_path, code=2)
    shown = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(" ")]
    assert shown[shown.index("run") + 1 :] == told["front"]
    assert "4 finished trials" in done.stderr  # too few for importances


def test_pb2_changes_numbers_of_worse_trials(cluster: object, tmp_path: Path) -> None:
    options = "--num-samples 4 --scheduler pb2 --reward estimated --storage sweep --json sweep.json"
    run("tune_shard.py", f"{TINY} --max-iterations 6 {options}", tmp_path)
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert told["finished"] == 4
    for trial in told["trials"]:
        assert within(SPACE, dict(trial["values"])) == trial["values"]
    client, name = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db"), "hyper/learning_rate"
    rates = [client.get_metric_history(t.info.run_id, name) for t in runs_of(tmp_path, "trial")]
    assert any(len({point.value for point in curve}) > 1 for curve in rates)


def test_the_defaults_are_points_of_the_space() -> None:
    hyper = hyperparameters(default_point(SPACE))
    config = TuneShardConfig()
    assert hyper.shape == config.training().hyper.shape
    assert replace(hyper, entropy=0.0) == config.training().hyper  # its scale has no zero
    for name, domain in SPACE.items():
        assert domain.is_valid(default_point(SPACE)[name])


def test_a_point_is_a_command_line() -> None:
    point = {"learning_rate": 0.01, "sharpness": 50, "gae_lambda": 0.9}
    assert command_line(point) == [
        "--hyper.learning-rate", "0.01", "--hyper.shape.sharpness", "50",
        "--hyper.gae-lambda", "0.9",
    ]  # fmt: skip


def test_the_search_draws_within_the_space_and_first_the_defaults() -> None:
    search = make_search(TuneShardConfig(num_samples=31), SPACE)
    assert isinstance(search, OptunaSearch)
    drawn = [search.suggest(f"t{n}") for n in range(30)]
    assert drawn[0] == default_point(SPACE)
    for point in drawn:
        assert within(SPACE, dict(point)) == point
    # A trial that a kill has left unknown to it: it goes on without.
    search.on_trial_result("unknown", {"score": 1.0, "training_iteration": 1})
    search.on_trial_complete("unknown", {"score": 1.0})
    assert search.suggest("one more") == Searcher.FINISHED  # it counts


def test_what_asha_has_decided_survives_a_resume() -> None:
    """Its rungs: which scores were seen at which iteration."""
    before = make_scheduler(TuneShardConfig(max_iterations=9, check_every=1), SPACE)
    assert isinstance(before, ASHAScheduler)
    before.set_search_properties("score", "min")
    for number in range(6):
        trial = SimpleNamespace(trial_id=f"t{number}")
        before.on_trial_add(None, trial)  # type: ignore[arg-type]
        before.on_trial_result(None, trial, {"iteration": 1, "score": number})  # type: ignore[arg-type]
    after = make_scheduler(TuneShardConfig(max_iterations=9, check_every=1), SPACE)
    state = MLflowTrials(None, before).get_state()  # type: ignore[arg-type]
    assert state is not None
    MLflowTrials(None, after).set_state(state)  # type: ignore[arg-type]
    newcomer = SimpleNamespace(trial_id="new")
    after.on_trial_add(None, newcomer)  # type: ignore[arg-type]
    bad = after.on_trial_result(None, newcomer, {"iteration": 1, "score": 5})  # type: ignore[arg-type]
    assert bad == "STOP"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_samples": 0}, "--num-samples must be at least 1"),
        ({"at_once": 0}, "--at-once must be at least 1"),
        ({"seed": -1}, "--seed must lie between 0 and 4294967295, got -1"),
        ({"seed": 2**32}, "--seed must lie between 0 and 4294967295"),
        ({"scheduler": "pbt", "search": "optuna"}, "--scheduler pbt changes hyperparameters"),
        ({"scheduler": "pb2", "search": "optuna"}, "--scheduler pb2 changes hyperparameters"),
        ({"objectives": "step,memory", "scheduler": "asha"}, "--scheduler asha compares trials by"),
        ({"objectives": "step,planning", "scheduler": "pbt"}, "--scheduler pbt compares trials by"),
        ({"objectives": "step,time"}, "--objectives step,time: name step, and memory, planning or"),
        ({"objectives": "memory,planning"}, "--objectives memory,planning: name step, and"),
        ({"objectives": "step,step"}, "--objectives step,step: name step, and"),
        ({"tables": "nothing.csv"}, "nothing.csv"),
        ({"num_tables": "many"}, "--num-tables: a whole number or a range"),
        ({"resume": True, "storage": "nothing"}, "nothing: holds no sweep: name"),
        ({"json": Path("full")}, "full: is a folder: name a file for --json"),
        ({"cost_model": "nowhere"}, "nowhere: holds no cost model"),
        ({"storage": "s4://x"}, "--storage s4://x: "),
        ({"resume": True, "force": True}, "--resume continues a run, --force replaces it"),
    ],
)
def test_bad_input_is_one_line(
    changes: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        main(replace(TuneShardConfig(), **changes))
    assert "\n" not in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
