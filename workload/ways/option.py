"""Sharding options: how the rows and columns of one table are spread over devices and memories."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from typing import Any

from autoshard.workload.errors import FieldError
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.operators import MemoryParts
from autoshard.workload.tables.table import EmbeddingTable, Piece, hot_name
from autoshard.workload.tasks.rules import Rule
from autoshard.workload.tasks.task import Device, ShardingTask


class OutputExchange(IntEnum):
    """How outputs of tables get to the devices of their samples. Those of a kind go together."""

    OUTPUTS = 0  # all-to-all of outputs
    SUMS = 1  # partial sums, reduced and scattered by all devices
    NODE_SUMS = 2  # partial sums, reduced within a node, and then sent to others

    @staticmethod
    def of(table: EmbeddingTable, spread: int, ranks: int) -> "OutputExchange":
        """Returns the exchange of a table each row of which is on one of `spread` devices."""
        if spread == 1:
            return OutputExchange.OUTPUTS
        if spread < ranks:
            return OutputExchange.NODE_SUMS
        return OutputExchange.SUMS if table.pooled else OutputExchange.OUTPUTS


@dataclass(frozen=True)
class ShardingOption:
    """How a table is sharded, but for the devices of its columns.

    Args:
        copied: Whether each device has a copy (data-parallel).
        row_blocks: Number of blocks of rows, on as many devices (row-wise, table-row-wise); 1 where
            the table is whole or in slices of columns.
        first: First device of the blocks.
        hot_rows: Number of the most used rows of which each device has a copy. The others are cold,
            in columns or in blocks of rows, and numbered by a hash of their ids. 0: all rows are
            numbered so. None: rows are as they come.
        cached_rows: Rows for which caches in device memory have room, if the table is in host
            memory; None if it is in device memory.
    """

    copied: bool = False
    row_blocks: int = 1
    first: int = 0
    hot_rows: int | None = None
    cached_rows: int | None = None

    @property
    def by_columns(self) -> bool:
        """Whether any device may have any columns of the table, or of its cold rows."""
        return not self.copied and self.row_blocks == 1

    @property
    def homes(self) -> range:
        """Devices of the parts of a table, if the option says them: each has a block of rows."""
        return range(self.first, self.first + self.row_blocks * (self.row_blocks > 1))

    def at(self, first: int) -> "ShardingOption":
        """Returns the option with `homes` from that device on; as it is where it has none."""
        return replace(self, first=first) if self.homes and self.first != first else self

    def exchange(self, table: EmbeddingTable, ranks: int) -> OutputExchange | None:
        """Returns how a table's outputs are exchanged among `ranks` devices; None if they are not,
        as each device has a copy.
        """
        return None if self.copied else OutputExchange.of(table, max(1, len(self.homes)), ranks)

    @property
    def has_copies(self) -> bool:
        """Whether each device has a copy of the table, or of some rows."""
        return self.copied or bool(self.hot_rows)

    def copied_part(self, table: str) -> str:
        """Returns what each device has a copy of, for messages."""
        return f"hot rows of {table} are" if self.hot_rows else f"table {table} is"

    def same_row_numbers(self, other: "ShardingOption") -> bool:
        """Returns whether both options number rows in the same way."""
        return self.hot_rows == other.hot_rows

    @property
    def on_many(self) -> bool:
        """Whether several devices have rows of the same columns: copies, or blocks of rows."""
        return self.has_copies or len(self.homes) > 0

    @property
    def without_blocks(self) -> "ShardingOption":
        """The option but for blocks of rows, which a plan has in its placements."""
        return replace(self, row_blocks=1, first=0) if self.row_blocks > 1 else self

    def held(self, table: EmbeddingTable, batch_size: int) -> EmbeddingTable:
        """Returns the table whose columns or blocks single devices hold: with its cache, or with
        cold rows alone. It keeps the table's name.
        """
        if self.cached_rows is not None:
            table = replace(table, cached_rows=self.cached_rows)
        if self.hot_rows is None:
            return table
        from autoshard.workload.access.hot_rows import cold_rows  # few tasks need its sums

        return cold_rows(table, self.hot_rows, batch_size)

    def copies(self, table: EmbeddingTable, batch_size: int) -> tuple[EmbeddingTable, ...]:
        """Returns the tables of which each device has a copy: this one, or that of its hot rows."""
        if self.copied:
            return (table,)
        if not self.hot_rows:
            return ()
        from autoshard.workload.access.hot_rows import hot_and_cold

        return hot_and_cold(table, self.hot_rows, batch_size)[:1]

    def common_memory(self, table: EmbeddingTable, task: ShardingTask) -> MemoryParts:
        """Returns what a table takes on each device, beside its parts on single ones: copies, and
        the numbers of hot rows.
        """
        copies = self.copies(table, task.batch_size)
        if not copies:
            return MemoryParts()
        held = task.operator.copies_memory(copies, task.batch_size, len(task.devices))
        return held.plus(MemoryParts(inputs=_HOT_ID_BYTES * table.rows if self.hot_rows else 0))

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object of what differs from a table in columns."""
        return {name: value for name, value in asdict(self).items() if value != _USUAL[name]}

    @staticmethod
    def from_json(table: str, record: Mapping[str, Any]) -> "ShardingOption":
        """Returns the option of a table that `to_json` wrote, without blocks of rows."""
        for name, value in record.items():
            if name not in _KINDS:
                known = f"{', '.join(_KINDS)}; placements say row_blocks"
                raise FieldError("options", f"{name} of table {table} is none of {known}")
            if type(value) is not _KINDS[name] or value is False:
                must = "a whole number" if _KINDS[name] is int else "true"
                raise FieldError(
                    "options", f"{name} of table {table} must be {must}, got {value!r}"
                )
        if not record:
            raise FieldError("options", f"say nothing of table {table}: leave it out")
        return ShardingOption(**record)


COLUMN_WISE = ShardingOption()
DATA_PARALLEL = ShardingOption(copied=True)
_USUAL = {each.name: getattr(COLUMN_WISE, each.name) for each in fields(ShardingOption)}
_KINDS: Mapping[str, type] = {"copied": bool, "hot_rows": int, "cached_rows": int}
_HOT_ID_BYTES = 4  # on each device for each row of a table, to tell whether it is hot

Options = Mapping[str, ShardingOption]  # of tables that are not `COLUMN_WISE`, by name


def option_of(options: Options, table: str) -> ShardingOption:
    """Returns the option of a table."""
    return options.get(table, COLUMN_WISE)


def common_memory(task: ShardingTask, options: Options) -> MemoryParts:
    """Returns what all tables with these options take on each device, beside their parts."""
    found = MemoryParts()
    for table in task.tables:
        if table.name in options:
            found = found.plus(options[table.name].common_memory(table, task))
    return found


def all_copies(task: ShardingTask, options: Options) -> list[EmbeddingTable]:
    """Returns the tables, and tables of hot rows, of which each device has a copy."""
    return [
        copy
        for table in task.tables
        if table.name in options
        for copy in options[table.name].copies(table, task.batch_size)
    ]


def pinned_parts(
    task: ShardingTask, table: EmbeddingTable, option: ShardingOption
) -> list[tuple[Piece, int]]:
    """Returns the parts of a table that have their devices by its option, and these: blocks of
    rows.
    """
    if not option.homes:
        return []
    blocks = task.row_blocks(option.held(table, task.batch_size), option.row_blocks)
    return [(block.whole(), home) for block, home in zip(blocks, option.homes, strict=True)]


def tables_of_parts(task: ShardingTask, options: Options) -> dict[str, str]:
    """Returns the access digest of the table of each block of rows, and of cold rows and tables
    with caches, by that of the part.
    """
    found = dict[str, str]()
    for table in task.tables:
        option = option_of(options, table.name)
        held = option.held(table, task.batch_size)
        parts = (held, *(part.table for part, _ in pinned_parts(task, table, option)))
        found.update(dict.fromkeys((part.access_digest for part in parts), table.access_digest))
    return found


def columns_task(
    task: ShardingTask, options: Options, grids: Collection[str] = (), reserve: bool = True
) -> ShardingTask:
    """Returns the task of what single devices hold: columns of tables, and blocks of rows, each a
    table of its own that is whole and on its device.

    Args:
        task: The task.
        options: Options of its tables.
        grids: Tables of which each slice of columns is in blocks of rows on devices of its own;
            their blocks may be on any devices that have blocks of that number.
        reserve: Whether the memory of copies is reserved, to plan; plans are priced without.

    Raises:
        FieldError: A device has no memory for the copies and more.
    """
    if not options:
        return task
    devices = _with_common_memory(task, options) if reserve else task.devices
    tables, of_blocks, elsewhere = list[EmbeddingTable](), list[Rule](), list[str]()
    for table in task.tables:
        option = option_of(options, table.name)
        if option.by_columns:
            tables.append(option.held(table, task.batch_size))
            elsewhere += [hot_name(table.name)] * bool(option.hot_rows)
            continue
        elsewhere.append(table.name)
        blocks = pinned_parts(task, table, option)
        tables += [block.table for block, _ in blocks]
        of_blocks += _rules_of(blocks, table.name, task, table.name in grids)
    gone = {table.name for table in task.tables} - {table.name for table in tables}
    kept = (rule.without(gone) if gone else rule for rule in task.rules)
    rules = (*(rule for rule in kept if rule is not None), *of_blocks)
    beside = (*task.beside, *elsewhere)
    return replace(task, tables=tuple(tables), devices=devices, rules=rules, beside=beside)


def _with_common_memory(task: ShardingTask, options: Options) -> tuple[Device, ...]:
    """Returns devices on which the memory is reserved that tables take on each of them."""
    taken, free = common_memory(task, options).total, task.usable_bytes
    if not taken:
        return task.devices
    if taken >= free.min():
        count = sum(option.has_copies for option in options.values())
        raise FieldError(
            "options",
            f"copies of {count} tables, or of their hot rows, take {format_bytes(taken)} on each "
            f"device, and device {free.argmin()} has {format_bytes(int(free.min()))}",
        )
    return tuple(
        replace(device, reserved_bytes=device.reserved_bytes + taken) for device in task.devices
    )


def _rules_of(
    blocks: list[tuple[Piece, int]], table: str, task: ShardingTask, grid: bool
) -> list[Rule]:
    """Returns the rules that keep blocks of rows where they are."""
    found, ranks = list[Rule](), len(task.devices)
    for number, (block, home) in enumerate(blocks):
        allowed = tuple(range(number, ranks, len(blocks))) if grid else (home,)
        found.append(Rule("on", (block.table.name,), allowed, f"{table}: in blocks of rows"))
    names = tuple(block.table.name for block, _ in blocks)
    return [*found, *([Rule("whole", names)] if names and not grid else [])]
