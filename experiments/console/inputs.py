"""Values and files that options of several commands name.

Ranges (`20-100`), devices (`16,16,32`), tasks and plan files are read; files and folders of results
are checked before the work.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    ShardingPlan,
    ShardingTask,
    UserError,
    documents,
)
from autoshard.workload.bounds import MAX_DEVICES, MAX_GB

if TYPE_CHECKING:  # heavy, and options are read before
    from autoshard.cost_model import CostModel

Number = TypeVar("Number", int, float)

PICTURES = (".png", ".svg")
_GB = 2**30


def read_range(
    text: str, option: str, number: Callable[[str], Number], most: float = math.inf
) -> tuple[Number, Number]:
    """Returns the lower and upper end of `2-8`, or of a single number; UserError otherwise."""
    first, dash, last = text.partition("-")
    try:
        low = number(first)
        high = number(last) if dash else low
    except ValueError as error:
        kind = "whole number" if number is int else "number"
        raise UserError(f"{option}: a {kind} or a range such as 2-8, got {text!r}") from error
    if high > most:
        raise UserError(f"{option} must be at most {most}, got {text}")
    return low, high


def read_devices(memory_gb: str, count: int, source: str) -> tuple[Device, ...]:
    """Returns `count` devices with the memory of `--memory-gb`, in GB of 2^30 bytes.

    Raises:
        UserError: There are not 1 or `count` numbers; the message names the source of `count`.
    """
    if count > MAX_DEVICES:
        raise UserError(f"{source}: plans are for at most {MAX_DEVICES} devices, got {count}")
    try:
        numbers = [float(part) for part in memory_gb.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 / _GB <= number < MAX_GB for number in numbers):
        raise UserError(
            f"--memory-gb must be a number more than 0, or one for each device as in 16,16,32, "
            f"got {memory_gb!r}"
        )
    if len(numbers) not in (1, count):
        raise UserError(
            f"--memory-gb names {len(numbers)} devices and {source} {count}: give one number for "
            "all, or one for each"
        )
    sizes = numbers * (count // len(numbers))
    return tuple(Device(f"device{n}", int(size * _GB)) for n, size in enumerate(sizes))


def build_task(
    tables: tuple[EmbeddingTable, ...],
    devices: tuple[Device, ...],
    batch_size: int,
    model: "CostModel",
    objective: Objective,
    constraints: Path | None,
) -> ShardingTask:
    """Returns the task of a cost model's operator, with what training takes of the memory of GPUs.

    Raises:
        PlanError: GPUs have no memory left for tables.
        UserError: The file of constraints is wrong.
    """
    operator = model.provenance.operator
    task = ShardingTask(tables, devices, batch_size, operator, objective=objective)
    if constraints is not None:
        from autoshard.workload import Constraints  # loads YAML

        task = Constraints.of_file(constraints, task)
    if model.kind != "cuda":
        return task
    from autoshard.workload.packing.gpu_memory import on_gpus

    return on_gpus(task)


def read_plan(
    path: Path, task: ShardingTask, fitting: bool, any_devices: bool = False
) -> ShardingPlan:
    """Returns the plan in a file; UserError if it is not one of the task.

    Args:
        path: The file.
        task: The task.
        fitting: Whether it must also fit into the memory and keep the constraints of the task.
        any_devices: Whether it may be for another number of devices, whose memory is not known.
    """
    plan = ShardingPlan.load(path)
    with documents.naming(path):
        if plan.replicas is not None:
            raise UserError(
                f"is the plan of one of {plan.replicas.count} replica groups, which this command "
                "does not read: give a plan for all devices"
            )
        if any_devices and plan.num_devices != len(task.devices):
            plan.check_columns(task.tables)
            plan.check_options(task)
        elif fitting:
            plan.check(task)
        else:
            plan.check_places(task)
            plan.check_options(task)
    return plan


def check_file(path: Path | None, option: str, suffixes: Sequence[str] = ()) -> None:
    """Raises UserError unless the option is None or a file that can be written."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path}: is a folder: name a file for {option}")
    if path.exists() and not path.is_file():  # root would replace it
        raise UserError(f"{path}: is a device: name a file for {option}")
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{path}: name a file that ends in {' or '.join(suffixes)} for {option}")
    _check_writable(path, path.parent)


def check_folder(path: Path | None, option: str) -> None:
    """Raises UserError unless the option is None or a folder that exists or can be created."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file: name a folder for {option}")
    _check_writable(path, path)


def _check_writable(path: Path, folder: Path) -> None:
    """Writes to the nearest folder that exists, and leaves nothing behind."""
    where = folder.absolute()
    while not where.exists():
        where = where.parent
    try:
        tempfile.TemporaryFile(dir=where).close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
