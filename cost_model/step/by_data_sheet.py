"""What a training step takes on a GPU beside the operators, from its data sheet.

What TorchRec and FBGEMM do to lookups and outputs is read from their code (TorchRec 1.8, FBGEMM
1.8): which tensors a kernel reads and writes, and how many kernels there are. Copies of tensors are
bounded by the bandwidth of memory, kernels that move single ids reach less of it, and small kernels
take as long as their launch. Nobody has measured these shares on a GPU with this package, so
members differ in them as much as published figures do:

- Copies reach 75 to 92 % of the memory's bandwidth in published STREAM-like tests of GPUs.
- Permutes and bucketizing of ids are taken to reach a third of it: a guess, with a wide deviation.
- A small kernel takes 2 to 6 us on the GPU with the gap to the next one, where the host is ahead.

A loop that does not pipeline waits for the host after each exchange of sizes. Its time is that of
Python, and differs more between hosts than between GPUs; it is the same for all plans.
"""

from dataclasses import replace

from autoshard.cost_model.step.drawn_figures import (
    L2_OVER_MEMORY,
    REFERENCE_GB_S,
    SORT_NS,
    Figure,
    drawn,
)
from autoshard.cost_model.step.option_overheads import CopyOverhead, HotOverhead, RowOverhead
from autoshard.cost_model.step.overhead import DirectionOverhead, StepOverhead
from autoshard.workload import OperatorOptions
from autoshard.workload.data_sheets import DataSheet
from autoshard.workload.tables.operators import FLOAT_BYTES, INDEX_BYTES, WEIGHT_BYTES

_FIGURES = {
    "copy_share": Figure(0.80, 0.10),  # of the memory's bandwidth, by copies of tensors
    "id_share": Figure(0.33, 0.50),  # by kernels that move ids
    "l2_over_memory": L2_OVER_MEMORY,
    "sort_ns": SORT_NS,
    "kernel_us": Figure(4.0, 0.40),  # of a small kernel
    "host_ms": Figure(0.6, 0.70),  # of a step, in which the GPU waits for the host
    "exchanges": Figure(1.0, 0.15),  # of what exchanges take by their links
}
_SEED = 1  # other draws than those of operators

# Kernels of a step that are launched for any tables, by TorchRec's code.
_FORWARD_KERNELS = 8  # order of received ids, offsets, bounds check, copy into the buffer to send
_BACKWARD_KERNELS = 4  # gradients: contiguous, divided by the number of ranks
_SHARED_KERNELS = 16  # order of own ids, sizes, concatenation of outputs, order of their gradients
_ROW_KERNELS = 16  # bucketizing, and all of a further operator
_COPY_KERNELS = 30  # a further operator and its sort, buckets of gradients, their optimizer
_HOT_KERNELS = 12  # of each feature: comparisons, numbers, lengths, sum of both parts
# Bytes that are read and written, of int64 ids and lengths and of fp32 outputs.
_MOVED = 2  # a copy reads and writes
_LOOKUP_BYTES = INDEX_BYTES * (_MOVED + 1)  # order, bounds check
_BAG_BYTES = INDEX_BYTES * 2 * _MOVED  # lengths in order, offsets
_FORWARD_OUTPUT_BYTES = FLOAT_BYTES * _MOVED  # copy into the buffer to send
_BACKWARD_OUTPUT_BYTES = FLOAT_BYTES * _MOVED  # division
_OWN_OUTPUT_BYTES = FLOAT_BYTES * 2 * _MOVED  # concatenation, order of gradients
_REGROUPED_BYTES = FLOAT_BYTES * 2 * _MOVED  # forward, backward
_BUCKETIZED_BYTES = INDEX_BYTES * 5  # ids are read twice, their blocks, numbers and order written
_HOT_LOOKUP_BYTES = INDEX_BYTES * 10
_HOT_BAG_BYTES = INDEX_BYTES * 10
_HASH_BYTES = INDEX_BYTES * 6
# Of each weight of a copy: its gradient is cleared, copied and divided, and read by the optimizer.
_GRADIENT_BYTES = FLOAT_BYTES * (1 + _MOVED + _MOVED + 1)
_US = 1e-3  # in ms


def overhead_of_sheet(sheet: DataSheet, operator: OperatorOptions) -> StepOverhead:
    """Returns what a step of TorchRec takes beside operators on a GPU.

    Args:
        sheet: Its data sheet.
        operator: Weights and optimizer, which the dense part's optimizer of copies is like.
    """
    usual = {name: figure.value for name, figure in _FIGURES.items()}
    members = tuple(_overhead(sheet, operator, each) for each in drawn(_FIGURES, _SEED))
    return replace(_overhead(sheet, operator, usual), members=members)


def _overhead(
    sheet: DataSheet, operator: OperatorOptions, figures: dict[str, float]
) -> StepOverhead:
    copied = 1 / (sheet.memory_gb_s * figures["copy_share"])  # ns of a byte
    moved_ids = 1 / (sheet.memory_gb_s * figures["id_share"])
    cached = 1 / (sheet.memory_gb_s * figures["l2_over_memory"])
    kernel_ms = _US * figures["kernel_us"]
    own_outputs_ns = copied * _OWN_OUTPUT_BYTES
    regrouped_ns = copied * _REGROUPED_BYTES
    ids_in_order_ns = moved_ids * INDEX_BYTES * _MOVED
    weight_bytes = WEIGHT_BYTES[operator.weights]
    state_bytes = {"adagrad": FLOAT_BYTES * _MOVED}.get(operator.optimizer, 0)
    row_bytes = weight_bytes + FLOAT_BYTES  # of an element: looked up, and its gradient added
    return StepOverhead(
        forward=DirectionOverhead(
            operator=1.0,
            lookup_ns=moved_ids * _LOOKUP_BYTES,
            output_ns=copied * _FORWARD_OUTPUT_BYTES,
            bag_ns=moved_ids * _BAG_BYTES,
            start_ms=_FORWARD_KERNELS * kernel_ms,
        ),
        backward=DirectionOverhead(
            operator=1.0,
            lookup_ns=0.0,
            output_ns=copied * _BACKWARD_OUTPUT_BYTES,
            bag_ns=0.0,
            start_ms=_BACKWARD_KERNELS * kernel_ms,
        ),
        shared_lookup_ns=ids_in_order_ns,
        shared_output_ns=own_outputs_ns,
        shared_feature_ms=0.0,
        regrouped_ns=regrouped_ns,
        split_sample_ns=moved_ids * INDEX_BYTES * _MOVED,
        shared_ms=_SHARED_KERNELS * kernel_ms + figures["host_ms"],
        copies=CopyOverhead(
            start_ms=_COPY_KERNELS * kernel_ms,
            lookup_ns=copied * INDEX_BYTES
            + figures["sort_ns"] * REFERENCE_GB_S / sheet.memory_gb_s,
            gathered_ns=cached * row_bytes,
            output_ns=2 * copied * FLOAT_BYTES + regrouped_ns / 2,
            weight_ns=copied * (_GRADIENT_BYTES + _MOVED * weight_bytes + state_bytes),
        ),
        # Sums are scattered as they lie, and are neither concatenated nor put in order.
        rows=RowOverhead(
            start_ms=_ROW_KERNELS * kernel_ms,
            saved_sum_ns=copied * _FORWARD_OUTPUT_BYTES,
            saved_output_ns=own_outputs_ns,
            lookup_ns=moved_ids * _BUCKETIZED_BYTES - ids_in_order_ns,
        ),
        hot_rows=HotOverhead(
            hash_ns=moved_ids * _HASH_BYTES,
            table_ms=_HOT_KERNELS * kernel_ms,
            lookup_ns=moved_ids * _HOT_LOOKUP_BYTES,
            bag_ns=moved_ids * _HOT_BAG_BYTES,
            output_ns=copied * FLOAT_BYTES * 3,
        ),
        exchange_factor=figures["exchanges"],
    )
