"""Noticing that the machine has become slower, while nothing on it seems to have changed.

Other tenants of the same physical core, cache or memory slow a thread down by up to a half without
taking its core: no clock and no counter shows it, and an operator's own times cannot tell a slow
moment from a costly shard. So before each timed iteration a small, fixed piece of work is timed
too. How slow it is, against how fast it has been on this core, says whether to believe it.
"""

import time
from collections import deque

import numpy as np
import torch

_WINDOW = 3000  # values that the quiet level is taken from: a minute or two of measuring
_QUIET_QUANTILE = 0.1
_REFRESH = 32  # values between two looks at the quantile
_PRIMING_ROUNDS, _PRIMING_PAUSE_S = 60, 0.01
_ROWS, _GATHERED = 2**16, 4000  # 256 KiB, at home in any core's own cache
_LIMIT = 1.15  # times the quiet level


class QuietLevel:
    """What a repeated piece of work takes when nobody disturbs it: a low quantile of its times."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._level = float("inf")
        self._due = 0

    def slowdown(self, milliseconds: float) -> float:
        """This time over the quiet level, which learns from it."""
        self._times.append(milliseconds)
        self._due -= 1
        if self._due <= 0:
            self._level = float(np.quantile(self._times, _QUIET_QUANTILE))
            self._due = min(_REFRESH, len(self._times))
        return milliseconds / self._level


class Canary:
    """A gather of rows from the core's own cache: it feels a busy sibling thread or a lower clock,
    and nothing of what the operator before it left in the shared cache.
    """

    def __init__(self) -> None:
        self._rows = torch.ones(_ROWS)
        draw = torch.Generator().manual_seed(0)
        self._places = torch.randint(0, _ROWS, (_GATHERED,), generator=draw)
        self._level = QuietLevel()
        for _ in range(_PRIMING_ROUNDS):
            self.slowdown()
            time.sleep(_PRIMING_PAUSE_S)

    def slowdown(self) -> float:
        """How slow the core is right now; above 1 it is not to be believed."""
        self._rows[self._places]  # brings the rows into the cache
        start = time.thread_time_ns()
        self._rows[self._places]
        return self._level.slowdown((time.thread_time_ns() - start) / 1e6) / _LIMIT
