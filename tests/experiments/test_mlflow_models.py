"""Cost models and policies in MLflow's registry: what they predict, and options that name them."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import mlflow
import pytest
from commands import empty_mlflow, environment, run, said_by
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.models.checkpoint import PRETRAINED
from autoshard.experiments.console.mlflow_uris import with_copies
from autoshard.experiments.tracking import runs
from autoshard.experiments.training.run_folder import policy_files
from autoshard.sharders import Policy, save_policy
from autoshard.workload import EmbeddingTable, ShardingPlan, UserError, load_tables
from autoshard.workload.tables.table import Shard

COSTS, POLICY = runs.COST_MODELS, runs.POLICIES
PLANNING = "--no-probe --tables tables.csv --num-devices 2 --memory-gb 1 --out plan.json"
TABLES = """\
name,rows,dim,pooling_factor,features,weighted
12,5000,64,8,2,true
13,90000,32,1,,false
words,90000,128,2.5,1,
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With MLflow's file, in which a cost model has two versions and a policy one."""
    folder = tmp_path_factory.mktemp("registry")
    uri = empty_mlflow(folder / "mlflow.db")
    (folder / "tables.csv").write_text(TABLES)
    save_policy(Policy.untrained(max_devices=4), folder / "policy")
    (folder / "policy" / "cost_model").symlink_to(PRETRAINED / "cpu")
    with runs.tracked_run("train_cost_model", "x", {}, uri) as found:
        for named in (f"{COSTS}@champion", COSTS):
            found.register((PRETRAINED / "cpu").iterdir(), named, {})
        found.register(policy_files(folder / "policy"), f"{POLICY}@champion", {}, "policy")
        found.artifact(folder / "tables.csv", "data")
    (folder / "run_id").write_text(found.run_id)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "autoshard" / "models"


@pytest.fixture
def connected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    uri = f"sqlite:///{folder}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", uri)
    monkeypatch.setattr("mlflow.tracking._model_registry.utils._registry_uri", uri)
    return MlflowClient(uri)


@dataclass(frozen=True)
class Options:
    """Options of a command."""

    cost_model: Path | None = None
    policies: str | None = None
    machines: tuple[Path, ...] = ()
    seed: int = 0
    mlflow_uri: str | None = None


def test_mlflow_s_own_command_predicts_costs(folder: Path) -> None:
    words = f"predict -m models:/{COSTS}@champion -i tables.csv -t csv --env-manager local -o out"
    said_by(
        [sys.executable, "-m", "mlflow", "models", *words.split()],
        folder,
        env={**environment(), "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"},
    )
    found = json.loads((folder / "out").read_text())["predictions"]
    shards = [Shard((table.whole(),)) for table in load_tables(str(folder / "tables.csv"))]
    costs = EstimatedCosts(load_model("cpu"), 1024).costs(shards)
    assert [row["name"] for row in found] == ["12", "13", "words"]
    for row, cost in zip(found, costs, strict=True):
        assert row["forward_ms"] == pytest.approx(cost.forward_ms, rel=1e-5)
        assert row["backward_ms"] == pytest.approx(cost.backward_ms, rel=1e-5)


def test_costs_of_one_operator_are_predicted_too(
    connected: MlflowClient, tables: tuple[EmbeddingTable, ...]
) -> None:
    served = mlflow.pyfunc.load_model(f"models:/{COSTS}/1")
    frame = served.input_example
    alone, fused = served.predict(frame), served.predict(frame, params={"fused": True})
    assert [*fused["name"]] == ["all"]
    assert 0 < fused["forward_ms"][0] < sum(alone["forward_ms"])
    larger = served.predict(frame, params={"batch_size": 4096})
    assert (larger["forward_ms"] > alone["forward_ms"]).all()
    with pytest.raises(
        MlflowException, match=r"^tables\.csv, line 3, column rows: must lie"
    ) as bad:
        served.predict(frame.assign(rows=[5, 0]))
    assert bad.value.error_code == "INVALID_PARAMETER_VALUE"  # of which servers say 400
    with pytest.raises(MlflowException, match="missing inputs"):
        served.predict(frame.drop(columns="dim"))


def test_a_policy_places_all_columns(connected: MlflowClient) -> None:
    served = mlflow.pyfunc.load_model(f"models:/{POLICY}@champion")
    found = served.predict(served.input_example, params={"num_devices": 4, "memory_gb": 0.5})
    assert found.groupby("table")["width"].sum().to_dict() == {"ads": 64, "users": 32}
    assert set(found["device"]) <= {0, 1, 2, 3}
    for params, line in (
        ({"num_devices": 8}, "the policy serves up to 4 devices"),
        ({"memory_gb": 0.001}, "add devices or memory"),
        ({"batch_size": 0}, "batch"),
    ):
        with pytest.raises(MlflowException, match=line):
            served.predict(served.input_example, params=params)


@pytest.mark.parametrize(
    "names", [("models:/{}@champion", "models:/{}/1"), ("runs:/{run}/{}",) * 2]
)
def test_options_name_models_in_mlflow(folder: Path, names: tuple[str, str]) -> None:
    run_id = (folder / "run_id").read_text()
    costs = names[0].format(COSTS, run=run_id)
    policy = names[1].format("policy" if "runs" in names[1] else POLICY, run=run_id)
    run("shard.py", f"{PLANNING} --cost-model cpu --policy policy", folder)
    expected = ShardingPlan.load(folder / "plan.json")
    run("shard.py", f"{PLANNING} --cost-model {costs} --policy {policy}", folder)
    assert ShardingPlan.load(folder / "plan.json") == expected
    # The cost model beside the policy, and a file of a run.
    tables = PLANNING.replace("tables.csv", f"runs:/{run_id}/data/tables.csv")
    run("shard.py", f"{tables} --policy {policy}", folder)
    assert ShardingPlan.load(folder / "plan.json") == expected


def test_an_alias_promotes_a_version(folder: Path, connected: MlflowClient, cache: Path) -> None:
    named = Options(Path(f"models:/{COSTS}@candidate"), f"old=x,new=models:/{POLICY}/1,other=y")
    for version in ("1", "2"):
        connected.set_registered_model_alias(COSTS, "candidate", version)
        found = with_copies(named)
        assert found.cost_model is not None
        assert found.cost_model.name == f"{COSTS}-{version}"
        assert load_model(found.cost_model).provenance == load_model("cpu").provenance
    (policy,) = cache.glob("*/autoshard-policy-1")
    assert found.policies == f"old=x,new={policy},other=y"
    within = with_copies(Options(machines=(Path("a"), Path(f"models:/{POLICY}/1/cost_model"))))
    assert load_model(within.machines[1]).provenance == load_model("cpu").provenance
    assert within.machines[0] == Path("a")


def test_a_run_is_read_anew_and_a_version_is_not(connected: MlflowClient, cache: Path) -> None:
    for named, kept in ((f"models:/{COSTS}/1", True), ("runs:/{}/data/tables.csv", False)):
        (found,) = connected.search_model_versions(f"name='{POLICY}'")
        options = Options(Path(named.format(found.run_id)))
        first = with_copies(options).cost_model
        assert first is not None
        file = first / "model.json" if first.is_dir() else first
        file.write_text("changed")
        assert with_copies(options).cost_model == first
        assert (file.read_text() == "changed") == kept


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (f"--cost-model models:/{COSTS}/7", "version=7) not found"),
        (f"--cost-model models:/{COSTS}@nobody", "alias nobody not found"),
        ("--policy models:/nothing/1", "Registered Model with name=nothing not found"),
        ("--policy models:/nothing", "name a version or an alias"),
        ("--policy runs:/0123/policy", "Run with id=0123 not found"),
        (f"--cost-model models:/{POLICY}@champion", f"{POLICY}-1: holds no cost model"),
        (f"--policy models:/{COSTS}/1", f"{COSTS}-1: holds no policy"),
    ],
)
def test_what_mlflow_has_not_is_one_line(folder: Path, option: str, line: str) -> None:
    said = run("shard.py", f"{PLANNING} {option}", folder, code=2).stderr
    assert line in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("uri", "line"),
    [
        ("sqlite:////nowhere/mlflow.db", "does not exist: set MLFLOW_TRACKING_URI"),
        ("http://127.0.0.1:9", "Connection refused"),
    ],
)
def test_a_registry_that_is_not_there_is_one_line(uri: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        with_copies(Options(Path("models:/some/1"), mlflow_uri=uri))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("models:/some/1: ")


@pytest.mark.parametrize("named", ["a/b", "a:b", "", "a@", "a@latest", "a@v1", "..", "a@b@c"])
def test_names_are_checked_before_the_work(named: str) -> None:
    with pytest.raises(UserError, match="write NAME or NAME@ALIAS"):
        runs.check_registered(named)
    runs.check_registered("my model.2@champion-1")
