"""Cost models in folders: weights as safetensors, all else as JSON. Nothing is ever unpickled.

Shipped models are in `pretrained/`, beside the Parquet files that they were trained on. They are
loaded by name.
"""

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from autoshard.benchmark import ReferenceLevel
from autoshard.benchmark.backends import fingerprint_here
from autoshard.cost_model.models.machines import EFFECTS, Machines, TrainingMachine
from autoshard.cost_model.models.model import CostModel, Provenance
from autoshard.cost_model.networks import network
from autoshard.cost_model.networks.compute import ComputeCostModel, ResidualPrior, Uncertainty
from autoshard.cost_model.networks.ensemble import Ensemble
from autoshard.cost_model.networks.network import InputScale, NetworkShape, ShardNetwork
from autoshard.cost_model.step.overhead import StepOverhead
from autoshard.workload import OperatorOptions, UserError, documents
from autoshard.workload.tasks.links import link_from_json

MODEL_SCHEMA = documents.Schema("autoshard.cost_model", 2)
PRETRAINED = Path(__file__).parents[1] / "pretrained"
_WEIGHTS, _DOCUMENT = "model.safetensors", "model.json"
_NETWORKS, _SCALE = "compute.", "scale."
_MACHINES, _EFFECTS = "machines.", "machines.effects."


class OtherHardware(UserWarning):
    """Warning that a model was trained on other hardware."""


class CheckpointError(UserError):
    """A folder that holds no cost model, or one of another version."""


def check_free(folder: Path, force: bool = False) -> None:
    """Raises CheckpointError if saving to this folder would replace something."""
    if folder.is_file() or (folder.exists() and not force):
        raise CheckpointError(f"{folder}: exists: name another folder, or replace it with --force")
    if folder.exists() and not (folder / _DOCUMENT).exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: holds other files: name another folder")


def save_model(model: CostModel, folder: Path | str, force: bool = False) -> None:
    """Writes the model to a folder atomically; with `force`, a model that is there is replaced."""
    target = Path(folder)
    check_free(target, force)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    old = target.with_name(f".{target.name}.{os.getpid()}.old.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / _WEIGHTS).write_bytes(save(_tensors(model)))
        documents.write(partial / _DOCUMENT, MODEL_SCHEMA.stamp(_description(model)))
        if target.exists():
            target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def load_model(model: Path | str, hardware: str | None = None) -> CostModel:
    """Reads a model from its folder, or a shipped one by its name, such as `cpu`.

    Args:
        model: Folder or name.
        hardware: Fingerprint of the hardware to predict for; by default this machine's. If the
            model was trained on other hardware, OtherHardware is issued.

    Raises:
        CheckpointError: The folder holds no readable model; the message names the fault.
    """
    where = Path(model)
    shipped_one = PRETRAINED / where.name
    if not (where / _DOCUMENT).is_file() and where.name == str(model) and shipped_one.is_dir():
        where = shipped_one
    if not (where / _DOCUMENT).is_file():
        shipped = ", ".join(sorted(path.name for path in PRETRAINED.iterdir() if path.is_dir()))
        raise CheckpointError(
            f"{where}: holds no cost model: train_cost_model.py --out makes one, and these are "
            f"shipped: {shipped}"
        )
    with documents.naming(where / _DOCUMENT):
        document = documents.read(where / _DOCUMENT)
        MODEL_SCHEMA.check(document)
        with documents.fields_of("model"):
            found = _model(document, _read_tensors(where / _WEIGHTS))
    mismatch = found.hardware_mismatch(hardware or fingerprint_here(found.provenance.hardware))
    if mismatch is not None:
        warnings.warn(mismatch, OtherHardware, stacklevel=2)
    return found


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0][:120]
        raise CheckpointError(f"{_WEIGHTS} beside it is missing or damaged ({reason})") from error


def _tensors(model: CostModel) -> dict[str, Tensor]:
    tensors = _tensors_of(model.compute)
    if model.machines is not None:
        shared = _tensors_of(model.machines.mean)
        tensors |= {f"{_MACHINES}{name}": tensor for name, tensor in shared.items()}
        tensors |= {f"{_EFFECTS}{name}": each for name, each in model.machines.effects.items()}
    # Copies, for networks of one machine may share weights with those of all.
    return {name: value.detach().clone().contiguous() for name, value in tensors.items()}


def _tensors_of(compute: ComputeCostModel) -> dict[str, Tensor]:
    tensors = {f"{_NETWORKS}{name}": w for name, w in compute.ensemble.weights.items()}
    return tensors | {f"{_SCALE}{name}": value for name, value in compute.scale._asdict().items()}


def _description(model: CostModel) -> dict[str, Any]:
    trained_on = asdict(model.provenance)
    trained_on["operator"] = model.provenance.operator.to_json()
    machines: dict[str, Any] | None = None
    if model.machines is not None:
        hosts = [
            {"hardware": hardware, "reference_level": None if level is None else asdict(level)}
            for hardware, level in model.machines.trained_on
        ]
        machines = {**_description_of(model.machines.mean), "trained_on": hosts}
    return {
        "inputs": list(network.INPUTS),
        "terms": list(network.TERMS),
        **_description_of(model.compute),
        "links": {ranks: link.to_json() for ranks, link in model.links.items()},
        "trained_on": trained_on,
        "overhead": None if model.overhead is None else model.overhead.to_json(),
        "overheads": {on: overhead.to_json() for on, overhead in model.overheads.items()},
        "machines": machines,
    }


def _description_of(compute: ComputeCostModel) -> dict[str, Any]:
    return {
        "shape": asdict(compute.shape),
        "uncertainty": asdict(compute.uncertainty),
        "prior": asdict(compute.prior),
    }


def _model(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CostModel:
    for part, expected in (("inputs", network.INPUTS), ("terms", network.TERMS)):
        if document[part] != [*expected]:
            raise CheckpointError(
                f"its {part} differ from those of this version of autoshard: train it again"
            )
    fields = dict(document["trained_on"])
    fields["operator"] = OperatorOptions(**fields["operator"])
    fields["batch_sizes"] = tuple(fields["batch_sizes"])
    fields["reference_level"] = _level(fields["reference_level"])
    overhead = document["overhead"]
    return CostModel(
        _compute(document, tensors),
        Provenance(**fields),
        {int(ranks): link_from_json(link) for ranks, link in document["links"].items()},
        _machines(document["machines"], _under(_MACHINES, tensors)),
        overhead=None if overhead is None else StepOverhead.from_json(overhead),
        overheads={
            hardware: StepOverhead.from_json(each)
            for hardware, each in document["overheads"].items()
        },
    )


def _compute(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ComputeCostModel:
    shape = NetworkShape(**document["shape"])
    scale = InputScale(*(tensors[f"{_SCALE}{name}"] for name in InputScale._fields))
    example = ShardNetwork(shape, scale)
    return ComputeCostModel(
        shape,
        scale,
        Ensemble(example, _checked(tensors, example)),
        Uncertainty(**document["uncertainty"]),
        ResidualPrior(**document["prior"]),
    )


def _machines(document: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> Machines | None:
    if document is None:
        return None
    trained_on = tuple(
        TrainingMachine(each["hardware"], _level(each["reference_level"]))
        for each in document["trained_on"]
    )
    mean = _compute(document, tensors)
    effects = _under(_EFFECTS.removeprefix(_MACHINES), tensors)
    shapes = {name: (len(trained_on), *mean.ensemble.weights[name].shape) for name in EFFECTS}
    if {name: tuple(effect.shape) for name, effect in effects.items()} != shapes:
        raise CheckpointError(f"{_WEIGHTS} beside it is damaged: effects of machines differ")
    return Machines(mean, trained_on, effects)


def _level(fields: Mapping[str, Any] | None) -> ReferenceLevel | None:
    return ReferenceLevel(**fields) if fields else None


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): w for n, w in tensors.items() if n.startswith(prefix)}


def _checked(tensors: Mapping[str, Tensor], example: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the stacked weights; CheckpointError unless their shapes are those of `example`."""
    found = _under(_NETWORKS, tensors)
    wanted = {name: tuple(weight.shape) for name, weight in example.named_parameters()}
    if {name: tuple(weight.shape[1:]) for name, weight in found.items()} != wanted:
        raise CheckpointError(f"{_WEIGHTS} beside it is damaged: weights are missing or differ")
    return found
