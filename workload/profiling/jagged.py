"""Lookups of each feature in batches of keyed jagged tensors, such as TorchRec's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from autoshard.workload.arrays import Ints
from autoshard.workload.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class KeyedJagged(Protocol):
    """What is read of a batch: the interface of TorchRec's KeyedJaggedTensor."""

    def keys(self) -> Sequence[str]:
        """Returns the names of the features."""
        ...

    def values(self) -> "Tensor":
        """Returns the rows that are looked up, feature by feature and sample by sample."""
        ...

    def lengths(self) -> "Tensor":
        """Returns the lookups of each sample, feature by feature."""
        ...

    def offset_per_key(self) -> Sequence[int]:
        """Returns where the rows of each feature begin, and where the last ones end."""
        ...

    def stride(self) -> int:
        """Returns the number of samples."""
        ...

    def variable_stride_per_key(self) -> bool:
        """Returns whether features differ in their number of samples."""
        ...

    def to(self, device: Any) -> "KeyedJagged":
        """Returns the batch on a device."""
        ...


def features_of(batch: Any) -> KeyedJagged:
    """Returns the features of a batch; UserError if it has none, or is of another kind."""
    features = getattr(batch, "sparse_features", batch)
    if not isinstance(features, KeyedJagged):
        raise UserError(
            f"batches: an item is a {type(batch).__name__}: give KeyedJaggedTensors, or objects "
            "whose sparse_features is one"
        )
    if features.variable_stride_per_key():
        raise UserError("batches: features differ in their number of samples: give plain batches")
    return features


def joined_features(
    batches: Iterable[Any], batch_size: int
) -> Iterator[tuple[dict[str, tuple[Ints, Ints]], int]]:
    """Yields rows and lookups per sample of each feature in at least `batch_size` samples.

    With them comes the number of batches that were joined. The last may have fewer samples.
    """
    parts: list[KeyedJagged] = []
    for batch in batches:
        parts.append(features_of(batch))
        if sum(part.stride() for part in parts) >= batch_size:
            yield _concatenated(parts), len(parts)
            parts = []
    if parts:
        yield _concatenated(parts), len(parts)


def joined_rows(parts: Sequence[KeyedJagged]) -> dict[str, Ints]:
    """Returns the rows of all parts for each feature that all of them have."""
    return _by_feature([_rows(part) for part in parts])


def _concatenated(parts: Sequence[KeyedJagged]) -> dict[str, tuple[Ints, Ints]]:
    lengths = _by_feature([_lengths(part) for part in parts])
    return {key: (rows, lengths[key].astype(np.int64)) for key, rows in joined_rows(parts).items()}


def _by_feature(parts: Sequence[Mapping[str, Ints]]) -> dict[str, Ints]:
    common = set.intersection(*map(set, parts))
    return {key: np.concatenate([p[key] for p in parts]) for key in parts[0] if key in common}


def _lengths(features: KeyedJagged) -> dict[str, Ints]:
    keys = features.keys()
    found = features.lengths().cpu().numpy().reshape(len(keys), features.stride())
    return dict(zip(keys, found, strict=True))


def _rows(features: KeyedJagged) -> dict[str, Ints]:
    rows = features.values().cpu().numpy().astype(np.int64)
    ends = features.offset_per_key()
    return {key: rows[ends[n] : ends[n + 1]] for n, key in enumerate(features.keys())}
