"""What a repeated piece of work takes when nobody disturbs it."""

from collections import deque

import numpy as np

_WINDOW = 3000  # values that the quiet level is taken from, so that old ones are forgotten
_QUIET_QUANTILE = 0.1
_REFRESH = 32  # values between two looks at the quantile


def quiet_level(times_ms: list[float] | deque[float]) -> float:
    """A low quantile: some values are luck, and all others only ever too high."""
    return float(np.quantile(times_ms, _QUIET_QUANTILE))


class QuietLevel:
    """The quiet level of work that is timed again and again."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._level = float("inf")
        self._due = 0

    def slowdown(self, milliseconds: float) -> float:
        """This time over the quiet level, which learns from it."""
        self._times.append(milliseconds)
        self._due -= 1
        if self._due <= 0:
            self._level = quiet_level(self._times)
            self._due = min(_REFRESH, len(self._times))
        return milliseconds / self._level
