"""What fills each device, by part, and what is free."""

from collections.abc import Iterator

from autoshard.experiments.explaining.layout import Part, report
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.operators import MemoryParts

_MB = 1e6
_TITLE = "memory (MB; inputs and outputs are a batch's, with gradients of the outputs)"


def memory_parts(plan: ShardingPlan, task: ShardingTask) -> Iterator[Part]:
    """A row a device: MB of each part, what is kept for others if anything is, what is free."""
    reserved = any(device.reserved_bytes for device in task.devices)
    told = (*MemoryParts._fields, *(["reserve"] if reserved else []), "free", "of")
    shown = report(("device", *told, "full"))
    for device, parts in zip(task.devices, plan.device_memory(task), strict=True):
        kept = [device.reserved_bytes] if reserved else []
        sizes = (*parts, *kept, device.room_bytes - parts.total, device.memory_bytes)
        full = (parts.total + device.reserved_bytes) / device.memory_bytes
        shown.add_row(device.name, *(f"{size / _MB:,.1f}" for size in sizes), f"{full:.1%}")
    yield _TITLE
    yield shown
