"""Training data of cost models: measurements that are read, checked and split by table."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.benchmark import (
    Exchange,
    Measurement,
    MeasurementStore,
    ReferenceLevel,
    Timing,
    read_parquet,
    read_parquet_exchanges,
)
from autoshard.benchmark.statistics import NORMAL_MEDIAN, UNKNOWN
from autoshard.workload import EmbeddingTable, OperatorOptions, Shard, UserError
from autoshard.workload.arrays import Floats
from autoshard.workload.tables.parts import PARTS, Part, part_of_shard

MIN_SHARDS = 5  # minimum number of shards in each part


class DataError(UserError):
    """Measurements that a model cannot be trained on."""


@dataclass(frozen=True)
class CostDataset:
    """Measured shards of one operator on one kind of hardware, at one reference level.

    Attributes:
        shards: The shards.
        batch_sizes: Batch size of each shard.
        costs_ms: Forward and backward, the weighted mean of repeat measurements, [shards, 2].
        errors: Relative standard error of each mean, shape [shards].
        repeats_ms: Total of each repeat measurement of each shard.
        exchanges: Measured all-to-alls of the same hardware.
    """

    shards: tuple[Shard, ...]
    batch_sizes: tuple[int, ...]
    costs_ms: Floats
    errors: Floats
    repeats_ms: tuple[tuple[float, ...], ...]
    operator: OperatorOptions
    hardware: str
    versions: str
    reference_level: ReferenceLevel | None = None
    exchanges: tuple[Exchange, ...] = ()

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def totals_ms(self) -> Floats:
        """Forward plus backward, shape [shards]."""
        return np.asarray(self.costs_ms.sum(axis=1))

    @property
    def most_common_batch(self) -> int:
        """The batch size of most shards."""
        return Counter(self.batch_sizes).most_common(1)[0][0]

    def tables(self) -> list[EmbeddingTable]:
        """Returns the distinct tables of all shards."""
        found = {
            (piece.table.access_digest, piece.table.dim): piece.table
            for shard in self.shards
            for piece in shard.pieces
        }
        return list(found.values())

    def subset(self, chosen: Sequence[int]) -> "CostDataset":
        """Returns the dataset of these shards."""
        return replace(
            self,
            shards=tuple(self.shards[n] for n in chosen),
            batch_sizes=tuple(self.batch_sizes[n] for n in chosen),
            costs_ms=self.costs_ms[list(chosen)],
            errors=self.errors[list(chosen)],
            repeats_ms=tuple(self.repeats_ms[n] for n in chosen),
        )

    def noise_floor(self) -> float | None:
        """Returns the median relative difference of two measurements of a shard, if known."""
        pairs = np.array([repeats[:2] for repeats in self.repeats_ms if len(repeats) > 1])
        if len(pairs) < MIN_SHARDS:
            return None
        return float(np.median(np.abs(pairs[:, 0] - pairs[:, 1]) / pairs.mean(axis=1)))

    def noise(self) -> float | None:
        """Returns the median relative error of the costs, which even a perfect model would show.

        It follows from the noise floor: two measurements differ by sqrt(2) times the error of one,
        and a mean of several has less. Without a floor it follows from `errors`; None if these are
        unknown.
        """
        repeats = np.array([len(repeats) for repeats in self.repeats_ms])
        floor = self.noise_floor()
        if floor is not None:
            return floor * float(np.sqrt(np.mean(1 / repeats) / 2))
        if np.median(self.errors * np.sqrt(repeats)) >= UNKNOWN:
            return None
        return float(np.median(self.errors)) * NORMAL_MEDIAN

    @staticmethod
    def of(
        measurements: Iterable[Measurement],
        exchanges: Iterable[Exchange] = (),
        where: str = "data",
        level: ReferenceLevel | None = None,
    ) -> "CostDataset":
        """Returns the dataset of measurements of one operator, hardware and set of versions.

        Args:
            measurements: Those without a cost are left out.
            exchanges: Measured all-to-alls.
            where: Source, for messages.
            level: Reference level of costs; by default that of the first measurement.
        """
        kept = [measurement for measurement in measurements if measurement.status == "ok"]
        if not kept:
            raise DataError(f"{where}: holds no costs: collect_costs.py measures some")
        levels = [
            m.timing.reference_level
            for m in kept
            if m.timing and m.timing.reference_level is not None
        ]
        level = level or (levels[0] if levels else None)
        kept = [measurement.normalized_to(level) for measurement in kept]
        for measurement in kept:
            _check_costs(measurement, where)
        merged: dict[tuple[str, int], list[Measurement]] = {}
        for measurement in kept:
            key = (measurement.shard.digest, measurement.settings.batch_size)
            merged.setdefault(key, []).append(measurement)
        repeats = [[m.timing for m in same if m.timing is not None] for same in merged.values()]
        worth = [1 / variances for variances in _variances(repeats)]
        return CostDataset(
            shards=tuple(same[0].shard for same in merged.values()),
            batch_sizes=tuple(same[0].settings.batch_size for same in merged.values()),
            costs_ms=np.array(
                [
                    np.average([(t.forward_ms, t.backward_ms) for t in same], axis=0, weights=each)
                    for same, each in zip(repeats, worth, strict=True)
                ]
            ),
            errors=np.array([each.sum() ** -0.5 for each in worth]),
            repeats_ms=tuple(tuple(t.total_ms for t in same) for same in repeats),
            operator=kept[0].settings.operator,
            hardware=kept[0].hardware,
            versions=kept[0].versions,
            reference_level=level,
            exchanges=tuple(exchanges),
        )


@dataclass(frozen=True)
class Selection:
    """Which of a store's measurements to use; None if the store holds one kind only."""

    weights: str | None = None
    optimizer: str | None = None
    batch_sizes: tuple[int, ...] = ()
    hardware: str | None = None


def read_costs(
    sources: Sequence[Path | str],
    selection: Selection | None = None,
    level: ReferenceLevel | None = None,
) -> CostDataset:
    """Reads a dataset from stores and Parquet files.

    Args:
        sources: Paths.
        selection: Required where sources hold several operators or kinds of hardware.
        level: Reference level of costs; by default that of the first measurement.

    Raises:
        DataError: The sources hold no costs, or costs that cannot be mixed.
    """
    if not sources:
        raise DataError("name at least one store or Parquet file to learn from")
    chosen = selection or Selection()
    measurements: list[Measurement] = []
    exchanges: list[Exchange] = []
    for source in sources:
        found, found_exchanges = _read(Path(source))
        measurements += found
        exchanges += found_exchanges
    where = ", ".join(str(source) for source in sources)
    # A store and its own Parquet file hold the same measurements, which are not repeats.
    unique = {(m.shard.digest, m.settings, m.device, m.measured_at): m for m in measurements}
    kept = [measurement for measurement in unique.values() if measurement.status == "ok"]
    if not kept:
        raise DataError(f"{where}: holds no costs: collect_costs.py measures some")
    of = attrgetter
    kept = _narrow(kept, of("settings.operator.weights"), chosen.weights, "weights", where)
    kept = _narrow(kept, of("settings.operator.optimizer"), chosen.optimizer, "optimizer", where)
    kept = _narrow(kept, of("hardware"), chosen.hardware, "hardware", where)
    kept = _narrow(kept, of("versions"), None, "versions", where)
    if chosen.batch_sizes:
        held = sorted({m.settings.batch_size for m in kept})
        kept = [m for m in kept if m.settings.batch_size in chosen.batch_sizes]
        if not kept:
            raise DataError(
                f"{where}: holds no costs of batch size "
                f"{' or '.join(map(str, chosen.batch_sizes))}, it holds "
                f"{', '.join(map(str, held))}"
            )
    once = {(e.key, e.hardware, e.versions, e.measured_at): e for e in exchanges}.values()
    same = [e for e in once if (e.hardware, e.versions) == (kept[0].hardware, kept[0].versions)]
    return CostDataset.of(kept, same, where, level)


def stored_costs(
    store: MeasurementStore, make: tuple[str, str], operator: OperatorOptions, batch_size: int
) -> list[Measurement]:
    """Returns a store's costs for a make (hardware and versions), operator and batch size."""
    return [
        measurement
        for measurement in store.measurements()
        if measurement.ok
        and (measurement.hardware, measurement.versions) == make
        and measurement.settings.operator == operator
        and measurement.settings.batch_size == batch_size
    ]


def split(data: CostDataset, must_be_full: bool = True) -> dict[Part, CostDataset]:
    """Splits a dataset into `PARTS` by table; shards with tables of several parts are left out.

    Raises:
        DataError: A part has fewer than `MIN_SHARDS` shards, and `must_be_full` is true.
    """
    numbers: dict[Part | None, list[int]] = {part: [] for part in PARTS}
    for number, shard in enumerate(data.shards):
        numbers.setdefault(part_of_shard(shard), []).append(number)
    for part in PARTS:
        if must_be_full and len(numbers[part]) < MIN_SHARDS:
            mixed = len(numbers.get(None, []))
            raise DataError(
                f"{len(data)} shards are too few: {len(numbers[part])} are of {part} tables alone "
                f"and {MIN_SHARDS} are needed ({mixed} mix tables of several parts): measure "
                "more with collect_costs.py, which keeps the parts apart"
            )
    return {part: data.subset(numbers[part]) for part in PARTS}


def _variances(repeats: Sequence[Sequence[Timing]]) -> list[Floats]:
    """Returns the relative variance of each repeat measurement of each shard.

    It is the stated variance plus the additional variance that repeated shards show: index batches
    differ, and so do hours and memory layouts. Impossible errors are replaced by the
    median of the others.
    """
    errors = np.array([timing.error.both for same in repeats for timing in same])
    possible = np.isfinite(errors) & (errors > 0)
    usual = np.median(errors[possible]) if possible.any() else UNKNOWN
    stated = np.where(possible, errors, usual) ** 2
    by_shard = np.split(stated, np.cumsum([len(same) for same in repeats])[:-1])
    several = [n for n, same in enumerate(repeats) if len(same) > 1]
    if len(several) < MIN_SHARDS:
        return by_shard
    ratios = [np.log(repeats[n][0].total_ms / repeats[n][1].total_ms) for n in several]
    found = (np.median(np.abs(ratios)) / NORMAL_MEDIAN) ** 2
    beyond = max(0.0, found - np.median([by_shard[n][:2].sum() for n in several])) / 2
    return [variances + beyond for variances in by_shard]


def _read(path: Path) -> tuple[list[Measurement], list[Exchange]]:
    if path.suffix == ".parquet":
        return read_parquet(path), read_parquet_exchanges(path)
    with MeasurementStore(path, must_exist=True) as store:
        return store.measurements(), store.exchanges()


def _narrow(
    kept: list[Measurement],
    value_of: Callable[[Measurement], Any],
    requested: Any | None,
    what: str,
    where: str,
) -> list[Measurement]:
    """Returns the measurements with the requested value; without one, all must agree."""
    counts = Counter(map(value_of, kept))
    held = ", ".join(f"{value} ({count})" for value, count in sorted(counts.items()))
    if requested is None and len(counts) > 1:
        option = f"choose with --{what}" if what != "versions" else "name files of one of them"
        raise DataError(f"{where}: holds costs of several {what}: {held}: {option}")
    if requested is not None and requested not in counts:
        raise DataError(f"{where}: holds no costs of {what} {requested}, it holds {held}")
    return kept if requested is None else [m for m in kept if value_of(m) == requested]


def _check_costs(measurement: Measurement, where: str) -> None:
    timing = measurement.timing
    costs = (None, None) if timing is None else (timing.forward_ms, timing.backward_ms)
    if not all(isinstance(ms, float) and np.isfinite(ms) and ms > 0 for ms in costs):
        raise DataError(
            f"{where}: the costs of shard {measurement.shard.digest} "
            f"({len(measurement.shard)} tables, batch {measurement.settings.batch_size}) are "
            f"{costs[0]} and {costs[1]} ms, not positive numbers: measure it again"
        )
