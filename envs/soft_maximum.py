"""A norm over devices in place of the maximum.

Unlike the maximum, it also falls where devices that are not the slowest become even.
"""

from torch import Tensor

_POWER = 12.0
_MIN_SUM = 1e-24  # minimum sum of such powers


def powers(values: Tensor) -> Tensor:
    """Returns the powers whose sums are those of norms; of relative values near 1."""
    squares = values * values
    fourths = squares * squares
    return fourths * fourths * fourths


def root_of(sums: Tensor) -> Tensor:
    """Returns the norms, given sums of powers."""
    return sums.clamp_min(_MIN_SUM) ** (1 / _POWER)
