"""What a sweep costs beyond the training in it: one of the README's figures."""

from pathlib import Path

from autoshard.experiments import tune_shard
from autoshard.experiments.sweeps.config import TuneShardConfig
from autoshard.workload import documents
from bench.figure import Figure


def sweep_figures(folder: Path) -> list[Figure]:
    """A sweep of a dozen trials with ASHA and Optuna, from Ray's start to the winner's test."""
    told = folder / "sweep.json"
    tune_shard.main(
        TuneShardConfig(
            num_samples=12,
            max_iterations=30,
            tables="synthetic:400:1:small",
            storage=str(folder / "sweep"),
            json=told,
            mlflow_uri=f"sqlite:///{folder}/sweep-mlflow.db",
        )
    )
    result = documents.read(told)
    return [
        Figure(
            "a sweep's time over that of its training, divided by what runs at once",
            "at most 1.3",
            result["overhead"],
        )
    ]
