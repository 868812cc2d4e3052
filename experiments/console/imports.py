"""Python objects that options name by MODULE:NAME: a TorchRec model and its batches."""

import importlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from autoshard.workload import UserError
from autoshard.workload.errors import reason_of

if TYPE_CHECKING:
    from autoshard.integration import ModelTables
    from autoshard.workload import EmbeddingTable
    from autoshard.workload.profiling.sources import LoaderData


def model_tables(model: str, batches: str | None, world_size: int) -> "ModelTables":
    """Returns the tables of a TorchRec model.

    Args:
        model: MODULE:NAME of a module, or of a function that returns one.
        batches: MODULE:NAME of one rank's batches, or of a function that returns them.
        world_size: Number of ranks that will train.

    Raises:
        UserError: A name cannot be imported, or is of another kind.
    """
    from autoshard.integration import tables_of  # raises UserError without TorchRec

    return tables_of(model_of(model), None if batches is None else _read(batches), world_size)


def model_of(name: str) -> nn.Module:
    """Returns the model that `--model` names; UserError if it cannot be imported."""
    # TorchRec asks torch whether it is traced, and torch answers with a warning about the question.
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    module: nn.Module = _named("--model", name, nn.Module, ", and no torch.nn.Module")
    return module


def is_object(name: str) -> bool:
    """Returns whether a text is MODULE:NAME of an object, not the name of a file."""
    return re.fullmatch(r"\w[\w.]*:\w+", name) is not None


def loader_data(
    name: str, model: str | None, batch_size: int, num_batches: int | None = None
) -> "tuple[LoaderData, tuple[EmbeddingTable, ...] | None]":
    """Returns the batches of a loader, and the tables of the TorchRec model that they are for.

    `name` and `model` are MODULE:NAME; UserError if they cannot be imported, or are of another
    kind. Without a model, each feature is a table of its name.
    """
    from autoshard.workload.profiling.sources import LoaderData

    tables = features = None
    if model is not None:
        from autoshard.integration.models.bags import bag_tables

        bags = bag_tables(model_of(model))
        tables = tuple(bag.described() for bag in bags.values())
        features = {table: bag.config.feature_names for table, bag in bags.items()}
    batches = _named("DATA", name, Iterable, ": name a list or loader")
    return LoaderData(batches, features, batch_size, num_batches), tables


def _read(name: str) -> Iterator[Any]:
    found = _named("--batches", name, Iterable, ": name a list or loader")
    try:
        yield from found
    except Exception as error:
        raise UserError(f"--batches {name}: it fails: {_format(error)}") from error


def _named(option: str, name: str, kind: Any, hint: str) -> Any:
    """Returns the object of that kind, or what the function of that name returns."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UserError(f"{option} must be MODULE:NAME, as in my_module:build_model, got {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        text = _format(error)
        raise UserError(f"{option} {name}: {module} cannot be imported: {text}") from error
    if not hasattr(imported, attribute):
        raise UserError(f"{option} {name}: {module} has no {attribute}")
    found = getattr(imported, attribute)
    if isinstance(found, kind):
        return found
    if not callable(found):
        raise UserError(f"{option} {name}: is a {type(found).__name__}: name a function")
    try:
        found = found()
    except Exception as error:
        raise UserError(f"{option} {name}: it fails: {_format(error)}") from error
    if not isinstance(found, kind):
        raise UserError(f"{option} {name}: is a {type(found).__name__}{hint}")
    return found


def _format(error: Exception) -> str:
    return f"{type(error).__name__}: {reason_of(error)}"
