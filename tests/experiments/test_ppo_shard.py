"""Training a policy as a user does: real PPO, real measurements, real losses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import mlflow
import pytest
from commands import Watched, empty_mlflow, kill_actors, run

from autoshard.benchmark import MeasurementStore
from autoshard.cost_model import load_model
from autoshard.experiments.ppo_shard import MAY_CHANGE, main
from autoshard.experiments.training.config import Hyperparameters, PPOShardConfig, TrainingSetup
from autoshard.experiments.training.ppo import Trainer
from autoshard.experiments.training.run_folder import RunFolder
from autoshard.sharders import load_policy
from autoshard.sharders.policy.network import PolicyShape
from autoshard.workload import EmbeddingTable, UserError
from autoshard.workload.tables.parts import part_of_shard

TINY = (
    "--tables synthetic:80:1:small --num-tables 6 --num-devices 2 --num-envs 8 --check-tasks 2 "
    "--check-every 2 --batch-size 256 --memory-fill 0.1-0.6 --test-seconds 0"
)


ESTIMATED = PPOShardConfig(
    reward="estimated", memory_fill="0.1", memory_unevenness=0.0, learner="critic"
)


def result(folder: Path, name: str = "result.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


@pytest.fixture(scope="module")
def trained(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with real measurements among the rewards, from a folder of its own."""
    folder = tmp_path_factory.mktemp("ppo")
    options = "--reward mixed --measured-share 0.9 --iterations 4 --out run --json result.json"
    options += " --register my-policy@champion"
    tested = TINY.replace("--test-seconds 0", "--test-seconds 6")
    done = run("ppo_shard.py", f"{tested} {options}", folder)
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_a_run_leaves_a_policy_that_serves(trained: Path) -> None:
    told = result(trained)
    assert told["iterations"] == 4
    assert len(told["iterations_here"]) == 4
    assert told["env_steps"] == 4 * 8 * 7  # a game takes a step a table, and one to be dealt
    assert 0 < told["pool_busy"] < 1
    policy = load_policy(trained / "run")
    assert policy.trained["tables"] == "synthetic:80:1:small"
    assert set(told["test_over_best_heuristic"]) >= {"random", "cost", "policy", "autoshard"}
    assert told["test_over_best_heuristic"][told["best_heuristic"]] >= 1.0
    options = "--tables synthetic:80:1:small --num-devices 4 --memory-gb 1 --batch-size 256"
    run("shard.py", f"{options} --policy run --out plan.json", trained)


def test_the_test_is_measured_where_rewards_are(trained: Path) -> None:
    told = result(trained)
    measured = told["test_measured"]
    assert set(measured) == {told["best_heuristic"], "cost_fused", "policy", "autoshard"}
    assert measured[told["best_heuristic"]]["ratio"] == 1
    assert all(score["promise"] is not None for score in measured.values())
    said = " ".join((trained / "stdout").read_text().split())
    assert "predicted step time over the best heuristic's" in said
    assert "step time (measured)" in said
    of_tasks = told["test_of_tasks"]["autoshard"]
    assert geometric_mean(of_tasks) == pytest.approx(told["test_over_best_heuristic"]["autoshard"])


def test_measured_shards_are_of_tables_that_teach_and_teach_the_cost_model(trained: Path) -> None:
    """Those of the test's plans are not: they are measured when all has been learned."""
    with MeasurementStore(trained / "run" / "costs.db") as store:
        shards = [measured.shard for measured in store.measurements()]
    # A plan of the test may have blocks of rows, which are tables of their own: `item[0:500]`.
    whole = [s for s in shards if not any("[" in piece.table.name for piece in s.pieces)]
    parts = [part_of_shard(shard) for shard in whole]
    assert parts.count("train") >= 20
    assert set(parts) == {"train", "test"}
    taught = [line for line in result(trained)["iterations_here"] if "new_shards" in line]
    assert taught
    assert all(line["cost_model_error"] < 1 for line in taught)
    shipped = load_model("cpu").provenance.num_shards
    assert load_model(trained / "run" / "cost_model").provenance.num_shards >= shipped


def test_mlflow_has_curves_checks_plans_and_the_policy(trained: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{trained}/mlflow.db")
    (found,) = mlflow.search_runs(
        experiment_names=["autoshard"], filter_string="tags.kind = 'ppo_shard'",
        output_format="list",
    )  # fmt: skip
    assert found.info.run_id == result(trained)["mlflow_run"]
    assert found.info.status == "FINISHED"
    client = mlflow.MlflowClient()
    curve = client.get_metric_history(found.info.run_id, "episodes/step_over_bound")
    assert [point.step for point in curve] == [1, 2, 3, 4]
    assert "check/over_best_heuristic" in found.data.metrics
    assert "test/autoshard" in found.data.metrics
    plans = {item.path for item in client.list_artifacts(found.info.run_id, "plans")}
    assert {"plans/policy.png", "plans/policy.plan.json"} <= plans
    kept = {item.path for item in client.list_artifacts(found.info.run_id, "policy")}
    assert {"policy/policy.json", "policy/policy.safetensors", "policy/cost_model"} <= kept
    version = client.get_model_version_by_alias("my-policy", "champion")
    assert version.tags["hardware"].startswith("cpu: ")  # of the model that learned meanwhile
    served = mlflow.pyfunc.load_model("models:/my-policy@champion")
    assert set(served.predict(served.input_example)["table"]) == {"ads", "users"}


def test_ppo_learns_from_scratch_what_balances(
    cluster: object, model: Any, many_tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    """Without the greedy that it otherwise starts from: a policy that knows nothing."""
    shape = replace(PolicyShape(), sharpness=0.01)
    hyper = replace(Hyperparameters(), learning_rate=3e-3, minibatch=256, epochs=4, shape=shape)
    config = replace(ESTIMATED, num_tables="10", num_devices="3", num_envs=64, hyper=hyper)
    trainer = Trainer(TrainingSetup(config, {"train": many_tables}, model, tmp_path), seed=0)
    maxima = [trainer.iterate()["step_over_bound"] for _ in range(25)]
    trainer.stop()
    assert maxima[0] > 1.5  # about what random placement costs
    assert sum(maxima[-3:]) / 3 - 1 < 0.6 * (maxima[0] - 1)


def test_what_goes_on_from_a_checkpoint_has_its_own_learning_rate(
    cluster: object, model: Any, many_tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    """Population based training goes on from another trial's checkpoint with other rates."""
    config = replace(
        ESTIMATED, num_tables="4", num_devices="2", num_envs=8, learner="group_baseline"
    )
    setup = TrainingSetup(config, {"train": many_tables}, model, tmp_path)
    trainers = [
        Trainer(
            replace(setup, config=replace(config, hyper=Hyperparameters(learning_rate=rate))), 0
        )
        for rate in (1e-3, 5e-4)
    ]
    trainers[0].iterate()
    trainers[0].save(tmp_path)
    trainers[1].restore(tmp_path)
    for _ in range(2):
        (rates,) = trainers[1].algorithm.learner_group.foreach_learner(learning_rates)
        assert rates.get() == {5e-4}
        trainers[1].iterate()
    for trainer in trainers:
        trainer.stop()


def learning_rates(learner: Any) -> set[float]:
    (module,) = learner.module.keys()
    optimizers = learner.get_optimizers_for_module(module)
    return {group["lr"] for _, optimizer in optimizers for group in optimizer.param_groups}


def test_lost_actors_end_nothing(cluster: object, tmp_path: Path) -> None:
    options = (
        "--num-env-runners 1 --num-envs 4 --measured-share 0.3 --iterations 6 --out run "
        "--json r.json"
    )
    training = Watched("ppo_shard.py", f"{TINY} {options}", tmp_path)
    training.wait_for(r"\n +2/6")
    assert kill_actors("SingleAgentEnvRunner") == 1
    kill_actors("DeviceProcess")
    log = training.end()
    assert "env runner 1 was lost and is replaced" in log
    assert result(tmp_path, "r.json")["iterations"] == 6


def test_a_killed_run_goes_on_where_it_was(cluster: object, tmp_path: Path) -> None:
    options = (
        f"{TINY} --reward estimated --iterations 400 --out run --mlflow-uri sqlite:///m.db "
        "--storage shared"
    )
    empty_mlflow(tmp_path / "m.db")
    training = Watched("ppo_shard.py", options, tmp_path)
    training.wait_for(r"\n +3/400")
    training.kill()
    reached = RunFolder(tmp_path / "run").read().progress.iteration
    assert reached >= 3
    # As if fewer iterations had been asked for: a run goes on with its own settings.
    document = json.loads((tmp_path / "run" / "training.json").read_text())
    document["config"]["iterations"] = reached + 2
    (tmp_path / "run" / "training.json").write_text(json.dumps(document))
    done = run("ppo_shard.py", "--resume --out run --json r.json", tmp_path)
    assert f"resuming after iteration {reached}" in done.stdout
    kept = json.loads((tmp_path / "shared" / "run" / "training.json").read_text())
    assert kept["progress"]["iteration"] == reached + 2  # also where --storage was not said again
    told = result(tmp_path, "r.json")
    assert told["iterations"] == reached + 2
    assert len(told["iterations_here"]) == 2
    assert told["env_steps"] == (reached + 2) * 8 * 7  # RLlib's own counters went on too
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/m.db")
    (found,) = mlflow.search_runs(experiment_names=["autoshard"], output_format="list")
    assert found.info.status == "FINISHED"
    curve = mlflow.MlflowClient().get_metric_history(found.info.run_id, "episodes/step_over_bound")
    assert {reached, reached + 1, reached + 2} <= {point.step for point in curve}


def test_a_run_whose_seconds_are_spent_ends_well_and_goes_on(
    cluster: object, tmp_path: Path
) -> None:
    options = "--reward estimated --iterations 3 --seconds 0.001 --out run --json r.json"
    done = run("ppo_shard.py", f"{TINY} {options}", tmp_path)
    told = result(tmp_path, "r.json")
    assert "after iteration 1 of 3: continue with --resume" in done.stdout
    assert (told["iterations"], told["left_out"]) == (1, 2)
    (line,) = told["iterations_here"]
    assert "check_score" in line  # as after any last iteration
    assert set(told["test_over_best_heuristic"]) >= {"policy", "autoshard"}
    assert load_policy(tmp_path / "run").trained["iterations"] <= 1
    done = run("ppo_shard.py", "--resume --out run --json r.json", tmp_path)
    told = result(tmp_path, "r.json")
    assert (told["iterations"], told["left_out"]) == (3, 0)  # the seconds were the first command's
    assert "stopped" not in done.stdout


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_tables": "many"}, "--num-tables: a whole number or a range such as 2-8, got 'many'"),
        ({"num_devices": "8-2"}, "num_devices: must be from 1 up, minimum first, got 8"),
        ({"memory_fill": "0-2"}, "fill: must lie between 0 and 1"),
        ({"max_devices": 2}, "--max-devices 2 is less than --num-devices"),
        ({"seconds": 0.0}, "--seconds must be more than 0, got 0"),
        ({"iterations": 0}, "--iterations must be at least 1"),
        ({"measured_share": 1.5}, "--measured-share must lie between 0 and 1, got 1.5"),
        ({"tables": "nothing.csv"}, "nothing.csv"),
        ({"families": "small,huge"}, "--families: 'huge' is not one of small, large, giants"),
        ({"families": "thousands"}, "--max-devices 128 is less than --num-devices"),
        ({"tables": "synthetic:3:1"}, "synthetic:3:1: has too few tables"),
        ({"cost_model": "nowhere"}, "nowhere: holds no cost model"),
        ({"resume": True, "out": Path("nothing")}, "nothing: holds no training run to resume"),
        ({"out": Path("full")}, "full: is a folder of other things"),
        ({"json": Path("full")}, "full: is a folder: name a file for --json"),
        ({"hyper": Hyperparameters(learning_rate=0.0)}, "--hyper.learning-rate must be more than"),
        ({"hyper": Hyperparameters(gae_lambda=1.5)}, "--hyper.gae-lambda must lie between 0 and 1"),
        ({"storage": "s4://x"}, "--storage s4://x: "),
        ({"resume": True, "force": True}, "--resume continues a run, --force replaces it"),
    ],
)
def test_bad_input_is_one_line(
    changes: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        main(replace(PPOShardConfig(), **changes))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["thesis.txt"]


def test_files_of_a_run_may_lie_elsewhere_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables.csv").touch()
    began = PPOShardConfig(tables="tables.csv", num_envs=8, num_env_runners=4, storage="kept")
    kept = PPOShardConfig.from_json(began.with_absolute_paths().to_json())
    assert kept.tables == str(tmp_path / "tables.csv")
    assert kept.storage == str(tmp_path / "kept")
    (tmp_path / "moved.csv").touch()
    asked = PPOShardConfig(tables="moved.csv", num_env_runners=0, num_envs=64, resume=True)
    gone_on = kept.resumed(asked, MAY_CHANGE)
    assert gone_on == replace(kept, tables=str(tmp_path / "moved.csv"), num_env_runners=0)


def test_env_runners_that_would_never_start_are_refused(cluster: object, tmp_path: Path) -> None:
    config = replace(
        PPOShardConfig(),
        tables="synthetic:80:1:small",
        reward="estimated",
        num_env_runners=99,
        out=tmp_path / "run",
        mlflow_uri=empty_mlflow(tmp_path / "m.db"),
    )
    with pytest.raises(UserError, match="--num-env-runners 99 is too much for the 2 CPUs"):
        main(config)
    # Nothing was trained there, so the folder is free.
    with pytest.raises(UserError, match="ended before its first checkpoint"):
        RunFolder(tmp_path / "run").read()
    RunFolder(tmp_path / "run").begin(force=False)


def test_a_run_in_a_storage_is_not_replaced_unasked(tmp_path: Path) -> None:
    kept = tmp_path / "shared" / "run"
    kept.mkdir(parents=True)
    (kept / "training.json").write_text("{}")
    config = replace(PPOShardConfig(), storage=str(tmp_path / "shared"), out=tmp_path / "run")
    with pytest.raises(UserError, match="shared/run: holds a training run: continue with --resume"):
        main(config)
    assert (kept / "training.json").read_text() == "{}"


def test_a_run_is_not_replaced_unasked(trained: Path) -> None:
    before = (trained / "run" / "policy.safetensors").read_bytes()
    done = run("ppo_shard.py", f"{TINY} --out run", trained, code=2)
    assert "holds a training run: continue with --resume, replace it with --force" in done.stderr
    assert (trained / "run" / "policy.safetensors").read_bytes() == before
