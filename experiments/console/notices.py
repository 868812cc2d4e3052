"""What the pool has noticed, for people."""

from autoshard.benchmark import BenchmarkPool
from autoshard.experiments.console import cli


class Notices:
    """Tells each notice once, however often the pool repeats it."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, pool: BenchmarkPool) -> None:
        """What is new."""
        for notice in pool.notices():
            subject = notice.partition(":")[0]  # how much of a load is told once
            if subject not in self._told:
                self._told.add(subject)
                cli.console.print(f"note: {notice}", markup=False, soft_wrap=True)
