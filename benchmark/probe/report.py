"""`MachineProbe`: what a device's memory and its operators are capable of, as one JSON document.

A cost model reads it as a description of the machine. `probing` measures it; for a device that is
out of reach it can be inferred from measured shards or taken from a data sheet, and says so.
Whatever is missing is None, never 0. This module loads neither torch nor Ray.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from autoshard.benchmark.machine.hardware import SystemReport
from autoshard.benchmark.measurement import ReferenceLevel
from autoshard.workload import UserError, documents
from autoshard.workload.tables.operators import Optimizer

Source = Literal["measured", "inferred", "data sheet"]
PROBE_SECONDS = 5.0  # wall time of a probe by default
PROBE_SCHEMA = documents.Schema("autoshard.machine_probe", 1)


class ProbeError(UserError):
    """A probe that cannot be run, or a file that holds none."""


@dataclass(frozen=True)
class Passes:
    """Times of a forward and of a backward pass, in the unit that the field's name ends with."""

    forward: float | None = None
    backward: float | None = None


@dataclass(frozen=True)
class RowTimes:
    """Time for each of many random rows of one width in a working set, by fbgemm's operator.

    Args:
        row_bytes: Width of a row.
        ns: Forward for each looked-up row (a gather, pooled), backward for each distinct row (a
            read-modify-write, after sorting). The operator's start is subtracted.
    """

    row_bytes: int
    ns: Passes = Passes()


@dataclass(frozen=True)
class WorkingSet:
    """Speeds of memory while `size_bytes` of it are in use.

    Args:
        size_bytes: Size of the working set.
        copy_gb_s: Sequential copy, bytes read plus bytes written.
        latency_ns: Time of a load that depends on the load before, beyond that of one from L1.
        rows: Times of random rows, by width.
    """

    size_bytes: int
    copy_gb_s: float | None = None
    latency_ns: float | None = None
    rows: tuple[RowTimes, ...] = ()


@dataclass(frozen=True)
class UpdateTime:
    """Time of a backward pass for each distinct row, where memory hardly matters.

    Args:
        optimizer: Optimizer of the operator.
        row_bytes: Width of a row.
        ns: The time; the operator's start is subtracted.
    """

    optimizer: Optimizer
    row_bytes: int
    ns: float | None = None


@dataclass(frozen=True)
class OperatorPrices:
    """Time components of fbgemm's fused operator for rows of 16 bytes in the L2 cache.

    Args:
        start_us: Smallest operator: one table, one sample, one lookup.
        table_us: One more table.
        lookup_ns: One more lookup of a row that is looked up anyway.
        row_ns: One more distinct row among as many lookups.
        updates: Times of backward passes by optimizer and width. Those of SGD are in all other
            numbers. Kernels depend on the processor: on an Intel Xeon, an update by row-wise
            Adagrad took 25 times as long as one by SGD.
    """

    start_us: Passes = Passes()
    table_us: Passes = Passes()
    lookup_ns: Passes = Passes()
    row_ns: Passes = Passes()
    updates: tuple[UpdateTime, ...] = ()


@dataclass(frozen=True)
class ProbedShard:
    """A shard of `probe_shards.PROBE_SHARDS` by its name, and the milliseconds it took."""

    name: str
    ms: Passes = Passes()


@dataclass(frozen=True)
class MachineProbe:
    """Speeds of one device.

    Args:
        hardware: Fingerprint of the device.
        versions: Library versions; "" if nothing was run.
        source: How the numbers were obtained. With "inferred", at least one was not measured.
        reference_level: Time of the reference operator during the probe. Its ratio to a store's
            level says how much the host was slowed. None on devices that are not shared.
        system: What the system says of the device.
        operator: Prices of the fused operator.
        working_sets: Speeds of memory by size of the working set, ascending.
        shards: Costs of small shards at the reference level.
        seconds: Time that the probe took.
        measured_at: Time stamp, in seconds; 0 if nothing was run.
    """

    hardware: str
    versions: str = ""
    source: Source = "measured"
    reference_level: ReferenceLevel | None = None
    system: SystemReport = field(default_factory=SystemReport)
    operator: OperatorPrices = field(default_factory=OperatorPrices)
    working_sets: tuple[WorkingSet, ...] = ()
    shards: tuple[ProbedShard, ...] = ()
    seconds: float = 0.0
    measured_at: float = 0.0

    @property
    def kind(self) -> str:
        """Kind of the device, by which fingerprints begin."""
        return self.hardware.partition(":")[0]

    def update_ns(self, optimizer: Optimizer) -> float | None:
        """Returns the time that updating a distinct narrow row takes, if it was measured."""
        times = [each for each in self.operator.updates if each.optimizer == optimizer and each.ns]
        return min(times, key=lambda each: each.row_bytes).ns if times else None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document with its schema version."""
        return PROBE_SCHEMA.stamp(asdict(self))

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "MachineProbe":
        """Returns the probe that `to_json` wrote."""
        PROBE_SCHEMA.check(document)
        with documents.fields_of("probe"):
            fields = {name: document[name] for name in MachineProbe.__dataclass_fields__}
            probe: MachineProbe = _read(MachineProbe, fields, "probe")
            return probe


def save_probe(probe: MachineProbe, path: Path | str) -> None:
    """Writes a probe to a JSON file."""
    documents.write(path, probe.to_json())


def load_probe(path: Path | str, kind: str | None = None) -> MachineProbe:
    """Reads a probe.

    Args:
        path: JSON file.
        kind: Kind of device that it must describe; None for any.

    Raises:
        UserError: The file holds no probe, or that of another kind of device.
    """
    with documents.naming(path):
        probe = MachineProbe.from_json(documents.read(path))
        if kind is not None and probe.kind != kind:
            raise ProbeError(
                f'describes "{probe.hardware}", but a device of kind {kind} is needed: write it '
                "on such a device"
            )
        return probe


def _read(kind: Any, value: Any, name: str) -> Any:
    """Returns the field of a document as its type says; None is what was not measured.

    Args:
        kind: A dataclass of this module, whose fields are read likewise, or the type of a field.
        value: The value in the document.
        name: Name of the field, for errors.
    """
    of = get_args(kind)
    if NoneType in of:
        (kind,) = set(of) - {NoneType}
        if value is None:
            return None
        if kind is float and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ValueError(f"{name}: {value!r} is neither positive nor missing (null)")
        return _read(kind, value, name)
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} is no list: {value!r}")
        return tuple(_read(of[0], each, name) for each in value)
    if get_origin(kind) is Literal and value not in of:
        raise ValueError(f"{name} is none of {', '.join(of)}: {value!r}")
    if kind is str and not isinstance(value, str):
        raise TypeError(f"{name} is no text: {value!r}")
    types = get_type_hints(kind) if is_dataclass(kind) else None
    if types is None:
        return kind(value) if kind in (int, float) else value
    if unknown := sorted(set(value) - set(types)):
        raise ValueError(f"{name} has no field {unknown[0]!r}")
    return kind(**{field: _read(each, value[field], field) for field, each in types.items()})
