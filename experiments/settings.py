"""Settings of runs that may be gone on with, elsewhere too: as they are kept."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from experiments.tracking import absolute_uri

if TYPE_CHECKING:  # what a sweep is set up with would import what it trains
    from experiments.ppo_config import PPOShardConfig
    from experiments.tune_config import TuneShardConfig

Settings = TypeVar("Settings", "PPOShardConfig", "TuneShardConfig")


def settled(config: Settings) -> Settings:
    """The same whatever the current folder will be: paths are absolute."""
    there: dict[str, Any] = {
        name: str(Path(value).resolve())
        for name, value in (("tables", config.tables), ("cost_model", config.cost_model))
        if Path(value).exists()
    }
    store = None if config.store is None else config.store.resolve()
    return replace(config, store=store, mlflow_uri=absolute_uri(config.mlflow_uri), **there)


def as_json(config: "PPOShardConfig | TuneShardConfig") -> dict[str, Any]:
    """The configuration as JSON has it; `from_json` reads it."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
    }
