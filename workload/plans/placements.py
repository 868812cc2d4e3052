"""Where pieces of tables are: the parts of a plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.workload.errors import FieldError
from autoshard.workload.tables.table import EmbeddingTable, Piece, rows_of_block


@dataclass(frozen=True, order=True)
class Placement:
    """Columns `start` to `start + width` of a table on a device, by number in the task.

    Args:
        table: Name of the table.
        start: First column.
        width: Number of columns.
        device: Device, or the first of several.
        row_blocks: Devices, from `device` on, each of which holds a block of the rows: all of them
            (row-wise), or those of a node (table-row-wise; with several slices of columns a grid).
    """

    table: str
    start: int
    width: int
    device: int
    row_blocks: int = 1

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "Placement":
        """Returns the placement that `to_json` wrote; FieldError names an unknown field."""
        if unknown := sorted(set(record) - set(Placement.__dataclass_fields__)):
            raise FieldError(
                unknown[0],
                "is not a field of a placement: rows are in even blocks, row_blocks says how many",
            )
        for name, value in record.items():
            if name != "table" and type(value) is not int:
                problem = f"of table {record.get('table')} must be a whole number, got {value!r}"
                raise FieldError(name, problem)
        return Placement(**{**record, "table": str(record["table"])})

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        usual = {"row_blocks"} if self.row_blocks == 1 else set()
        return {name: value for name, value in vars(self).items() if name not in usual}

    @property
    def devices(self) -> range:
        """Returns all devices that hold rows of it."""
        return range(self.device, self.device + self.row_blocks)

    def row_ranges(self, rows: int) -> list[tuple[int, int, int]]:
        """Returns the first row that each device holds, the one after its last, and the device.

        Args:
            rows: Rows of the table.
        """
        size = rows_of_block(rows, self.row_blocks)
        firsts = range(0, size * self.row_blocks, size)
        return [(n, min(n + size, rows), d) for n, d in zip(firsts, self.devices, strict=True)]

    def device_of(self, row: int, rows: int) -> int:
        """Returns the device that holds a row of a table with so many rows."""
        return self.device + row // rows_of_block(rows, self.row_blocks)


def merged_by_device(placed: Iterable[tuple[Piece, int]]) -> list[tuple[Piece, int]]:
    """Returns one piece per table and device, with as many columns as before.

    Columns of a table are assigned anew, in the order of device numbers.
    """
    widths: dict[tuple[str, int], int] = {}
    tables: dict[str, EmbeddingTable] = {}
    for piece, device in placed:
        key = (piece.table.name, int(device))
        widths[key] = widths.get(key, 0) + piece.width
        tables[piece.table.name] = piece.table
    starts, found = dict.fromkeys(tables, 0), []
    for (name, device), width in sorted(widths.items()):
        found.append((Piece(tables[name], starts[name], width), device))
        starts[name] += width
    return found
