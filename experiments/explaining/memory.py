"""What fills each device, by part, and what is free."""

from collections.abc import Iterator

from autoshard.experiments.explaining.layout import Part, report
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.operators import MemoryParts

_MB = 1e6


def memory_parts(plan: ShardingPlan, task: ShardingTask) -> Iterator[Part]:
    """A row a device: MB of each part, what is free, and what may be filled."""
    shown = report(("device", *MemoryParts._fields, "free", "of", "full"))
    for device, parts in zip(task.devices, plan.device_memory(task), strict=True):
        room = device.memory_bytes
        sizes = (*parts, room - parts.total, room)
        shown.add_row(
            device.name, *(f"{size / _MB:,.1f}" for size in sizes), f"{parts.total / room:.1%}"
        )
    yield "memory (MB; inputs and outputs are a batch's, with gradients of the outputs)"
    yield shown
