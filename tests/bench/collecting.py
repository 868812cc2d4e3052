"""Whether collect_costs.py takes as long as it says at its start, and keeps to its `--seconds`."""

from pathlib import Path

from autoshard.experiments.collecting.collection import collect
from autoshard.experiments.console.budget import Budget
from autoshard.workload import load_tables, random_shards
from bench.figure import Figure
from bench.workbench import SETTINGS, TABLES, cpu_pool

_SHARDS, _MOST_TABLES = 100, 20
_MORE_SHARDS = 1_600  # than can be measured in that time
_SECONDS = 20.0


def collecting_figures(folder: Path) -> list[Figure]:
    """The promise over what came of it, and how much of a budget is taken."""
    tables = load_tables(TABLES)
    with cpu_pool(folder / "collected.db") as pool:
        every = collect(pool, random_shards(tables, _SHARDS, _MOST_TABLES, 11), SETTINGS)
        many = random_shards(tables, _MORE_SHARDS, _MOST_TABLES, 12)
        hurried = collect(pool, many, SETTINGS, Budget(_SECONDS))
    told = every.promised_seconds
    return [
        Figure(
            f"seconds told at the start for {_SHARDS} shards, over seconds taken",
            "0.67 to 1.33",
            None if told is None else told / every.seconds,
        ),
        Figure(
            f"seconds taken with --seconds {_SECONDS:g}, over these",
            "0.7 to 1.1",
            hurried.seconds / _SECONDS,
        ),
    ]
