"""Tables, settings and pools that several groups share."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.benchmark.machine.hardware import physical_cores
from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.threads import one_thread
from autoshard.experiments.console import cli
from autoshard.sharders import SharderContext, load_policy
from autoshard.workload import ShardingTask

TABLES = "synthetic:200:1:small"
SETTINGS = MeasureSettings(1024)


@contextmanager
def cpu_pool(store: Path, max_devices: int | None = None) -> Iterator[BenchmarkPool]:
    """Provides a pool on the machine's cores and ends it, so that the next has new processes."""
    pool = BenchmarkPool(store, kind="cpu", max_devices=max_devices)
    try:
        yield pool
    finally:
        pool.close()
        pool.shutdown()


@contextmanager
def on_one_core() -> Iterator[int]:
    """Pins this process to a core, with one thread, as an actor is; returns the core's number."""
    core, before = physical_cores()[-1], os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with one_thread():
            yield core
    finally:
        os.sched_setaffinity(0, before)


def say(what: str) -> None:
    """Prints what is being measured."""
    cli.console.print(f"measuring: {what}", soft_wrap=True)


def context_of(task: ShardingTask) -> SharderContext:
    """Returns the shipped model, priced for a task, and the shipped policy."""
    model = load_model("cpu").for_objective(task.objective, len(task.devices))
    return SharderContext(EstimatedCosts(model, task.batch_size), load_policy("cpu"))
