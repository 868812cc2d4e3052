"""What outlives a command: runs, plans and models in MLflow; folders and object stores.

It imports nothing of experiments but the console.
"""

from autoshard.experiments.tracking.runs import (
    COST_MODELS,
    EXPERIMENT,
    POLICIES,
    TrackedRun,
    flat,
    tracked_run,
)

__all__ = [
    "COST_MODELS",
    "EXPERIMENT",
    "POLICIES",
    "TrackedRun",
    "flat",
    "tracked_run",
]
