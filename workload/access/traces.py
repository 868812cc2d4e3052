"""Recorded lookups in the format of dlrm_datasets: tables, their features and their real batches.

A file holds `(indices, offsets, lengths)`: `lengths` is [tables, batch], `offsets` covers all
tables and samples, and `indices` concatenates all lookups. A `.pt.gz` is unpacked once into the
temporary folder, so that readers can map the file and read only the table that they need.
"""

import gzip
import hashlib
import os
import pickle
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.workload.access.reuse import histogram
from autoshard.workload.errors import UserError
from autoshard.workload.tables.table import EmbeddingTable, Trace

DEFAULT_DIM = 64  # the files contain no dims


@dataclass(frozen=True)
class _Recording:
    indices: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    num_tables: int
    batch_size: int


def read_tables(path: Path, dim: int = DEFAULT_DIM) -> tuple[EmbeddingTable, ...]:
    """Returns the tables of a dlrm_datasets file; `rows` is the highest row looked up, plus one."""
    recording, full_path = _recording_of(path), str(path.resolve())
    content = _content_digest(full_path)
    return tuple(
        _describe(recording, Trace(full_path, position, recording.batch_size, content), dim)
        for position in range(recording.num_tables)
    )


def recorded_tables(path: Path) -> list[str]:
    """Returns the names of a file's tables."""
    return [f"t{position}" for position in range(_recording_of(path).num_tables)]


def recorded_samples(path: Path) -> int:
    """Returns the number of samples of a file."""
    return _recording_of(path).batch_size


def recorded(
    path: Path, position: int, start: int, stop: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns rows, and lookups per sample, of the samples `start` to `stop` of a table."""
    recording = _recording_of(path)
    return _samples_of(recording, position, start, min(stop, recording.batch_size))


def lookups(trace: Trace, batch_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns rows and lookups per sample of the first `batch_size` recorded samples."""
    if batch_size > trace.batch_size:
        raise UserError(
            f"{trace.path} holds {trace.batch_size} samples: use a batch of at most that, "
            f"not {batch_size}"
        )
    found = _content_digest(trace.path)
    if found != trace.digest:
        raise UserError(f"{trace.path} is not the file that the tables were read from: read again")
    return _samples_of(_open(trace.path, found), trace.position, 0, batch_size)


def _samples_of(
    recording: _Recording, position: int, start: int, stop: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    first = position * recording.batch_size
    offsets = recording.offsets[first + start : first + stop + 1]
    return np.array(recording.indices[offsets[0] : offsets[-1]], dtype=np.int64), np.diff(offsets)


def _recording_of(path: Path) -> _Recording:
    full_path = str(path.resolve())
    return _open(full_path, _content_digest(full_path))


def _describe(recording: _Recording, trace: Trace, dim: int) -> EmbeddingTable:
    first = trace.position * recording.batch_size
    start, end = recording.offsets[first], recording.offsets[first + recording.batch_size]
    rows, uses = np.unique(recording.indices[start:end], return_counts=True)
    if len(rows) and rows[0] < 0:
        raise UserError(f"{trace.path}: table {trace.position} looks up the negative row {rows[0]}")
    return EmbeddingTable(
        name=f"t{trace.position}",
        rows=int(rows[-1]) + 1 if len(rows) else 1,
        dim=dim,
        pooling_factor=float(end - start) / recording.batch_size,
        reuse=tuple(histogram(uses).tolist()) if len(rows) else None,
        reuse_batch_size=recording.batch_size,
        trace=trace,
    )


def _content_digest(path: str) -> str:
    """Returns a hash of the content, which is cached until the file changes."""
    try:
        state = Path(path).stat()
        return _digest_of_state(path, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


@lru_cache(maxsize=4)
def _digest_of_state(path: str, _size: int, _mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


@lru_cache(maxsize=2)
def _open(path: str, content: str) -> _Recording:
    plain = _unpacked(path, content) if path.endswith(".gz") else path
    return _checked(path, _load(path, plain))


def _unpacked(path: str, content: str) -> str:
    """Returns the path of the unpacked copy of a .gz, made once per machine."""
    folder = Path(tempfile.gettempdir()) / f"autoshard-traces-{os.getuid()}"
    target = folder / f"{content}.pt"
    if target.exists():
        return str(target)
    partial = folder / f"{content}.{os.getpid()}.partial"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with gzip.open(path, "rb") as packed, open(partial, "wb") as plain:
            shutil.copyfileobj(packed, plain, 2**22)
        partial.replace(target)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is truncated or damaged ({error}): fetch it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be unpacked into {folder}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return str(target)


def _load(path: str, plain: str) -> Any:
    import torch  # heavy, and only needed here

    try:
        with open(
            plain, "rb"
        ) as file:  # only the zip form can be mapped; older files are read whole
            mappable = file.read(2) == b"PK"
        return torch.load(plain, map_location="cpu", weights_only=True, mmap=mappable)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: is not a file of tensors, or a part of one ({reason[:120]}): fetch it again"
        ) from error


def _checked(path: str, value: Any) -> _Recording:
    import torch

    if not (
        isinstance(value, tuple | list)
        and len(value) == 3
        and all(isinstance(part, torch.Tensor) for part in value)
    ):
        raise UserError(f"{path}: must hold the three tensors (indices, offsets, lengths)")
    indices, offsets, lengths = (part.numpy() for part in value)
    if lengths.ndim != 2 or offsets.shape != (lengths.size + 1,) or indices.ndim != 1:
        raise UserError(
            f"{path}: lengths must be [tables, batch] and offsets have one entry for each sample "
            f"and table and one more, got {lengths.shape} and {offsets.shape}"
        )
    steps = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(indices) or not (steps == lengths.ravel()).all():
        raise UserError(f"{path}: offsets do not agree with lengths and indices: file is damaged")
    return _Recording(indices, offsets.astype(np.int64), lengths.shape[0], lengths.shape[1])
