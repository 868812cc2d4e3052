"""Settings of runs that may be gone on with, elsewhere too: as they are kept."""

from collections.abc import Collection
from dataclasses import Field, asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from autoshard.experiments.tracking.runs import absolute_uri
from autoshard.experiments.tracking.storage import absolute
from autoshard.workload import UserError


class Resumable(Protocol):
    """What a run that can be gone on with must say in its settings, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def tables(self) -> str:
        """A file, or a description."""

    @property
    def cost_model(self) -> str:
        """A folder, or a name."""

    @property
    def store(self) -> Path | None:
        """Of measurements."""

    @property
    def storage(self) -> str | None:
        """Where it is kept beyond the machine."""

    @property
    def mlflow_uri(self) -> str | None:
        """Where it is logged."""

    @property
    def resume(self) -> bool:
        """It is to be gone on with."""

    @property
    def force(self) -> bool:
        """It is to be replaced."""


Settings = TypeVar("Settings", bound=Resumable)


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


def check_once(config: Resumable) -> None:
    """UserError if a run is to be gone on with and to be replaced."""
    if config.resume and config.force:
        raise UserError("--resume goes on, --force begins anew: give one of them")


def as_json(config: Resumable) -> dict[str, Any]:
    """The configuration as JSON has it; `from_json` reads it."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
    }
