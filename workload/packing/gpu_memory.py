"""Limits of GPUs: memory that training needs in addition to tables and outputs, and columns."""

from dataclasses import replace

from autoshard.workload.errors import UserError
from autoshard.workload.plans.plan import PlanError
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.operators import FLOAT_BYTES, INDEX_BYTES
from autoshard.workload.tasks.task import Device, ShardingTask

_CUDA_BYTES = 1_000_000_000  # context and kernels of torch, fbgemm and NCCL
_NCCL_BYTES = 500_000_000  # buffers of its channels
_FRAGMENTED_SHARE = 0.03  # of the memory, that torch's allocator cannot use
_BATCHES = 3  # in flight: one is copied to the GPU, one distributed, one trained on
MAX_COLUMNS = 2048  # of a table that FBGEMM's operator accepts
SORT_BYTES = 52  # keys, values and runs of a lookup while the backward pass sorts lookups by row


def on_gpus(task: ShardingTask) -> ShardingTask:
    """Returns the task with the memory that training takes of its GPUs.

    Lookups take the sort buffers of the backward pass and wait in several batches. Reserved are the
    CUDA context, NCCL's buffers, a share for fragmentation, and what a rank holds of its own
    samples by any plan: their indices, and the pooled embeddings that it receives, with gradients.

    Raises:
        UserError: A table has more columns than FBGEMM accepts.
        PlanError: A GPU has no memory left for tables.
    """
    for table in task.tables:
        if table.dim > MAX_COLUMNS:
            raise UserError(
                f"table {table.name} has {table.dim:,} columns, and FBGEMM's operator takes at "
                f"most {MAX_COLUMNS:,} on GPUs: make two tables of it in the model"
            )
    samples = -(-task.batch_size // len(task.devices))
    lookups = sum(table.pooling_factor for table in task.tables)
    of_samples = samples * (_BATCHES * lookups * INDEX_BYTES + 2 * task.columns * FLOAT_BYTES)
    fixed = _CUDA_BYTES + _NCCL_BYTES + round(of_samples)
    per_lookup = _BATCHES * INDEX_BYTES + SORT_BYTES
    return replace(
        task,
        devices=tuple(_reserved(device, fixed) for device in task.devices),
        operator=replace(task.operator, lookup_bytes=per_lookup),
    )


def _reserved(device: Device, fixed: int) -> Device:
    taken = fixed + round(_FRAGMENTED_SHARE * device.memory_bytes)
    if taken >= device.usable_bytes:
        raise PlanError(
            f"{device.name} has {format_bytes(device.usable_bytes)}, and training takes "
            f"{format_bytes(taken)} for CUDA, NCCL, fragmentation and a rank's samples alone"
        )
    return replace(device, reserved_bytes=device.reserved_bytes + taken)
