"""What most figures are taken with: the same tables, the same settings, a pool for a while."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.benchmark.hardware import physical_cores
from autoshard.cost_model.training import one_thread
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


@contextmanager
def on_one_core() -> Iterator[int]:
    """This process pinned to a core, with one thread, as an actor is; the core's number."""
    core, before = physical_cores()[-1], os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with one_thread():
            yield core
    finally:
        os.sched_setaffinity(0, before)


def say(what: str) -> None:
    """Tell what is being measured."""
    cli.console.print(f"measuring: {what}", soft_wrap=True)
