"""Counts the lookups of all tables in data of any size, in bounded memory."""

import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from autoshard.workload.arrays import Ints
from autoshard.workload.errors import UserError
from autoshard.workload.profiling.row_counts import Arrays
from autoshard.workload.profiling.table_counts import TableBatch, TableCounts
from autoshard.workload.tables.table import EmbeddingTable

DEFAULT_GB = 2.0
_HOT_SHARE, _MAX_HOT = 0.05, 10**6  # of a table's rows, and rows: whose ids are of use
_ROW_BYTES = 96  # of a kept row: its number, uses in both halves, and what merging takes


class Portion(NamedTuple):
    """Some samples of the data.

    Args:
        half: 0 if they belong to the first half of the data, 1 to the second.
        tables: For each table, a function that reads its batches.
        steps: By how much the progress through the data advances.
    """

    half: int
    tables: Mapping[str, Callable[[], Iterable[TableBatch]]]
    steps: int = 1


class TableProfiler:
    """Counts of several tables, which share a limit of memory.

    Args:
        batch_size: Samples of the batches in which reuse of rows is counted: those of all ranks.
        known: Tables that are known by name: their rows, dims and features. None: all tables of the
            data are counted, each with as many rows as it needs.
        max_gb: Memory for counts, in GB. Rows are sampled if it does not suffice.
        dim: Columns of tables that are not known.
        threads: Tables that are counted at once; None: one for each core.
    """

    def __init__(
        self,
        batch_size: int,
        known: Sequence[EmbeddingTable] | None = None,
        max_gb: float = DEFAULT_GB,
        dim: int = 64,
        threads: int | None = None,
    ) -> None:
        self._batch_size, self._dim = batch_size, dim
        self._known = None if known is None else {table.name: table for table in known}
        self._max_rows = int(max_gb * 1e9 / _ROW_BYTES)
        self._counts: dict[str, TableCounts] = {}
        self._locks: dict[str, Lock] = {}
        self._limiting = Lock()
        self._threads = ThreadPoolExecutor(threads or os.cpu_count())

    def add(self, portion: Portion) -> None:
        """Adds samples; tables are counted side by side."""
        names = list(portion.tables if self._known is None else self._known)
        for name in names:
            if name not in portion.tables:
                raise UserError(
                    f"table {name}: is not in the data, which has "
                    f"{', '.join(sorted(portion.tables)[:4])}"
                    f"{', ...' if len(portion.tables) > 4 else ''}"
                )
            self._begin(name)

        def count(name: str) -> None:
            for batch in portion.tables[name]():
                with self._locks[name]:
                    self._counts[name].add(batch, portion.half)
                self._keep_to_limit()

        for _ in self._threads.map(count, names):
            pass

    def state(self) -> dict[str, Arrays]:
        """Returns the counts of each table, as `join` takes them."""
        return {name: counts.state() for name, counts in self._counts.items()}

    def join(self, state: Mapping[str, Arrays]) -> None:
        """Adds counts of the same tables in other data.

        They are those of one profiler that has seen all data, unless rows are sampled: then fewer
        rows may be counted exactly, namely those that each profiler did.
        """
        for name, arrays in state.items():
            self._begin(name)
            other = TableCounts(name, self._batch_size)
            other.restore(arrays)
            self._counts[name].join(other)
            self._keep_to_limit()

    @property
    def num_lookups(self) -> int:
        """Returns the lookups that were counted."""
        return sum(counts.num_lookups for counts in self._counts.values())

    def tables(self) -> tuple[EmbeddingTable, ...]:
        """Returns the tables with what was counted so far."""
        if not any(counts.num_samples for counts in self._counts.values()):
            raise UserError("the data has no samples: nothing was counted")
        known = self._known or {}
        return tuple(
            counts.described(known.get(name), self._dim) for name, counts in self._counts.items()
        )

    def hot_ids(self) -> dict[str, Ints]:
        """Returns the most used rows of each table, in the order of use."""
        return {
            name: counts.hot_ids(min(_MAX_HOT, math.ceil(_HOT_SHARE * counts.num_rows)))
            for name, counts in self._counts.items()
        }

    def sampled(self) -> Mapping[str, float]:
        """Returns the share of rows that is kept of tables that are not counted exactly."""
        shares = {name: counts.rows.sampled_share for name, counts in self._counts.items()}
        return {name: share for name, share in shares.items() if share < 1}

    def save(self, path: Path, data: str, done: int) -> None:
        """Writes all counts atomically.

        Args:
            path: File.
            data: Identity of the data: `load` takes counts of no other.
            done: Progress through the data.
        """
        arrays: dict[str, Any] = {"of": np.array(self._identity(data)), "done": np.array(done)}
        arrays["names"] = np.array(list(self._counts))
        for number, state in enumerate(self.state().values()):
            arrays |= {f"{number}/{key}": value for key, value in state.items()}
        partial = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
                np.savez(file, **arrays)
            partial.replace(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error

    def load(self, path: Path, data: str) -> int:
        """Takes the counts that `save` wrote; returns the progress through the data.

        Returns 0, and takes nothing, if there is no such file, or if it is damaged or of other data
        or tables.
        """
        try:
            with np.load(path) as arrays:
                if str(arrays["of"]) != self._identity(data):
                    return 0
                for number, name in enumerate(arrays["names"].tolist()):
                    own = [key for key in arrays.files if key.startswith(f"{number}/")]
                    self.join({name: {key.partition("/")[2]: arrays[key] for key in own}})
                return int(arrays["done"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            self._counts.clear()
            return 0

    def _begin(self, name: str) -> None:
        if name not in self._counts:
            rows = None if self._known is None else self._known[name].rows
            self._counts[name] = TableCounts(name, self._batch_size, rows)
            self._locks[name] = Lock()

    def _identity(self, data: str) -> str:
        tables = [] if self._known is None else [(t.name, t.rows) for t in self._known.values()]
        return f"{data} {self._batch_size} {tables}"

    def _keep_to_limit(self) -> None:
        """Samples rows of the largest tables until the limit is kept."""
        with self._limiting:
            while sum(len(counts.rows) for counts in self._counts.values()) > self._max_rows:
                name = max(self._counts, key=lambda each: len(self._counts[each].rows))
                rows = self._counts[name].rows
                with self._locks[name]:
                    before = len(rows)
                    rows.merge()
                    if len(rows) == before:
                        rows.thin()
