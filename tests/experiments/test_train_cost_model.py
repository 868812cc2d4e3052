"""From real measurements to a registered model, and what is said of bad input."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from commands import empty_mlflow
from formula import formula_exchanges, measurement

from autoshard.benchmark import MeasurementStore, export_parquet
from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.learning import machine_fitting
from autoshard.cost_model.learning.training import TrainOptions
from autoshard.experiments import collect_costs, train_cost_model
from autoshard.experiments.train_cost_model import REGISTERED_AS, TrainConfig
from autoshard.workload import EmbeddingTable, UserError, load_tables, random_shards

TABLES = "synthetic:200:2:small"
TINY = TrainOptions(members=1, steps=25)  # where it does not matter what is learned
SCRIPT = Path(train_cost_model.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def store(folder: Path, cluster: object) -> Path:
    """Some shards, measured for real, and a few all-to-alls."""
    path = folder / "costs.db"
    collect_costs.main(
        collect_costs.CollectConfig(
            tables=TABLES,
            num_shards=60,
            max_tables=8,
            num_exchanges=2,
            batch_size=(128,),
            store=path,
            mlflow_uri=empty_mlflow(folder / "mlflow.db"),
        )
    )
    with MeasurementStore(path) as kept:  # learning of all-to-alls takes more: by a formula
        (first, *_) = kept.exchanges()
        here = {"hardware": first.hardware, "versions": first.versions}
        for exchange in formula_exchanges(load_tables(TABLES), 30):
            kept.put_exchange(replace(exchange, **here))
    return path


def config(folder: Path, store: Path, **changes: object) -> TrainConfig:
    plain = TrainConfig(
        store=(store,),
        out=folder / "model",
        check_tasks=2,
        hyper=TrainOptions(members=3, steps=200),
        json=folder / "figures.json",
        mlflow_uri=f"sqlite:///{folder / 'mlflow.db'}",
    )
    if "calibrate" in changes:  # which trains nothing
        plain = replace(plain, hyper=TrainOptions())
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def figures(folder: Path, store: Path) -> dict[str, object]:
    """Trained with one round of learning from proposals."""
    train_cost_model.main(config(folder, store, rounds=1, budget_shards=20))
    figures: dict[str, object] = json.loads((folder / "figures.json").read_text())
    return figures


def test_a_model_is_trained_on_what_was_measured(
    folder: Path, store: Path, figures: dict[str, object]
) -> None:
    assert {
        "num_train", "num_test", "test_mape", "test_kendall_tau", "noise_floor_mape",
        "noise_mape", "test_mape_net", "coverage_90", "baselines", "proposals", "seconds",
        "evaluations_per_second", "left_out",
    } <= set(figures)  # fmt: skip
    assert {"dim", "size", "lookup", "size_lookup", "additive"} <= set(figures["baselines"])  # type: ignore[call-overload]
    assert figures["test_mape"]["median"] < 0.3  # type: ignore[index]
    assert figures["test_kendall_tau"] > 0.6  # of 14 shards  # type: ignore[operator]
    assert figures["noise_floor_mape"] > 0  # type: ignore[operator] - measured again for it
    assert figures["proposals"]["tasks"] == 2  # type: ignore[index]
    assert 0.5 < figures["proposals"]["measured_over_promised"] < 2  # type: ignore[index]
    with MeasurementStore(store) as kept:
        assert len(kept) > 75  # what was proposed is kept too
    model = load_model(folder / "model")
    assert model.provenance.batch_sizes == (128,)
    assert set(model.links) == {2, 3, 4, 5, 6}
    assert model.provenance.figures["test_kendall_tau"] == figures["test_kendall_tau"]
    (shard,) = random_shards(load_tables(TABLES), 1, 8, seed=99)
    assert EstimatedCosts(model, 128).costs([shard])[0].total_ms > 0


def test_mlflow_holds_all_of_it(folder: Path, figures: dict[str, object]) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (version,) = client.search_model_versions(f"name='{REGISTERED_AS}'")
    run = client.get_run(version.run_id)
    assert run.data.tags["kind"] == "train_cost_model"
    assert run.data.params["rounds"] == "1"
    assert run.data.metrics["test_kendall_tau"] == figures["test_kendall_tau"]
    assert run.data.metrics["baselines.additive.mape"] > 0
    assert len(client.get_metric_history(version.run_id, "validation_error")) > 1
    pictures = {entry.path for entry in client.list_artifacts(version.run_id, "pictures")}
    assert pictures == {
        f"pictures/{name}.png" for name in ("predicted", "by_size", "calibration", "curves")
    }
    assert version.tags["hardware"].startswith(("cpu", "cuda"))
    copy = mlflow.artifacts.download_artifacts(
        artifact_uri=client.get_model_version_download_uri(REGISTERED_AS, version.version),
        dst_path=str(folder / "downloaded"),
    )
    assert load_model(copy).provenance == load_model(folder / "model").provenance
    assert version.aliases == []
    (stores,) = (one.dataset for one in run.inputs.dataset_inputs)
    assert stores.name == "costs.db"
    assert stores.digest
    served = mlflow.pyfunc.load_model(copy)
    assert served.metadata.get_params_schema().to_dict()[0]["default"] == 128  # batch_size
    assert (served.predict(served.input_example)["backward_ms"] > 0).all()


def test_a_model_is_calibrated(
    folder: Path, store: Path, figures: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "calibrated"
    # Folds are for the uncertainty.
    monkeypatch.setattr("autoshard.cost_model.learning.calibration._FOLDS", 2)
    train_cost_model.main(config(folder, store, calibrate=folder / "model", out=out))
    told = json.loads((folder / "figures.json").read_text())
    assert told["num_train"] <= 50
    assert told["test_mape"]["median"] < 0.3
    assert load_model(out).provenance.num_shards == told["num_train"]


def test_a_parquet_file_trains_too_but_nothing_is_measured(
    folder: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = folder / "costs.parquet"
    with MeasurementStore(store) as kept:
        export_parquet(kept, parquet)
    train_cost_model.main(config(folder, parquet, out=folder / "from_parquet", hyper=TINY))
    assert "predictions are not checked: no store" in capsys.readouterr().out
    assert json.loads((folder / "figures.json").read_text())["proposals"] is None
    with pytest.raises(UserError, match="proposals cannot be measured: no store"):
        train_cost_model.main(config(folder, parquet, out=folder / "other", rounds=1))


def test_another_machine_s_costs_train_but_are_not_added_to(
    folder: Path, cluster: object, many_tables: tuple[EmbeddingTable, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    foreign = folder / "foreign.db"
    with MeasurementStore(foreign) as kept:
        kept.put(measurement(shard) for shard in random_shards(many_tables, 100, 8))
    train_cost_model.main(config(folder, foreign, out=folder / "foreign", hyper=TINY))
    assert "the costs are of a machine with libraries" in capsys.readouterr().out
    with pytest.raises(UserError, match="proposals cannot be measured: the costs are of a machine"):
        train_cost_model.main(config(folder, foreign, out=folder / "other", rounds=1))
    assert not (folder / "other").exists()


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OtherHardware")
def test_networks_of_several_machines_are_added(
    folder: Path,
    many_tables: tuple[EmbeddingTable, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_steps = replace(machine_fitting._OPTIONS, steps=TINY.steps)
    monkeypatch.setattr(machine_fitting, "_OPTIONS", few_steps)
    files = []
    for number, pace in enumerate((1.0, 2.0, 0.7)):
        files.append(folder / f"machine{number}.db")
        with MeasurementStore(files[-1]) as kept:
            kept.put(
                replace(measurement(shard, dearer=lambda table, p=pace: p), hardware=f"cpu: {pace}")
                for shard in random_shards(many_tables, 150, 8)
            )
    one, more = folder / "one_machine", folder / "more_machines"
    train_cost_model.main(config(folder, files[0], out=one, hyper=TINY, check_tasks=0))
    adding = config(folder, files[0], out=more, hyper=TINY, add_to=one, machines=tuple(files[1:]))
    train_cost_model.main(adding)
    said = capsys.readouterr().out
    assert "training on 3 machines, and on all but one for the test" in said
    assert said.count("left out: cpu: ") == 3
    told = json.loads((folder / "figures.json").read_text())["machines_left_out"]
    assert set(told) == {"cpu: 1.0", "cpu: 2.0", "cpu: 0.7"}
    before, after = load_model(one), load_model(more)
    assert before.machines is None
    assert after.machines is not None
    assert len(after.machines.trained_on) == 3
    assert after.provenance == before.provenance
    for name, weight in before.compute.ensemble.weights.items():
        assert after.compute.ensemble.weights[name].equal(weight)
    new = folder / "no_machines"
    for changes, says in (
        ({"machines": (files[1],)}, "name measurements of 2 other machines at least"),
        ({"machines": (files[1], files[1])}, "cpu: 2.0 is named already"),
        ({"machines": (files[0], files[1])}, "cpu: 1.0 is named already"),
        ({"machines": (files[1], folder / "none.parquet")}, "none.parquet: does not exist"),
        ({"machines": ()}, "--add-to adds networks of --machines: name these"),
        (
            {"store": (files[1],), "machines": (files[0], files[2])},
            "one_machine was trained on hardware cpu: 1.0, and --store holds cpu: 2.0: give the",
        ),
        ({"calibrate": one, "hyper": TrainOptions()}, "trains no networks of --machines"),
    ):
        with pytest.raises(UserError, match=says):
            train_cost_model.main(replace(adding, out=new, **changes))  # type: ignore[arg-type]
    assert not new.exists()


def test_a_budget_that_is_spent_leaves_out_what_measures(
    folder: Path, store: Path, figures: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    out, hyper = folder / "hurried", TINY
    asked = config(folder, store, out=out, rounds=2, budget_shards=21, hyper=hyper, seconds=1e-3)
    with MeasurementStore(store) as kept:
        before = len(kept)
    train_cost_model.main(asked)
    told = json.loads((folder / "figures.json").read_text())
    assert told["left_out"] == {"proposed_shards": 20, "check_tasks": 2}
    assert told["proposals"] is None
    line = "stopped by --seconds 0.001: left out 20 proposed shards, 2 check tasks"
    assert line in capsys.readouterr().out
    with MeasurementStore(store) as kept:
        assert len(kept) == before
    assert load_model(out).provenance.num_shards > 0


def test_bad_input_is_one_line_and_changes_nothing(
    folder: Path, store: Path, figures: dict[str, object]
) -> None:
    with MeasurementStore(folder / "empty.db"):
        pass
    before = (folder / "model" / "model.json").read_bytes()
    new = folder / "new"
    for changes, says in (
        ({"store": (folder / "empty.db",)}, "empty.db: holds no costs"),
        ({"store": (folder / "none.db",)}, "none.db: does not exist"),
        ({"store": (folder / "none.parquet",)}, "none.parquet: does not exist"),
        ({"out": folder / "model"}, "model: exists"),
        ({"batch_size": (7,)}, "no costs of batch size 7"),
        ({"weights": "fp16"}, "no costs of weights fp16"),
        ({"json": folder}, "is a folder"),
        ({"rounds": -1}, "must be at least 0"),
        ({"seconds": 0.0}, "--seconds must be more than 0, got 0"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"hyper": TrainOptions(members=0)}, "--hyper.members must be at least 1, got 0"),
        ({"hyper": TrainOptions(learning_rate=0.0)}, "--hyper.learning-rate must be more than 0"),
        ({"hyper": TrainOptions(weight_decay=-1.0)}, "--hyper.weight-decay must be at least 0"),
        ({"calibrate": folder / "model", "rounds": 1}, "--calibrate does not train: leave"),
        ({"rounds": 5, "budget_shards": 4}, "less than one a round"),
        ({"calibrate": folder / "empty.db", "hyper": TrainOptions()}, "no cost model"),
    ):
        asked = replace(config(folder, store, out=new), **changes)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=says) as caught:
            train_cost_model.main(asked)
        assert "\n" not in str(caught.value)
    assert not new.exists()
    assert (folder / "model" / "model.json").read_bytes() == before
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--store", "empty.db", "--out", "new"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "empty.db: holds no costs: collect_costs.py measures some"
    ]
