"""Whether collect_costs.py predicts its time, and keeps to `--seconds`."""

from pathlib import Path

from autoshard.experiments.collecting.collection import collect
from autoshard.experiments.console.budget import Budget
from autoshard.workload import load_tables, random_shards
from bench.metric import Metric
from bench.workbench import SETTINGS, TABLES, cpu_pool

_SHARDS, _MOST_TABLES = 100, 20
_MORE_SHARDS = 1_600  # more than can be measured in that time
_SECONDS = 20.0


def collecting_metrics(folder: Path) -> list[Metric]:
    """Measures predicted over actual time, and time taken over a budget."""
    tables = load_tables(TABLES)
    with cpu_pool(folder / "collected.db") as pool:
        every = collect(pool, random_shards(tables, _SHARDS, _MOST_TABLES, 11), SETTINGS)
        many = random_shards(tables, _MORE_SHARDS, _MOST_TABLES, 12)
        hurried = collect(pool, many, SETTINGS, Budget(_SECONDS))
    predicted = every.promised_seconds
    return [
        Metric(
            f"predicted over actual time to collect {_SHARDS} shards",
            "0.67 to 1.33",
            None if predicted is None else predicted / every.seconds,
        ),
        Metric(
            f"time taken over budget, --seconds {_SECONDS:g}",
            "0.7 to 1.1",
            hurried.seconds / _SECONDS,
        ),
    ]
