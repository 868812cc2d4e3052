"""Figures that published sources give, each with what these leave open.

Members of an ensemble draw them anew, so that prices differ as much as the sources do.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

MEMBERS = 8


class Figure(NamedTuple):
    """A figure, and the standard deviation of its logarithm."""

    value: float
    deviation: float


# Of operators, and of what training does beside them.
L2_OVER_MEMORY = Figure(1.64, 0.25)  # bandwidth of the L2 cache
SORT_NS = Figure(0.30, 0.4)  # of a lookup before the backward pass, and its runs
REFERENCE_GB_S = 3350.0  # bandwidth of an H100's memory, to which times of work in it refer


def drawn(figures: Mapping[str, Figure], seed: int) -> list[dict[str, float]]:
    """Returns the figures of each member, of which equally many are larger and smaller."""
    draws = torch.randn(MEMBERS, len(figures), generator=torch.Generator().manual_seed(seed))
    draws = (draws - draws.mean(0)) / draws.std(0, correction=0)  # else eight draws are off
    return [
        {
            name: figure.value * math.exp(figure.deviation * number)
            for (name, figure), number in zip(figures.items(), draw, strict=True)
        }
        for draw in draws.tolist()
    ]
