"""Options of the fused operator that runs a shard, and the memory it needs."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from autoshard.workload.arrays import Ints
from autoshard.workload.errors import FieldError
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.table import EmbeddingTable, Piece

Weights = Literal["fp32", "fp16"]
Optimizer = Literal["rowwise_adagrad", "adagrad", "sgd"]

WEIGHT_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2}
FLOAT_BYTES = 4  # optimizer state, outputs and gradients are always fp32
INDEX_BYTES = 8
# In device memory, of FBGEMM's caches of rows in host memory that evict the least frequently used:
_CACHE_ROW_BYTES = 12  # for each row of the table, its use and its table
_CACHE_SLOT_BYTES = 8  # for each row that is cached, which one it is

Count = TypeVar("Count", int, Ints)  # a number for one piece, or an array with one for each piece


class MemoryParts(NamedTuple):
    """Bytes on a device, by use.

    Args:
        weights: Weights of tables.
        optimizer: Optimizer state.
        inputs: Indices, offsets and weights of a batch's lookups.
        outputs: Pooled embeddings of a batch, and their gradients.
        gradients: Dense gradients of copied tables.
    """

    weights: int = 0
    optimizer: int = 0
    inputs: int = 0
    outputs: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """Returns the sum of all parts."""
        return sum(self)

    def plus(self, other: "MemoryParts") -> "MemoryParts":
        """Returns the sum of each part."""
        return MemoryParts(*(one + two for one, two in zip(self, other, strict=True)))

    @property
    def breakdown(self) -> str:
        """Returns the parts, the largest first: `weights 1.500 GiB, outputs 96 bytes`."""
        parts = sorted(self._asdict().items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)


@dataclass(frozen=True)
class OperatorOptions:
    """Type of the weights and optimizer of the fused operator.

    Args:
        weights: Type of the weights.
        optimizer: Optimizer that is fused into the backward pass.
        lookup_bytes: Device memory that a lookup takes during a step, beside its weight. The
            operator is the same whatever it is.
    """

    weights: Weights = "fp32"
    optimizer: Optimizer = "rowwise_adagrad"
    lookup_bytes: int = field(default=INDEX_BYTES, compare=False)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("weights", self.weights, get_args(Weights)),
            ("optimizer", self.optimizer, get_args(Optimizer)),
        ):
            if value not in known:
                raise FieldError(name, f"must be one of {', '.join(known)}, got {value!r}")

    def __str__(self) -> str:
        return f"{self.weights} with {self.optimizer}"

    def to_json(self) -> dict[str, Any]:
        """Returns the options by name; those that were added later only if they are not usual."""
        found = asdict(self)
        if self.lookup_bytes == INDEX_BYTES:
            del found["lookup_bytes"]
        return found

    def stored_bytes(self, rows: int, width: int) -> int:
        """Returns the bytes of weights and optimizer state of a [rows, width] matrix."""
        return sum(self._stored(rows, width))

    def copied_bytes(self, rows: int, width: int) -> int:
        """Returns the bytes of a copy of a [rows, width] matrix, with its optimizer state.

        That is of an optimizer of the model's dense part, in the shape and type of the weights.
        """
        weights = rows * width * WEIGHT_BYTES[self.weights]
        return weights if self.optimizer == "sgd" else 2 * weights

    def memory(self, pieces: Iterable[Piece], batch_size: int) -> MemoryParts:
        """Returns the memory that pieces need on one device."""
        weights = optimizer = inputs = outputs = 0
        for piece in pieces:
            table = piece.table
            held, state = self._on_device(piece)
            weights += held
            optimizer += state
            lookups, samples = round(table.pooling_factor * batch_size), batch_size * table.features
            come, go = self._for_a_batch(lookups, samples, piece.width, table.weighted)
            inputs += come
            outputs += go
        return MemoryParts(weights, optimizer, inputs, outputs)

    def copies_memory(
        self, tables: Iterable[EmbeddingTable], batch_size: int, ranks: int
    ) -> MemoryParts:
        """Returns the memory that copies of tables need on each device.

        A copy serves the device's own samples. Its gradient is dense and is held twice while it is
        copied into the buffer of the all-reduce.

        Args:
            tables: The copied tables.
            batch_size: Samples of the batch of all ranks.
            ranks: Number of devices, each of which has a copy.
        """
        own = -(-batch_size // ranks)
        pieces = [table.whole() for table in tables]
        held = self.memory(pieces, own)
        stored = sum(self.copied_bytes(piece.table.rows, piece.width) for piece in pieces)
        return held._replace(optimizer=stored - held.weights, gradients=2 * held.weights)

    def bytes_of_each(self, pieces: Sequence[Piece], batch_size: int) -> Ints:
        """Returns the total memory of each piece alone, vectorized: [pieces]."""
        tables = [piece.table for piece in pieces]
        rows, features = (
            np.array([getattr(table, name) for table in tables], np.int64)
            for name in ("rows", "features")
        )
        widths = np.array([piece.width for piece in pieces], np.int64)
        lookups = np.array([round(table.pooling_factor * batch_size) for table in tables], np.int64)
        weighted = np.array([table.weighted for table in tables], np.int64)
        stored = np.add(*self._stored(rows, widths))
        for number, table in enumerate(tables):
            if table.in_host_memory:
                stored[number] = sum(self._on_device(pieces[number]))
        batch = self._for_a_batch(lookups, batch_size * features, widths, weighted)
        return np.asarray(stored + sum(batch))

    def host_bytes(self, piece: Piece) -> int:
        """Returns the host memory that a piece needs: none unless its weights are there."""
        rows, width = piece.table.rows, piece.width
        if not piece.table.in_host_memory:
            return 0
        return self.stored_bytes(rows, width) - self._state_on_device(rows)

    def _on_device(self, piece: Piece) -> tuple[int, int]:
        """Returns the bytes of weights, and of optimizer state, in device memory.

        Where weights are in host memory, so is the optimizer state, unless it is a number for each
        row; weights then are those of the cache, with what it needs to find rows.
        """
        rows, cached, width = piece.table.rows, piece.table.cached_rows, piece.width
        if cached is None:
            return self._stored(rows, width)
        weights = cached * (width * WEIGHT_BYTES[self.weights] + _CACHE_SLOT_BYTES)
        if cached:
            weights += rows * _CACHE_ROW_BYTES
        return weights, self._state_on_device(rows)

    def _state_on_device(self, rows: int) -> int:
        return rows * FLOAT_BYTES if self.optimizer == "rowwise_adagrad" else 0

    def _stored(self, rows: Count, width: Count) -> tuple[Count, Count]:
        """Returns the bytes of weights, and of optimizer state."""
        state_numbers = {"rowwise_adagrad": rows, "adagrad": rows * width, "sgd": 0 * rows}
        return (
            rows * width * WEIGHT_BYTES[self.weights],
            state_numbers[self.optimizer] * FLOAT_BYTES,
        )

    def _for_a_batch(
        self, lookups: Count, samples: Count, width: Count, weighted: Count
    ) -> tuple[Count, Count]:
        """Returns the bytes of inputs, and of outputs. Samples count once per feature."""
        inputs = lookups * self.lookup_bytes + samples * INDEX_BYTES
        return inputs + lookups * FLOAT_BYTES * weighted, 2 * samples * width * FLOAT_BYTES
