"""Embedding tables, pieces of them, and shards: sets of pieces in one fused operator.

A table that is sharded by rows is in even blocks of rows, because TorchRec assigns ids to ranks by
`id // ceil(rows / ranks)`; only the last ones may be smaller. Each block serves the lookups that
fall into it, for the samples of all ranks, and gives partial sums of full width. So it costs what a
table of its own would cost, with as many rows and lookups, on a fixed device; and the
reduce-scatter of partial sums moves as many bytes as an all-to-all in which every device has all
columns of the table.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tables.row_access import RowAccess

NUM_REUSE_BINS = 17
DIM_STEP = 4  # FBGEMM's kernels read rows in vectors of four numbers
HOT = "_hot"  # ends the names of tables of hot rows
_FLOAT_BYTES = 4
MAX_ROWS = 2**40
MAX_DIM = 2**15
MAX_FEATURES = 2**12
MAX_POOLING_FACTOR = 2**20
_MAX_BLOCKS = 2**14  # tables whose blocks of rows are kept

_encoded = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


@dataclass(frozen=True)
class Trace:
    """Location of a table's recorded lookups: table number `position` of a dlrm_datasets file.

    `digest` is a hash of the content, so that copies of the file are the same trace.
    """

    path: str
    position: int
    batch_size: int
    digest: str


@dataclass(frozen=True)
class EmbeddingTable:
    """One embedding table and how a batch of samples uses it.

    Args:
        name: Name, unique within a task.
        rows: Number of embedding vectors.
        dim: Columns, a multiple of 4.
        pooling_factor: Mean number of lookups per sample, over all features.
        zipf_alpha: Exponent of the Zipf law of rows (default: 0, uniform).
        reuse: Share of the batch's distinct rows by number of uses, in the 17 bins
            (0,1], (1,2], (2,4], ... (2^15, inf); adds up to 1. Excludes `zipf_alpha`.
        reuse_batch_size: Samples of the batch in which `reuse` was counted. Smaller batches are
            derived from it. None: `reuse` applies to any batch.
        trace: Recorded lookups, used in place of drawn ones.
        features: Number of features that look up rows, each with an output of its own.
        weighted: Whether each lookup has a weight.
        access: Statistics of rows over all data. They say more than a batch needs, so tables that
            differ in them alone are equal.
        exchange_share: What an exchange of its outputs takes, over that of a whole table as wide:
            blocks of rows are summed up on the way (`links.Network.block_share`). It is a property
            of a plan, and no part of files.
        pooled: Whether a feature's lookups are pooled to one output. Where they are not, `features`
            is the number of a sample's outputs, and costs are approximate.
        cached_rows: Rows that a cache in the device's memory has room for, if the weights are in
            host memory; None if they are in the device's. Likewise a property of a plan.
    """

    name: str
    rows: int
    dim: int
    pooling_factor: float
    zipf_alpha: float | None = None
    reuse: tuple[float, ...] | None = None
    reuse_batch_size: int | None = None
    trace: Trace | None = None
    features: int = 1
    weighted: bool = False
    access: RowAccess | None = field(default=None, compare=False, repr=False)
    exchange_share: float = 1.0
    pooled: bool = True
    cached_rows: int | None = None

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise FieldError("name", "must be a non-empty text")
        check_whole("rows", self.rows, 1, MAX_ROWS)
        check_whole("dim", self.dim, DIM_STEP, MAX_DIM)
        if self.dim % DIM_STEP:
            raise FieldError("dim", f"must be a multiple of {DIM_STEP}, got {self.dim}")
        if not 0 <= self.pooling_factor <= MAX_POOLING_FACTOR:
            must = f"must lie between 0 and {MAX_POOLING_FACTOR}"
            raise FieldError("pooling_factor", f"{must}, got {self.pooling_factor}")
        if self.zipf_alpha is not None and not 0 <= self.zipf_alpha <= 10:
            raise FieldError("zipf_alpha", f"must lie between 0 and 10, got {self.zipf_alpha}")
        if self.reuse is not None:
            self._check_reuse(self.reuse)
        if self.reuse_batch_size is not None:
            check_whole("reuse_batch_size", self.reuse_batch_size, 1, 2**31)
        check_whole("features", self.features, 1, MAX_FEATURES)
        for name in ("weighted", "pooled"):
            if not isinstance(value := getattr(self, name), bool):
                raise FieldError(name, f"must be true or false, got {value!r}")
        if self.features > 1 and self.trace is not None:
            raise FieldError("features", "a table with recorded lookups has one feature")
        if self.access is not None:
            self.access.check(self.rows)
        if self.cached_rows is not None:
            check_whole("cached_rows", self.cached_rows, 0, self.rows)

    def _check_reuse(self, reuse: tuple[float, ...]) -> None:
        if self.zipf_alpha is not None:
            raise FieldError("zipf_alpha", "give either zipf_alpha or reuse bins, not both")
        if len(reuse) != NUM_REUSE_BINS:
            raise FieldError("reuse", f"needs {NUM_REUSE_BINS} bins, got {len(reuse)}")
        if not all(math.isfinite(share) and share >= 0 for share in reuse):
            raise FieldError("reuse", "every bin must be a number of at least 0")
        if abs(sum(reuse) - 1) > 0.01:
            raise FieldError("reuse", f"bins must add up to 1, they add up to {sum(reuse):.4g}")

    @cached_property
    def access_digest(self) -> str:
        """Returns a hash of how rows are looked up, independent of name and dim.

        It seeds the table's batch, so all pieces of a table have the same lookups.
        """
        trace = None if self.trace is None else (self.trace.digest, self.trace.position)
        reuse = (self.reuse, self.reuse_batch_size, self.zipf_alpha or 0.0)
        # Default values are left out, so that stored digests stay valid.
        unusual: list[Any] = [self.features, self.weighted] if self._is_unusual else []
        if self.cached_rows is not None:
            unusual.append({"cached_rows": self.cached_rows})
        return digest([self.rows, self.pooling_factor, reuse, trace, *unusual])

    @property
    def bags(self) -> int:
        """Returns the lengths that lookups of a sample come with."""
        return self.features if self.pooled else 1

    def outputs_of_block(self, count: int) -> float:
        """Returns the outputs of a sample that one of `count` blocks of rows has.

        Each block has a partial sum of every pooled output, and an output of its own lookups alone
        where they are not pooled.
        """
        return self.features if self.pooled else self.features / count

    @property
    def _is_unusual(self) -> bool:
        return self.features > 1 or self.weighted

    def whole(self) -> "Piece":
        """Returns the piece of all columns."""
        return Piece(self, 0, self.dim)

    @property
    def in_host_memory(self) -> bool:
        """Returns whether its weights are in the host's memory."""
        return self.cached_rows is not None

    @property
    def in_device_memory(self) -> "EmbeddingTable":
        """Returns the table with all rows in the device's memory."""
        return self if self.cached_rows is None else replace(self, cached_rows=None)

    def without_access(self) -> "EmbeddingTable":
        """Returns the table without `access`, on which no batch depends that is drawn."""
        return self if self.access is None else replace(self, access=None)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object without the fields that are not set."""
        usual: dict[str, Any] = {} if self._is_unusual else {"features": 1, "weighted": False}
        if self.pooled:
            usual["pooled"] = True
        fields = {key: value for key, value in vars(self).items() if key in _FIELDS}
        if self.trace is not None:
            fields["trace"] = dict(vars(self.trace))
        if self.access is not None:
            fields["access"] = self.access.to_json()
        return {k: v for k, v in fields.items() if v is not None and k not in usual}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "EmbeddingTable":
        """Returns the table that `to_json` wrote; FieldError names an invalid field."""
        fields = dict(record)
        if unknown := set(fields) - _FIELDS:
            raise FieldError(sorted(unknown)[0], "is not a field of a table")
        for needed in ("name", "rows", "dim", "pooling_factor"):
            if needed not in fields:
                raise FieldError(needed, "is missing")
        if fields.get("reuse") is not None:
            fields["reuse"] = tuple(float(share) for share in fields["reuse"])
        if fields.get("trace") is not None:
            fields["trace"] = Trace(**fields["trace"])
        if fields.get("access") is not None:
            fields["access"] = RowAccess.from_json(fields["access"])
        return EmbeddingTable(**fields)


_FIELDS = frozenset(EmbeddingTable.__dataclass_fields__) - {"exchange_share", "cached_rows"}


@dataclass(frozen=True)
class Piece:
    """Columns `start` to `start + width` of a table."""

    table: EmbeddingTable
    start: int
    width: int

    def __post_init__(self) -> None:
        if self.start % DIM_STEP or self.width % DIM_STEP or self.width <= 0 or self.start < 0:
            raise FieldError(
                "slice",
                f"start and width must be multiples of {DIM_STEP}, got {self.start}, {self.width} "
                f"of table {self.table.name}",
            )
        if self.start + self.width > self.table.dim:
            raise FieldError(
                "slice",
                f"columns {self.start} to {self.start + self.width} exceed the {self.table.dim} "
                f"columns of table {self.table.name}",
            )

    @property
    def output_width(self) -> int:
        """Returns its output columns: its width for each feature of the table."""
        return self.width * self.table.features

    @property
    def exchanged_columns(self) -> float:
        """Returns its output columns as an all-to-all of whole tables would have to move them."""
        return self.output_width * self.table.exchange_share

    @cached_property
    def digest(self) -> str:
        """Returns a hash of lookups and width, which determine the cost."""
        return digest([self.table.access_digest, self.width])


@dataclass(frozen=True)
class Shard:
    """A set of pieces on one device, which one fused operator runs.

    Pieces are in canonical order, so equal sets are equal shards.
    """

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise UserError("a shard needs at least one table")
        ordered = sorted(self.pieces, key=lambda s: (s.digest, s.table.name, s.start))
        object.__setattr__(self, "pieces", tuple(ordered))

    @staticmethod
    def in_order(pieces: tuple[Piece, ...]) -> "Shard":
        """Returns the shard of pieces that are in canonical order, as read from a store."""
        shard = object.__new__(Shard)
        object.__setattr__(shard, "pieces", pieces)
        return shard

    @staticmethod
    def of_tables(tables: Iterable[EmbeddingTable]) -> "Shard":
        """Returns the shard of whole tables."""
        return Shard(tuple(table.whole() for table in tables))

    @cached_property
    def digest(self) -> str:
        """Returns a hash of the pieces' digests, which find stored measurements."""
        return digest([piece.digest for piece in self.pieces])

    @property
    def total_dim(self) -> int:
        """Returns the columns of the operator's output."""
        return sum(piece.output_width for piece in self.pieces)

    @property
    def exchanged_columns(self) -> float:
        """Returns the columns that an exchange of its outputs counts for."""
        return sum(piece.exchanged_columns for piece in self.pieces)

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of the weights in fp32."""
        return sum(piece.table.rows * piece.width * _FLOAT_BYTES for piece in self.pieces)

    def looked_up_bytes(self, batch_size: int) -> float:
        """Returns the bytes in fp32 that a batch looks up, rows counted at each use."""
        numbers = sum(piece.table.pooling_factor * piece.width for piece in self.pieces)
        return numbers * batch_size * _FLOAT_BYTES

    def __len__(self) -> int:
        return len(self.pieces)


def can_be_split(piece: Piece) -> bool:
    """Returns whether a piece is wide enough to be split."""
    return piece.width >= 2 * DIM_STEP


def halves(piece: Piece) -> tuple[Piece, Piece]:
    """Splits a piece into two of nearly equal width."""
    width = piece.width // (2 * DIM_STEP) * DIM_STEP
    first = Piece(piece.table, piece.start, width)
    return first, Piece(piece.table, piece.start + width, piece.width - width)


def rows_of_block(rows: int, count: int) -> int:
    """Returns the rows of each of `count` even blocks; the last ones may have fewer, or none."""
    return -(-rows // count)


def can_be_blocks(rows: int, count: int) -> bool:
    """Returns whether each of `count` even blocks of so many rows has any."""
    return rows_of_block(rows, count) * (count - 1) < rows


def row_blocks(
    table: EmbeddingTable, count: int, exchange_share: float = 1.0
) -> tuple[EmbeddingTable, ...]:
    """Returns `count` even blocks of a table's rows, each as a table of its own.

    They are named like slices: `item[0:500]`. Their lookups follow from the histogram of the
    table's rows (`RowAccess.blocks`). Where none is known, ids are taken to be unrelated to how
    often they are used, as hashed ids are: then blocks are used alike. Each block has the table's
    reuse bins, and its share of the rows that are cached; lookups that were recorded are not kept.
    """
    return _blocks(table, count, table.access, exchange_share)


@lru_cache(_MAX_BLOCKS)
def _blocks(
    table: EmbeddingTable, count: int, access: RowAccess | None, exchange_share: float
) -> tuple[EmbeddingTable, ...]:
    """Returns `row_blocks`; tables that differ in `access` alone are equal."""
    size = rows_of_block(table.rows, count)
    shares = [1 / count] * count
    if access is not None:
        shares = access.even_blocks(table.rows, count).tolist()
    outputs, found = table.outputs_of_block(count), []
    for number, share in enumerate(shares):
        first, last = number * size, min((number + 1) * size, table.rows)
        found.append(
            replace(
                table,
                name=f"{table.name}[{first}:{last}]",
                rows=last - first,
                cached_rows=_cached_of(table, last - first),
                pooling_factor=table.pooling_factor * share,
                features=math.ceil(outputs),
                trace=None,
                access=None,
                exchange_share=exchange_share if table.pooled else outputs / math.ceil(outputs),
            )
        )
    return tuple(found)


def _cached_of(table: EmbeddingTable, rows: int) -> int | None:
    """Returns how many of some rows are cached if caches of all parts have the same share."""
    return None if table.cached_rows is None else table.cached_rows * rows // table.rows


def hot_name(table: str) -> str:
    """Returns the name of the table of another table's hot rows."""
    return table + HOT


def digest(value: Any) -> str:
    """Returns a short, stable hash of a JSON value."""
    return hashlib.sha256(_encoded(value).encode()).hexdigest()[:24]


def check_whole(field: str, value: int, low: int, high: int) -> None:
    """Raises FieldError unless a value is a whole number within these bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise FieldError(field, f"must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise FieldError(field, f"must lie between {low} and {high}, got {value}")
