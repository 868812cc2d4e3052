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
