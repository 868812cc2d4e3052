"""Settings of runs that may be gone on with, elsewhere too: as they are kept."""

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from experiments.storage import absolute
from experiments.tracking import absolute_uri
from workload import UserError

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
    storage: Any = None if config.storage is None else absolute(config.storage)
    uri = absolute_uri(config.mlflow_uri)
    return replace(config, store=store, storage=storage, mlflow_uri=uri, **there)


def taken_up(before: Settings, now: Settings, may_change: Collection[str]) -> Settings:
    """The settings that a run goes on with: its own, but for those that may change and are given.

    Files may lie elsewhere than they did: on another machine, or after a move.
    """
    usual = type(now)()
    given: dict[str, Any] = {
        name: getattr(now, name)
        for name in may_change
        if getattr(now, name) != getattr(usual, name)
    }
    return settled(replace(before, **given))


def check_once(config: "PPOShardConfig | TuneShardConfig") -> None:
    """UserError if a run is to be gone on with and to be replaced."""
    if config.resume and config.force:
        raise UserError("--resume goes on, --force begins anew: give one of them")


def as_json(config: "PPOShardConfig | TuneShardConfig") -> dict[str, Any]:
    """The configuration as JSON has it; `from_json` reads it."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
    }
