"""What most figures are taken with: the same tables, the same settings, a pool for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.experiments.console import cli

TABLES = "synthetic:200:1:small"
SETTINGS = MeasureSettings(1024)


@contextmanager
def cpu_pool(store: Path, most_devices: int | None = None) -> Iterator[BenchmarkPool]:
    """A pool on the machine's cores, which is ended: the next one starts with new processes."""
    pool = BenchmarkPool(store, kind="cpu", most_devices=most_devices)
    try:
        yield pool
    finally:
        pool.close()
        pool.shutdown()


def say(what: str) -> None:
    """Tell what is being measured."""
    cli.console.print(f"measuring: {what}", soft_wrap=True)
