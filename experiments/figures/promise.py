"""Whether collect_costs.py takes as long as it says at its start, and keeps to its `--seconds`."""

from pathlib import Path

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.experiments.collect_costs import collect
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.figures.figure import Figure
from autoshard.workload import load_tables, random_shards

_TABLES = "synthetic:200:1:small"
_SETTINGS = MeasureSettings(1024)
_SHARDS, _MOST_TABLES = 160, 20
_SECONDS = 20.0


def promise_of_time_figures(folder: Path) -> list[Figure]:
    """The promise over what came of it, and how much of a budget is taken. Ray must be running."""
    tables = load_tables(_TABLES)
    pool = BenchmarkPool(folder / "promise.db", kind="cpu")
    try:
        all_of_them = collect(pool, random_shards(tables, _SHARDS, _MOST_TABLES, 11), _SETTINGS)
        many = random_shards(tables, 10 * _SHARDS, _MOST_TABLES, 12)
        hurried = collect(pool, many, _SETTINGS, Budget(_SECONDS))
    finally:
        pool.close()
        pool.shutdown()
    promised = all_of_them.promised_seconds or float("nan")
    return [
        Figure(
            f"seconds told at the start for {_SHARDS} shards, over seconds taken",
            "0.67 to 1.33",
            promised / all_of_them.seconds,
        ),
        Figure(
            f"seconds taken with --seconds {_SECONDS:g}, over these",
            "0.7 to 1.1",
            hurried.seconds / _SECONDS,
        ),
    ]
