"""Checkpoints of sharded models that can be loaded under another plan and by more or fewer ranks.

They are those of torch.distributed.checkpoint, with the plan as one more entry.
"""

import json
import pickle
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from autoshard.integration.checkpoints.load_planner import ReshardingPlanner
from autoshard.workload.errors import UserError
from autoshard.workload.plans.plan import ShardingPlan

_PLAN = "autoshard_plan"


def save_checkpoint(folder: Path | str, state: Mapping[str, Any], plan: ShardingPlan) -> None:
    """Writes a checkpoint with its plan; all ranks call it. It is there as a whole or not at all.

    Until the last file, `.metadata`, is written, the folder is no checkpoint. A rank copies one
    shard at a time.

    Args:
        folder: New folder, which all ranks see; or one of each rank, to be joined afterwards, as
            `ray.train.report` does.
        state: What to save, such as `{"model": model, "optimizer": optimizer}` with a
            `CombinedOptimizer` of `model.fused_optimizer` and the optimizers of dense layers and
            copies. Objects are saved by their `state_dict`.
        plan: Plan by which the model is sharded.

    Raises:
        UserError: The folder has a checkpoint already, or cannot be written.
    """
    with _one_line(folder):
        # A file for each shard: torch 2.13 keeps copies of all that goes into one file.
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, overwrite=False)
        dcp.save({**state, _PLAN: json.dumps(plan.to_json())}, storage_writer=writer)


def load_checkpoint(folder: Path | str, state: MutableMapping[str, Any]) -> None:
    """Loads a checkpoint of any plan and number of ranks into a state, in place.

    All ranks call it. Beside the model, a rank holds one shard of the checkpoint at a time.
    Weights, and the state of SGD and Adagrad, are what they were. Row-wise Adagrad has one number
    per row and column slice: a slice gets the mean of the slices that it replaces, weighted by the
    columns that it has of each. That is exact where slices are joined; a slice of what was one gets
    the number of the whole. A copy's `sum` gets the number of its row, and its mean is given back.

    Args:
        folder: A checkpoint that `save_checkpoint` or `torch.distributed.checkpoint.save` wrote.
        state: Model, optimizer and all else in the form in which they were saved. Values that are
            neither tensors nor objects with a state, such as a number of steps, are replaced.

    Raises:
        UserError: There is no checkpoint, or it is of other tables, hot rows or optimizers. The
            state is as it was, unless a file cannot be read.
    """
    with _one_line(folder):
        _check_is_there(folder)
        reader = _Reader(folder)
        # In place: `load_state_dict` of a model fails on slices of different widths.
        models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
        found = {**state, **{key: model.state_dict() for key, model in models.items()}}
        dcp.load(found, storage_reader=reader, planner=ReshardingPlanner(reader))
        state.update({key: value for key, value in found.items() if key not in models})


def plan_of_checkpoint(folder: Path | str) -> ShardingPlan:
    """Returns the plan that `save_checkpoint` wrote; needs no process group.

    Raises:
        UserError: There is no checkpoint, or it has no plan.
    """
    with _one_line(folder):
        _check_is_there(folder)
        reader, planner, found = dcp.FileSystemReader(folder), DefaultLoadPlanner(), {_PLAN: ""}
        metadata = reader.read_metadata()
        if _PLAN not in metadata.state_dict_metadata:
            raise UserError("has no plan: save_checkpoint writes one")
        planner.set_up_planner(found, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        return ShardingPlan.from_json(json.loads(found[_PLAN]))


class _Reader(dcp.FileSystemReader):
    """Reads one shard at a time; the base holds one until it has read the next."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan says."""
        for item in plan.items:
            super().read_data(replace(plan, items=[item]), planner)
        return super().read_data(replace(plan, items=[]), planner)


@contextmanager
def _one_line(folder: Path | str) -> Iterator[None]:
    """Raises UserError, with the folder, for what is wrong with a checkpoint on any rank."""
    try:
        yield
    except (CheckpointException, UserError, *_UNREADABLE) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
            cause = next((each for each in causes if isinstance(each, UserError)), causes[0])
        raise UserError(f"{folder}: {_told(cause)}") from error


def _check_is_there(folder: Path | str) -> None:
    if not (Path(folder) / ".metadata").is_file():
        raise UserError("is no checkpoint: it has no file .metadata, which is written last")


_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError)


def _told(cause: BaseException) -> str:
    if isinstance(cause, UserError):
        return str(cause)
    if "Checkpoint already exists" in str(cause):
        return "has a checkpoint already: save into a new folder"
    reason = (str(cause) or type(cause).__name__).splitlines()[0][:160]
    return f"the checkpoint cannot be used: {reason}"
