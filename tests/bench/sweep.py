"""Overhead of a sweep beyond its training."""

from pathlib import Path

from autoshard.experiments import tune_shard
from autoshard.experiments.sweeps.config import TuneShardConfig
from autoshard.workload import documents
from bench.metric import Metric


def sweep_metrics(folder: Path) -> list[Metric]:
    """Runs a sweep of twelve trials with ASHA and Optuna, including Ray's start and final test."""
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
        Metric(
            "wall time of a sweep over training time per concurrent trial",
            "at most 1.3",
            result["overhead"],
        )
    ]
