"""Cost models and policies as models of MLflow (`pyfunc`), which predict for a frame of tables.

A model's folder holds what `save_model` or `save_policy` writes, and beside it MLflow's signature,
example and environment. Nothing is pickled: `_load_pyfunc` reads the folder.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.hardware import load_quietly
from autoshard.experiments.console.inputs import build_task, read_devices
from autoshard.sharders import cost_model_beside, make_sharder, open_context
from autoshard.workload import EmbeddingTable, Objective, UserError, load_tables
from autoshard.workload.tables.table import NUM_REUSE_BINS, Shard

if TYPE_CHECKING:
    from pandas import DataFrame

Tables = tuple[EmbeddingTable, ...]
Params = Mapping[str, Any]

_PACKAGES = ("autoshard", "mlflow", "numpy", "pandas", "safetensors", "scipy", "torch")
_OPTIONAL = (
    "zipf_alpha", "features", "weighted", "reuse_batch_size",
    *(f"reuse_{number}" for number in range(NUM_REUSE_BINS)),
)  # fmt: skip


@dataclass(frozen=True)
class Predictor:
    """A model as MLflow calls it.

    Args:
        columns: Columns of predictions, and their types in MLflow.
        params: Parameters and their defaults.
        rows: Returns the rows of predictions for tables and parameters.
    """

    columns: Mapping[str, str]
    params: Params
    rows: Callable[[Tables, Params], Iterable[Sequence[Any]]]

    def predict(self, frame: "DataFrame", params: Params | None = None) -> "DataFrame":
        """Returns the predictions for tables in the columns of our CSV files."""
        import pandas
        from mlflow.exceptions import MlflowException

        try:
            rows = self.rows(_tables(frame), {**self.params, **(params or {})})
        except UserError as error:  # servers answer that the request is wrong
            raise MlflowException.invalid_parameter_value(str(error)) from error
        return pandas.DataFrame(rows, columns=[*self.columns])


def save_for_mlflow(files: Iterable[Path], folder: Path) -> None:
    """Writes a folder with the files of a cost model or a policy, as a model of MLflow."""
    import mlflow.pyfunc
    import pandas
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType, ColSpec, ParamSchema, ParamSpec, Schema

    folder.mkdir(parents=True)
    for file in files:
        (shutil.copytree if file.is_dir() else shutil.copy2)(file, folder / file.name)
    predictor = _load_pyfunc(str(folder))
    kinds = {bool: "boolean", int: "long", float: "double"}
    anything: Any = AnyType  # it has no types; our reader checks the values
    signature = ModelSignature(
        Schema(
            [
                ColSpec(anything(), "name"),  # pandas may read it as a number
                ColSpec("long", "rows"),
                ColSpec("long", "dim"),
                ColSpec(anything(), "pooling_factor"),  # whole numbers are no doubles to MLflow
                *(ColSpec(anything(), name, required=False) for name in _OPTIONAL),
            ]
        ),
        Schema([ColSpec(kind, name) for name, kind in predictor.columns.items()]),
        ParamSchema([ParamSpec(n, kinds[type(v)], v) for n, v in predictor.params.items()]),
    )
    example = pandas.DataFrame(
        {"name": ["ads", "users"], "rows": [5000, 90000], "dim": [64, 32], "pooling_factor": [8, 1]}
    )
    with tempfile.TemporaryDirectory() as place:
        described = Path(place) / "model"
        mlflow.pyfunc.save_model(
            described,
            loader_module=__name__,
            signature=signature,
            input_example=example,
            pip_requirements=[f"{n}=={version(n).partition('+')[0]}" for n in _PACKAGES],
        )
        shutil.copytree(described, folder, dirs_exist_ok=True)


def _load_pyfunc(folder: str) -> Predictor:
    """Returns the predictor of a cost model or of a policy. MLflow calls it by this name."""
    where = Path(folder)
    is_policy = (where / "policy.json").exists()
    model = load_quietly(cost_model_beside(where) if is_policy else where)
    batches = sorted(model.provenance.batch_sizes)
    params: dict[str, int | float] = {"batch_size": int(batches[len(batches) // 2])}
    if is_policy:
        placed = {"table": "string", "start": "long", "width": "long", "device": "long"}
        params |= {"num_devices": 2, "memory_gb": 16.0}
        return Predictor(placed, params, partial(_placements, where, model))
    costs = {"name": "string", "forward_ms": "double", "backward_ms": "double"}
    return Predictor(costs, {**params, "fused": False}, partial(_costs, model))


def _costs(model: CostModel, tables: Tables, params: Params) -> Iterable[tuple[str, float, float]]:
    """Returns a row for each table alone; one for all in the same operator with `fused`."""
    groups = [("all", tables)] if params["fused"] else [(t.name, (t,)) for t in tables]
    shards = [Shard(tuple(table.whole() for table in group)) for _, group in groups]
    costs = EstimatedCosts(model, params["batch_size"]).costs(shards)
    return [(n, c.forward_ms, c.backward_ms) for (n, _), c in zip(groups, costs, strict=True)]


def _placements(
    folder: Path, model: CostModel, tables: Tables, params: Params
) -> Iterable[tuple[str, int, int, int]]:
    """Returns a row for each table and device: first column, number of columns."""
    batch_size, objective = params["batch_size"], Objective()
    priced = model.for_objective(objective)
    devices = read_devices(str(params["memory_gb"]), params["num_devices"], "num_devices")
    task = build_task(tables, devices, batch_size, priced, objective, None)
    context = open_context(frozenset({"policy"}), tables, batch_size, priced, folder)
    plan = make_sharder("policy", context).shard(task)
    return [(p.table, p.start, p.width, on) for p in plan.placements for on in p.devices]


def _tables(frame: "DataFrame") -> Tables:
    with tempfile.TemporaryDirectory() as place:
        frame.to_csv(f"{place}/tables.csv", index=False)
        try:
            return load_tables(f"{place}/tables.csv")
        except UserError as error:
            raise UserError(str(error).removeprefix(f"{place}/")) from error
