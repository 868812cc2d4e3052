"""What a user names by MODULE:NAME: a TorchRec model, and its batches."""

import importlib
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from autoshard.experiments.console.cli import reason_of
from autoshard.workload import UserError

if TYPE_CHECKING:
    from autoshard.workload.torchrec import ModelTables


def model_tables(model: str, batches: str | None, world_size: int) -> "ModelTables":
    """The tables of the model named so; UserError says which name is off, and how.

    Args:
        model: MODULE:NAME of a module, or of a function that makes one.
        batches: MODULE:NAME of one rank's batches, or of a function that makes them.
        world_size: ranks that will train.
    """
    from autoshard.workload.torchrec import tables_of  # the door: it says if TorchRec is missing

    # TorchRec asks torch whether it is traced, and torch answers with a warning about the question.
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    found = _named("--model", model)
    if not isinstance(found, nn.Module):
        found = _made("--model", model, found)
    if not isinstance(found, nn.Module):
        raise UserError(f"--model {model}: is a {type(found).__name__}, and no torch.nn.Module")
    return tables_of(found, None if batches is None else _batches(batches), world_size)


def _batches(name: str) -> Iterator[Any]:
    """The batches, read as they are asked for: what fails meanwhile is the user's."""
    try:
        yield from _source(name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--batches {name}: it fails: {_said(error)}") from error


def _source(name: str) -> Iterable[Any]:
    found = _named("--batches", name)
    if not isinstance(found, Iterable):
        found = _made("--batches", name, found)
    if not isinstance(found, Iterable):
        raise UserError(f"--batches {name}: is a {type(found).__name__}: name a list or loader")
    return found


def _named(option: str, name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UserError(f"{option} must be MODULE:NAME, as in my_module:build_model, got {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        raise UserError(f"{option} {name}: {module} cannot be imported: {_said(error)}") from error
    try:
        return getattr(imported, attribute)
    except AttributeError:
        raise UserError(f"{option} {name}: {module} has no {attribute}") from None


def _made(option: str, name: str, function: Any) -> Any:
    if not callable(function):
        raise UserError(f"{option} {name}: is a {type(function).__name__}: name a function")
    try:
        return function()
    except Exception as error:
        raise UserError(f"{option} {name}: it fails: {_said(error)}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {reason_of(error)}"
