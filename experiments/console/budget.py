"""`--seconds`: how long a command may take."""

import math
import time
from collections.abc import Callable

from autoshard.workload import UserError


class Budget:
    """So many seconds from now on; without a limit, as many as it takes.

    Args:
        seconds: None: no limit.
        clock: seconds.
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
        """True if it can be spent at all."""
        return self.seconds is not None

    @property
    def is_spent(self) -> bool:
        """True once nothing more should be begun."""
        return self.left_s() <= 0

    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit."""
        if self.seconds is None:
            return math.inf
        return max(0.0, self._began + self.seconds - self.clock())

    @property
    def left_share(self) -> float:
        """Of all its seconds; 1 without a limit."""
        return 1.0 if self.seconds is None else self.left_s() / self.seconds

    def at_most(self, seconds: float | None) -> float | None:
        """So many seconds, or those that are left if these are fewer; None if it is not known."""
        return None if seconds is None else min(seconds, self.left_s())

    def part(self, share: float) -> "Budget":
        """One of its own, of that share of what is left, from now on."""
        left_s = self.left_s()
        return Budget(None if math.isinf(left_s) else max(left_s * share, 1e-3), self.clock)

    def __str__(self) -> str:
        return f"--seconds {self.seconds:g}"
