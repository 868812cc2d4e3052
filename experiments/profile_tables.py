#!/usr/bin/env python
"""Count how the rows of tables are used in your data, and write a file of tables."""

import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import tyro
from rich.table import Table
from rich.text import Text

from autoshard.experiments.console import cli
from autoshard.experiments.console.imports import is_object, loader_data
from autoshard.experiments.console.inputs import check_file
from autoshard.experiments.console.progress import following
from autoshard.workload import EmbeddingTable, UserError, load_tables, save_hot_ids
from autoshard.workload.bounds import check_bounds
from autoshard.workload.profiling.profiler import DEFAULT_GB, TableProfiler
from autoshard.workload.profiling.sources import Source, source_of_files
from autoshard.workload.sources.table_files import SUFFIXES, save_tables

_SAVE_S = 60.0
_SHOWN = 20
_NODES = 8  # even blocks of rows that the report speaks of
_HOT = 0.01


@dataclass(frozen=True)
class ProfileConfig:
    """Count lookups in data: pooling, reuse of rows, which rows are hot and where they lie.

    The result is a file of tables for --tables of all other commands. Memory does not grow with the
    data. A profile of files that is interrupted goes on when the same command is run again.
    """

    data: tyro.conf.Positional[str]
    """Parquet files (a file, a folder, or a pattern) with a column for each table, of row numbers
    or of lists of them; a dlrm_datasets file; or MODULE:NAME of a loader of KeyedJaggedTensors, or
    of a function that returns one."""
    out: Path = Path("tables.parquet")
    """File for the tables, .parquet or .json."""
    hot_ids: Path | None = None
    """File (.npz) for the ids of the most used rows, up to 5 % of each table and a million, with
    which shard.py --hot-ids plans and a model trains."""
    tables: str | None = None
    """A file of tables, as all other commands take it, of which names, rows and dims are kept.
    Default: all tables of the data, with as many rows as it looks up."""
    model: str | None = None
    """MODULE:NAME of a TorchRec model whose tables the loader's batches are for, in place of
    --tables."""
    dim: int = 64
    """Columns of each table, if there are neither --tables nor --model."""
    batch_size: int = 65536
    """Samples of a batch, of all ranks together: reuse of rows is counted in such batches."""
    num_batches: int | None = None
    """Batches to read from a loader at most. Needed if it has no length."""
    max_gb: float = DEFAULT_GB
    """Memory for counts in GB, of this process and of each worker. If it does not suffice, the most
    used rows are counted exactly, and all others on a sample of them."""
    workers: int | None = None
    """Ray workers, of one core each, that count parts of files at once: of the cluster at
    RAY_ADDRESS, else of one on this machine. Default: this process counts."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        check_file(self.out, "--out", SUFFIXES)
        check_file(self.hot_ids, "--hot-ids", (".npz",))
        check_bounds(
            self,
            at_least={"dim": 4, "batch_size": 1, "num_batches": 1, "max_gb": 0.01, "workers": 1},
        )
        if self.dim % 4:
            raise UserError(f"--dim must be a multiple of 4, got {self.dim}")
        if self.tables is not None and self.model is not None:
            raise UserError("--tables and --model: give one of them")
        if is_object(self.data):
            if self.workers is not None:
                raise UserError("--workers is for files, not for loaders: leave it out")
        else:
            for option, value in (("--model", self.model), ("--num-batches", self.num_batches)):
                if value is not None:
                    raise UserError(f"{option} is for loaders, not for files: leave it out")
            out, data = self.out.resolve(), Path(self.data).expanduser().resolve()
            if data in (out, out.parent):
                raise UserError(f"{self.out}: is among the data: name another file for --out")

    def source(self) -> tuple[Source, Sequence[EmbeddingTable] | None]:
        """Returns the data, and the tables that are known."""
        known = None if self.tables is None else load_tables(self.tables)
        if not is_object(self.data):
            path = Path(self.data).expanduser()
            if self.workers is not None:  # which may run in other folders
                path = path.absolute()
            return source_of_files(path, self.batch_size), known
        data, of_model = loader_data(self.data, self.model, self.batch_size, self.num_batches)
        return data, of_model or known


def main(config: ProfileConfig) -> None:
    """Counts, reports, and writes the tables."""
    config.check()
    source, known = config.source()
    make = partial(TableProfiler, config.batch_size, known, config.max_gb, config.dim)
    profiler = make()
    lookups = _count(config, source, profiler, make)
    tables = profiler.tables()
    save_tables(tables, config.out)
    if config.hot_ids is not None:
        save_hot_ids(profiler.hot_ids(), config.hot_ids)
    _progress_file(config.out).unlink(missing_ok=True)
    _report(tables)
    if sampled := profiler.sampled():
        cli.note(
            f"{len(sampled)} tables have more rows than --max-gb {config.max_gb:g} holds: beside "
            f"those that were used most at first, at least {min(sampled.values()):.1%} of all "
            "others were counted"
        )
    batches = [t.reuse_batch_size for t in tables if t.reuse_batch_size is not None]
    if batches and min(batches) < config.batch_size:
        cli.note(
            f"the data has no batches of --batch-size {config.batch_size}: reuse is that of "
            f"{min(batches)} samples"
        )
    cli.say(lookups)
    cli.say(f"{len(tables)} tables are in {config.out}")


def _count(
    config: ProfileConfig,
    source: Source,
    profiler: TableProfiler,
    make: Callable[..., TableProfiler],
) -> str:
    """Counts all portions; returns a line on the speed."""
    progress, data = _progress_file(config.out), source.identity
    done = profiler.load(progress, data) if data else 0
    if done:
        cli.say(f"going on after {done} of {len(source)} portions, which {progress} holds")
    before = profiler.num_lookups
    with ExitStack() as stack:
        counted = _counted_here(source, profiler, done)
        if config.workers is not None:
            from autoshard.experiments.collecting.profile_parts import counted_by_workers
            from autoshard.experiments.console.ray_cluster import ray_cluster

            stack.enter_context(ray_cluster())
            parts = counted_by_workers(source, make, profiler, done, config.workers)
            counted = stack.enter_context(closing(parts))
        started = saved = time.monotonic()
        advance = stack.enter_context(following(len(source), "portions"))
        stop = stack.enter_context(_stop_requests())
        if done:
            advance(done)
        for steps in counted:
            done += steps
            advance(steps)
            late = steps and time.monotonic() - saved > _SAVE_S
            if data and (stop.is_set() or late):
                profiler.save(progress, data, done)
                saved = time.monotonic()
            if stop.is_set():
                raise KeyboardInterrupt("run the same command to go on" if data else "")
        seconds = time.monotonic() - started
    lookups = profiler.num_lookups - before
    rate = lookups / seconds / 1e6
    return f"counted {lookups:,} lookups in {seconds:.1f} s: {rate:.1f} million a second"


def _counted_here(source: Source, profiler: TableProfiler, done: int) -> Generator[int, None, None]:
    for portion in source.portions(done):
        profiler.add(portion)
        yield portion.steps


@contextmanager
def _stop_requests() -> Iterator[Event]:
    """Provides an event that Ctrl-C sets, so that no portion is counted in part.

    A second Ctrl-C interrupts at once, and nothing is saved.
    """
    stop = Event()

    def request(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    usual = signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, usual)


def _progress_file(out: Path) -> Path:
    return out.with_name(f".{out.name}.progress.npz")


def _report(tables: Sequence[EmbeddingTable]) -> None:
    """Prints the tables with most lookups."""
    columns = ("rows", "pooling", "used", f"hot {_HOT:.0%}", "busiest block", "drift")
    shown = Table("table", *columns)
    for table in sorted(tables, key=lambda each: -each.pooling_factor)[:_SHOWN]:
        access = table.access
        if access is None:
            shown.add_row(Text(table.name), f"{table.rows:,}", "0")
            continue
        hot = access.hottest(table.rows, max(1.0, _HOT * table.rows))
        busiest = _NODES * access.even_blocks(table.rows, _NODES).max()
        drift = "" if access.drift is None else f"{access.drift:.0%}"
        shown.add_row(
            Text(table.name),
            f"{table.rows:,}",
            f"{table.pooling_factor:.2f}",
            f"{access.coverage:.1%}",
            f"{hot:.1%}",
            f"{busiest:.2f}",
            drift,
        )
    cli.console.print(shown)
    if len(tables) > _SHOWN:
        cli.say(f"and {len(tables) - _SHOWN} more with fewer lookups")
    cli.say(
        "pooling: lookups of a sample; used: share of rows that are looked up at all; "
        f"hot {_HOT:.0%}: share of lookups that the most used {_HOT:.0%} of the rows get; busiest "
        f"block: lookups of the busiest of {_NODES} even blocks of rows over their mean; drift: "
        "share that hot rows lose from the first half of the data to the second"
    )


if __name__ == "__main__":
    cli.run_command(main, ProfileConfig)
