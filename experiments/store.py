#!/usr/bin/env python
"""Print the content of a store of measurements, export it to Parquet, or import Parquet."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from autoshard.benchmark import MeasurementStore, export_parquet, import_parquet
from autoshard.experiments.console import cli


@dataclass(frozen=True)
class Info:
    """Print the number of measurements by hardware, versions, batch size and status."""

    store: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Export:
    """Write all measurements of a store to a Parquet file."""

    store: tyro.conf.Positional[Path]
    parquet: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Import:
    """Add the measurements of a Parquet file to a store; existing ones are kept."""

    store: tyro.conf.Positional[Path]
    parquet: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class StoreConfig:
    """Print the content of a store of measurements, export it to Parquet, or import Parquet."""

    command: (
        Annotated[Info, tyro.conf.subcommand("info", prefix_name=False)]
        | Annotated[Export, tyro.conf.subcommand("export", prefix_name=False)]
        | Annotated[Import, tyro.conf.subcommand("import", prefix_name=False)]
    )


def main(config: StoreConfig) -> None:
    """Runs the subcommand."""
    command = config.command
    if isinstance(command, Import):
        with MeasurementStore(command.store) as store:
            added = import_parquet(store, command.parquet)
            cli.say(f"{added} measurements added, {command.store} has {len(store)}")
        return
    with MeasurementStore(command.store, must_exist=True) as store:
        if isinstance(command, Export):
            count = export_parquet(store, command.parquet)
            cli.say(f"{count} measurements written to {command.parquet}")
            return
        groups = Counter(
            (m.hardware, m.versions, m.settings.batch_size, m.status) for m in store.measurements()
        )
        for (hardware, versions, batch_size, status), count in sorted(groups.items()):
            cli.say(f"{count:>8} {status:<7} batch {batch_size:,}, {hardware}, {versions}")
        cli.say(f"{len(store.exchanges()):>8} collectives")
        for probe in store.probes():
            cli.say(f"{1:>8} probe of {probe.hardware}, {probe.source}")


if __name__ == "__main__":
    cli.run_command(main, StoreConfig)
