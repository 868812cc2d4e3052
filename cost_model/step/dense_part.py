"""What the dense part of a model takes on a GPU, by a count of its matrix products.

Layers that are not matrix products are left out, as are all-reduces of dense gradients, which
training overlaps with the backward pass.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from autoshard.workload.data_sheets import DataSheet
from autoshard.workload.errors import UserError

# Of its peak that a GPU reaches, by MLPerf's steps on A100 to B200 (tests/published_points.py).
_SHARE = 0.45
_FLOPS = 6  # of each weight and sample: a product and a sum, forward and twice backward
_GIGA = 1e9


def read_layers(text: str) -> list[list[int]]:
    """Parses layers such as `13-512-256-128,3456-1024-1`: widths of each stack, from its input on.

    Raises:
        UserError: It is none of this form.
    """
    stacks = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d*(-[1-9]\d*)+", stack) for stack in stacks):
        raise UserError(
            "--dense-layers takes the widths of each stack of layers from its input on, such as "
            f"13-512-256-128,3456-1024-1024-512-256-1, got {text!r}"
        )
    return [[int(width) for width in stack.split("-")] for stack in stacks]


def dense_ms(layers: Sequence[Sequence[int]], samples: float, sheet: DataSheet) -> float:
    """Returns the milliseconds of forward and backward of stacks of fully connected layers.

    Args:
        layers: Widths of each stack, from its input on.
        samples: Samples of a rank.
        sheet: Data sheet of its GPU.

    Raises:
        UserError: The data sheet does not say how fast the GPU multiplies.
    """
    if sheet.tflops is None:
        raise UserError(
            f"the data sheet of {sheet.name} has no tflops, which --dense-layers needs: add the "
            "dense bfloat16 TFLOPS (989 of an H100), or give --dense-ms"
        )
    weights = sum(before * after for stack in layers for before, after in pairwise(stack))
    return _FLOPS * weights * samples / (_SHARE * sheet.tflops * _GIGA)
