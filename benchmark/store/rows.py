"""Measurements as rows of the store's table."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from autoshard.benchmark.measurement import (
    Directions,
    Measurement,
    MeasureSettings,
    ReferenceLevel,
    Timing,
    method_of,
)
from autoshard.benchmark.operator.repeats import own_error
from autoshard.workload import OperatorOptions, Piece, Shard
from autoshard.workload.tables.operators import Optimizer, Weights

COLUMNS = (
    "batch_size", "weights", "optimizer", "seed", "hardware", "versions", "slices", "status",
    "reason", "forward_ms", "backward_ms", "spread", "iterations", "disturbed", "foreign_load",
    "operator_seconds", "device", "node", "measured_at", "quiet_forward_ms", "quiet_backward_ms",
    "forward_spread", "backward_spread", "device_state",
)  # fmt: skip
KEY = ("shard", "batch_size", "weights", "optimizer", "seed", "hardware", "versions")


def row_of(measurement: Measurement, piece_ids: Sequence[int]) -> tuple[Any, ...]:
    """Returns a measurement as a row in the order of COLUMNS."""
    settings, timing = measurement.settings, measurement.timing
    timed = (
        (timing.forward_ms, timing.backward_ms, timing.spread.both, timing.iterations,
         timing.disturbed, timing.foreign_load, timing.operator_seconds)
        if timing else (None,) * 7
    )  # fmt: skip
    level = None if timing is None else timing.reference_level
    reference_level = (None, None) if level is None else (level.forward_ms, level.backward_ms)
    spreads = (None, None) if timing is None else timing.spread[:2]
    return (
        settings.batch_size, settings.operator.weights, settings.operator.optimizer,
        settings.seed, measurement.hardware, measurement.versions, pack_ids(piece_ids),
        measurement.status, measurement.reason, *timed, measurement.device, measurement.node,
        measurement.measured_at, *reference_level, *spreads, measurement.device_state,
    )  # fmt: skip


def measurement_of(
    row: Sequence[Any],
    known: Mapping[int, Piece],
    level_of: Callable[[str, str], ReferenceLevel | None],
    shard: Shard | None = None,
) -> Measurement:
    """Returns the measurement that `row_of` wrote, at the store's reference level.

    Args:
        row: Values in the order of COLUMNS.
        known: Pieces by id.
        level_of: Returns the reference level of hardware and versions.
        shard: Its shard, if the caller has it.
    """
    (batch_size, weights, optimizer, seed, hardware, versions, ids, status, reason,
     forward_ms, backward_ms, both_spread, *timed, device, node, measured_at, quiet_forward_ms,
     quiet_backward_ms, forward_spread, backward_spread, state) = row  # fmt: skip
    if shard is None:
        shard = Shard.in_order(tuple([known[number] for number in unpack_ids(ids)]))
    timing = None
    if status == "ok":
        level = None
        if quiet_forward_ms is not None:
            level = ReferenceLevel(quiet_forward_ms, quiet_backward_ms, method_of(versions))
        spread = Directions.of(both_spread, forward_spread, backward_spread)
        own = Timing(forward_ms, backward_ms, spread, *[*timed, level])
        common = level_of(hardware, versions)
        timing = replace(own.normalized_to(common), error=own_error(own, common))
    return Measurement(
        shard, _settings(batch_size, weights, optimizer, seed), hardware, versions, status,
        device, node, measured_at, timing, reason, True, device_state=state or "",
    )  # fmt: skip


@lru_cache(maxsize=256)
def _settings(
    batch_size: int, weights: Weights, optimizer: Optimizer, seed: int
) -> MeasureSettings:
    return MeasureSettings(batch_size, OperatorOptions(weights, optimizer), seed)


def key_of(
    shard: Shard, settings: MeasureSettings, hardware: str, versions: str
) -> tuple[Any, ...]:
    """Returns the values of KEY."""
    return (
        shard.digest, settings.batch_size, settings.operator.weights, settings.operator.optimizer,
        settings.seed, hardware, versions,
    )  # fmt: skip


def pack_ids(ids: Sequence[int]) -> bytes:
    """Packs piece ids for the store: 32-bit, little-endian."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Returns the ids that `pack_ids` packed."""
    return struct.unpack(f"<{len(packed) // 4}i", packed)
