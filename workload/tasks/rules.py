"""Placement rules over tables, and whether a plan keeps them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from autoshard.workload.errors import FieldError
from autoshard.workload.tables.table import DIM_STEP

Kind = Literal[
    "together",
    "apart",
    "on",
    "not_on",
    "whole",
    "max_slices",
    "min_width",
    "copied",
    "not_copied",
    "row_wise",
    "not_row_wise",
    "not_on_a_node",
]

# These relate the tables of a rule; the others apply to each table.
_OF_SEVERAL = ("together", "apart")
_OF_DEVICES = ("on", "not_on")
_OF_WAYS = ("copied", "not_copied", "row_wise", "not_row_wise", "not_on_a_node")
_WITHOUT_NUMBERS = ("together", "apart", "whole", *_OF_WAYS)


@dataclass(frozen=True)
class Rule:
    """One placement rule.

    Args:
        kind: `together`: whole and on one device. `apart`: no two on one device. `on`, `not_on`:
            allowed or excluded devices. `whole`: not split. `max_slices`: maximum number of
            devices. `min_width`: minimum number of columns on each device of a split table.
            `copied`: each device has a copy. `row_wise`: in blocks of rows on all devices.
            `not_copied`, `not_row_wise`: not so. `not_on_a_node`: not in blocks of rows on the
            devices of a node (table-row-wise), nor in slices whose blocks are (a grid).
        tables: Names of tables.
        numbers: Numbers of devices, or the number that the kind requires.
        name: Name in messages.
    """

    kind: Kind
    tables: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise FieldError("kind", f"must be one of {', '.join(get_args(Kind))}")
        if not self.tables:
            raise FieldError(self.kind, "needs at least one table")
        if self.kind in _OF_SEVERAL and len(set(self.tables)) < 2:
            raise FieldError(self.kind, f"needs two tables or more, got {self.tables[0]} alone")
        if self.kind in _WITHOUT_NUMBERS:
            if self.numbers:
                raise FieldError(self.kind, "takes no number")
        elif self.kind in _OF_DEVICES:
            if not self.numbers or min(self.numbers) < 0:
                raise FieldError(self.kind, "needs devices")
        elif len(self.numbers) != 1 or self.numbers[0] < 1:
            raise FieldError(self.kind, f"must be a whole number from 1 up, got {self.numbers}")
        if self.kind == "min_width" and self.numbers[0] % DIM_STEP:
            raise FieldError(self.kind, f"must be a multiple of {DIM_STEP}, got {self.numbers[0]}")
        if not self.name:
            text = " ".join(map(str, (self.kind, *self.numbers)))
            object.__setattr__(self, "name", f"{', '.join(self.tables)}: {text}")

    @property
    def of_devices(self) -> bool:
        """Returns whether its numbers are devices."""
        return self.kind in _OF_DEVICES

    def to_json(self) -> dict[str, Any]:
        """Returns the rule as a JSON object."""
        return {**vars(self), "tables": list(self.tables), "numbers": list(self.numbers)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "Rule":
        """Returns the rule that `to_json` wrote."""
        fields = {**record, "tables": tuple(record["tables"]), "numbers": tuple(record["numbers"])}
        return Rule(**fields)

    @property
    def restricts_pieces(self) -> bool:
        """Returns whether it says anything of tables that are neither copied nor in blocks."""
        return self.kind not in ("not_copied", "not_row_wise", "not_on_a_node")

    def without(self, tables: Collection[str]) -> "Rule | None":
        """Returns the rule for other tables than these; None if it says nothing of them."""
        kept = tuple(table for table in self.tables if table not in tables)
        least = 2 if self.kind in _OF_SEVERAL else 1
        return replace(self, tables=kept) if len(set(kept)) >= least else None

    def broken_by(self, widths: Mapping[str, Mapping[int, int]]) -> str | None:
        """Returns how columns of tables break the rule; None if they keep it.

        Args:
            widths: Number of columns by device, of each table of the rule that is in columns.
        """
        tables = [table for table in self.tables if table in widths]
        if self.kind in _OF_WAYS:
            return None
        if self.kind == "together":
            return _not_together(tables, widths)
        if self.kind == "apart":
            return _not_apart(tables, widths)
        faults = ((table, self._broken_by_one(widths[table])) for table in tables)
        return next((f"{table} {fault}" for table, fault in faults if fault is not None), None)

    def _broken_by_one(self, widths: Mapping[int, int]) -> str | None:
        if self.kind in _OF_DEVICES:
            wrong = [d for d in widths if (d in self.numbers) != (self.kind == "on")]
            return f"is on device {wrong[0]}" if wrong else None
        if self.kind == "min_width":
            width = min(widths.values())
            narrow = width < self.numbers[0] and len(widths) > 1
            return f"has {width} columns on a device" if narrow else None
        max_devices = 1 if self.kind == "whole" else self.numbers[0]
        return f"is split over {len(widths)} devices" if len(widths) > max_devices else None


def _not_together(tables: Sequence[str], widths: Mapping[str, Mapping[int, int]]) -> str | None:
    devices = {table: sorted(widths[table]) for table in tables}
    first = devices[tables[0]]
    for table, found in devices.items():
        if len(found) > 1:
            return f"{table} is split over {len(found)} devices"
        if found != first:
            return f"{tables[0]} is on device {first[0]}, {table} on device {found[0]}"
    return None


def _not_apart(tables: Sequence[str], widths: Mapping[str, Mapping[int, int]]) -> str | None:
    owners: dict[int, str] = {}
    for table in tables:
        for device in widths[table]:
            if device in owners and owners[device] != table:
                return f"{owners[device]} and {table} are both on device {device}"
            owners[device] = table
    return None
