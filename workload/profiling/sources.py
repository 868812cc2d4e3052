"""Data to profile: Parquet files with lists of rows, dlrm_datasets files, and loaders of batches.

A source says how many portions it has and reads them from any of them on. Portions of files are
read a table at a time, so memory does not grow with the number of tables.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from autoshard.workload.access import traces
from autoshard.workload.arrays import Ints
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.profiling.jagged import joined_features
from autoshard.workload.profiling.profiler import DEFAULT_GB, Portion, TableProfiler
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.tables.table import EmbeddingTable


class Source(Protocol):
    """Data in portions."""

    @property
    def identity(self) -> str:
        """The same text for the same data; empty if that is not known."""

    def __len__(self) -> int:
        """Returns the number of portions."""

    def portions(self, first: int) -> Iterator[Portion]:
        """Yields portions from number `first` on."""


@dataclass(frozen=True)
class RecordedData:
    """Portions of a dlrm_datasets file: batches of `batch_size` samples."""

    path: Path
    batch_size: int

    @property
    def identity(self) -> str:
        """Returns the same text for the same data."""
        return _identity(self.path)

    def __len__(self) -> int:
        return -(-traces.recorded_samples(self.path) // self.batch_size)

    def portions(self, first: int) -> Iterator[Portion]:
        """Yields portions from number `first` on."""
        count, names = len(self), traces.recorded_tables(self.path)
        for number in range(first, count):
            readers = {name: partial(self._read, place, number) for place, name in enumerate(names)}
            yield Portion(_half(number, count), readers)

    def _read(self, place: int, number: int) -> list[TableBatch]:
        start = number * self.batch_size
        return [TableBatch(*traces.recorded(self.path, place, start, start + self.batch_size))]


class ParquetData:
    """Portions of Parquet files: row groups, as many as a batch takes.

    Each column of whole numbers, or of lists of them, is a table of that name; a missing value is
    no lookup.

    Args:
        pattern: A file, a folder of .parquet files, or a pattern of names such as
            `days/*.parquet`. Files are read in the order of their names.
        batch_size: Samples of a batch.
    """

    def __init__(self, pattern: str, batch_size: int) -> None:
        import pyarrow
        import pyarrow.parquet

        self._batch_size = batch_size
        self._files = _files(pattern)
        self._groups: list[tuple[Path, list[int]]] = []
        self._about: dict[Path, Any] = {}  # parsed once: a file has an entry for each row group
        for path in self._files:
            try:
                with pyarrow.parquet.ParquetFile(path) as file:
                    about, schema = file.metadata, file.schema_arrow
            except (pyarrow.ArrowException, OSError) as error:
                reason = str(error).splitlines()[0][:120]
                raise UserError(f"{path}: is not a Parquet file ({reason})") from error
            self._about[path] = about
            samples = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
            self._groups += [(path, group) for group in _joined(samples, batch_size)]
            columns = [field.name for field in schema if _is_rows(field.type)]
            if path == self._files[0]:
                self.columns = columns
            elif missing := set(self.columns) - set(columns):
                raise UserError(f"{path}: lacks the column {min(missing)} of {self._files[0]}")
        if not self.columns:
            raise UserError(f"{self._files[0]}: has no column of whole numbers or of lists of them")

    @property
    def identity(self) -> str:
        """Returns the same text for the same data."""
        return " ".join(map(_identity, self._files))

    def __len__(self) -> int:
        return len(self._groups)

    def portions(self, first: int) -> Iterator[Portion]:
        """Yields portions from number `first` on."""
        for number in range(first, len(self)):
            path, groups = self._groups[number]
            readers = {name: partial(self._read, path, groups, name) for name in self.columns}
            yield Portion(_half(number, len(self)), readers)

    def _read(self, path: Path, groups: Sequence[int], column: str) -> Iterator[TableBatch]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path, metadata=self._about[path]) as file:
                read = file.iter_batches(self._batch_size, groups, [column], use_threads=False)
                for batch in read:
                    yield _table_batch(batch.column(column))
        except (pyarrow.ArrowException, OSError, FieldError) as error:
            reason = str(error).splitlines()[0][:120]
            raise UserError(f"{path}, column {column}: cannot be read ({reason})") from error


class LoaderData:
    """Portions of a loader of KeyedJaggedTensors: as many batches of one rank as a step takes.

    Args:
        batches: Batches of one rank; each key is a table, or a feature of one.
        features: Features of each table; None: each feature is a table.
        batch_size: Samples of a step, of all ranks together.
        num_batches: Batches to read at most. Needed where the loader has no length.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        features: Mapping[str, Sequence[str]] | None,
        batch_size: int,
        num_batches: int | None = None,
    ) -> None:
        known: int | None = None
        with suppress(TypeError):  # also that of a DataLoader over an IterableDataset
            known = len(batches)  # type: ignore[arg-type]
        if known is None and num_batches is None:
            raise UserError("batches: the loader has no length: give --num-batches")
        counts = [count for count in (known, num_batches) if count is not None]
        self._batches, self._features = islice(iter(batches), min(counts)), features
        self._batch_size, self._num_batches = batch_size, min(counts)

    @property
    def identity(self) -> str:
        """Nothing: what a loader yields is not known."""
        return ""

    def __len__(self) -> int:
        return self._num_batches

    def portions(self, first: int) -> Iterator[Portion]:
        """Yields portions from number `first` on; each counts as many batches as it joins."""
        read = 0
        for lookups, batches in joined_features(self._reported(), self._batch_size):
            if read >= first:
                yield Portion(_half(read, len(self)), self._readers(lookups), batches)
            read += batches

    def _reported(self) -> Iterator[Any]:
        """Yields the batches; an error of the loader is the user's."""
        try:
            yield from self._batches
        except Exception as error:
            text = (str(error).splitlines() or [""])[0][:200]
            raise UserError(f"batches: the loader fails: {type(error).__name__}: {text}") from error

    def _readers(
        self, lookups: Mapping[str, tuple[Ints, Ints]]
    ) -> Mapping[str, Callable[[], list[TableBatch]]]:
        tables = self._features or {name: [name] for name in lookups}
        return {
            table: partial(of_features, table, names, lookups) for table, names in tables.items()
        }


def profile(
    batches: Iterable[Any],
    batch_size: int,
    known: Sequence[EmbeddingTable] | None = None,
    features: Mapping[str, Sequence[str]] | None = None,
    num_batches: int | None = None,
    max_gb: float = DEFAULT_GB,
    dim: int = 64,
) -> tuple[EmbeddingTable, ...]:
    """Returns the tables of a loader's batches with their statistics.

    Args:
        batches: KeyedJaggedTensors of one rank, or objects whose `sparse_features` is one.
        batch_size: Samples of a step, of all ranks together.
        known: Tables by name, with rows, dims and features (see TableProfiler).
        features: Features of each table; None: each feature is a table of its name.
        num_batches: Batches to read at most; needed where the loader has no length.
        max_gb: Memory for counts, in GB.
        dim: Columns of tables that are not known.
    """
    profiler = TableProfiler(batch_size, known, max_gb, dim)
    for portion in LoaderData(batches, features, batch_size, num_batches).portions(0):
        profiler.add(portion)
    return profiler.tables()


def of_features(
    table: str, features: Sequence[str], lookups: Mapping[str, tuple[Ints, Ints]]
) -> list[TableBatch]:
    """Returns the batch of a table, in a list, from rows and lookups of samples by feature."""
    if missing := [name for name in features if name not in lookups]:
        raise UserError(f"table {table}: its feature {missing[0]} is not in the batches")
    found = [lookups[name] for name in features]
    rows = np.concatenate([rows for rows, _ in found])
    return [TableBatch(rows, np.sum([lengths for _, lengths in found], axis=0))]


def _table_batch(column: Any) -> TableBatch:
    """Returns the lookups in an Arrow array of whole numbers or of lists of them."""
    import pyarrow.compute
    import pyarrow.types

    if pyarrow.types.is_integer(column.type):
        lengths = column.is_valid()
        rows = column.drop_null()
    else:
        lengths = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(column), 0)
        rows = column.flatten()
        if rows.null_count:
            raise FieldError("list", "has a missing value: leave it out of the list")
    return TableBatch(
        rows.to_numpy(zero_copy_only=False).astype(np.int64, copy=False),
        lengths.to_numpy(zero_copy_only=False).astype(np.int64),
    )


def _is_rows(kind: Any) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind))


def _files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    folder, names = (path, "*.parquet") if path.is_dir() else (path.parent, path.name)
    found = sorted(folder.glob(names))
    if not found:
        raise UserError(f"{pattern}: no such file, or no .parquet files in this folder")
    return found


def _joined(samples: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yields consecutive row groups with at least `batch_size` samples together."""
    group, joined = list[int](), 0
    for number, count in enumerate(samples):
        group.append(number)
        joined += count
        if joined >= batch_size or number == len(samples) - 1:
            yield group
            group, joined = [], 0


def _identity(path: Path) -> str:
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return f"{path.resolve()}:{state.st_size}:{state.st_mtime_ns}"


def _half(number: int, count: int) -> int:
    return int(2 * number >= count)


def source_of_files(path: Path, batch_size: int) -> Source:
    """Returns the data of a dlrm_datasets file, or of Parquet files: one, a folder or a pattern."""
    if path.name.endswith((".pt", ".pt.gz")):
        return RecordedData(path, batch_size)
    return ParquetData(str(path), batch_size)
