"""Time limits of commands (`--seconds`)."""

import math
import time
from collections.abc import Callable

from autoshard.workload import UserError


class Budget:
    """A number of seconds from now on, or unlimited time.

    Args:
        seconds: Time limit; None for no limit.
        clock: Returns the current time, in seconds.
    """

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if seconds is not None and not seconds > 0:
            raise UserError(f"--seconds must be more than 0, got {seconds:g}")
        self.seconds = seconds
        self.clock = clock
        self._began = clock()

    @property
    def is_limited(self) -> bool:
        """Whether there is a time limit."""
        return self.seconds is not None

    @property
    def is_spent(self) -> bool:
        """Whether the time is over."""
        return self.left_s() <= 0

    def left_s(self) -> float:
        """Returns the seconds that remain; infinity without a limit."""
        if self.seconds is None:
            return math.inf
        return max(0.0, self._began + self.seconds - self.clock())

    def at_most(self, seconds: float | None) -> float | None:
        """Returns the smaller of `seconds` and the seconds that remain; None for None."""
        return None if seconds is None else min(seconds, self.left_s())

    def part(self, share: float) -> "Budget":
        """Returns a budget of this share of the remaining time, from now on."""
        return Budget(max(self.left_s() * share, 1e-3) if self.is_limited else None, self.clock)

    def __str__(self) -> str:
        return f"--seconds {self.seconds:g}"
