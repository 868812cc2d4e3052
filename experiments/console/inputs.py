"""What several commands read: devices, as `--memory-gb 16,16,32` gives them, and plans in files."""

from pathlib import Path

from autoshard.workload import Device, ShardingPlan, ShardingTask, UserError, documents

_GB = 2**30
_MAX_GB = 2**32  # more than there is


def read_devices(memory_gb: str, count: int, told: str) -> tuple[Device, ...]:
    """Of one memory for all, or of one for each.

    UserError unless there are 1 or `count` numbers; `told` says where that count is from.
    """
    try:
        numbers = [float(part) for part in memory_gb.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < _MAX_GB for number in numbers):
        raise UserError(
            f"--memory-gb must be a number more than 0, or one for each device as in 16,16,32, "
            f"got {memory_gb!r}"
        )
    if len(numbers) not in (1, count):
        raise UserError(
            f"--memory-gb names {len(numbers)} devices and {told} {count}: give one number for "
            "all, or one for each"
        )
    each = numbers * (count // len(numbers))
    return tuple(Device(f"device{n}", int(number * _GB)) for n, number in enumerate(each))


def read_plan(path: Path, task: ShardingTask, fitting: bool) -> ShardingPlan:
    """Reads a plan of the task; UserError names the file and says how it differs from the task.

    With `fitting`, the plan must be valid in all respects, as one that is to run. A plan that runs
    already need not fit into the memory, nor obey the constraints, of the task.
    """
    plan = ShardingPlan.load(path)
    with documents.naming(path):
        (plan.check if fitting else plan.check_places)(task)
    return plan
