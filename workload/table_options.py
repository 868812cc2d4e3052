"""Which options each table of a task may take, as far as rules, rows and the cost model allow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from autoshard.workload.errors import FieldError
from autoshard.workload.options import (
    COLUMN_WISE,
    DATA_PARALLEL,
    Options,
    Sharded,
    ShardingOption,
    columns_task,
)
from autoshard.workload.packing import pack
from autoshard.workload.plans import PlanError, ShardingPlan
from autoshard.workload.protocols import Sharder
from autoshard.workload.rules import Kind
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables import EmbeddingTable, can_be_blocks, hot_name
from autoshard.workload.tasks import ShardingTask

_COUNTS = (1, 4, 16)  # of tables by rows that are tried where no plan fits without
# Of all device memory, for tables and caches where tables are in host memory: what is left lets
# pieces be placed, and devices be balanced.
_SHARES = (0.98, 0.95, 0.9, 0.8, 0.65, 0.5)


class TableOptions:
    """The options that the tables of a task may take.

    Args:
        task: The task.
        copies: Whether tables may be copied that need not be: that has a price.
        rows: Whether tables may be in blocks of rows that need not be.
        hot_rows: Tables whose hot rows may be copied, and how many rows that are.
        hash_ids: Whether rows in blocks are numbered by a hash of their ids.
        host_bytes: Memory of the host for each device, for tables for which device memory is too
            small; 0 if none may be there.

    Attributes:
        required: Options of tables to which rules leave no other.

    Raises:
        PlanError: Rules that cannot be kept together.
    """

    def __init__(
        self,
        task: ShardingTask,
        copies: bool = True,
        rows: bool = True,
        hot_rows: Mapping[str, int] = MappingProxyType({}),
        hash_ids: bool = False,
        host_bytes: int = 0,
    ) -> None:
        self.task, self._ranks = task, len(task.devices)
        self._may_copy, self._may_have_rows = copies, rows
        self.hot_rows, self._hash_ids, self._host_bytes = hot_rows, hash_ids, host_bytes
        everywhere = self.in_blocks(COLUMN_WISE, self._ranks)
        kinds: Mapping[Kind, ShardingOption] = {"copied": DATA_PARALLEL, "row_wise": everywhere}
        self.required: dict[str, ShardingOption] = {}
        for kind, option in kinds.items():
            for name in self._required(kind):
                self.required[name] = option

    def in_blocks(self, option: ShardingOption, count: int, first: int = 0) -> ShardingOption:
        """Returns an option in columns, but for `count` blocks of rows from device `first` on."""
        hot_rows = 0 if option.hot_rows is None and self._hash_ids else option.hot_rows
        return replace(option, row_blocks=count, first=first, hot_rows=hot_rows)

    def of(self, table: EmbeddingTable) -> tuple[ShardingOption, ...]:
        """Returns the options of a table, columns first; one if rules leave no other."""
        return self._of_each[table.name]

    @property
    def any_choice(self) -> bool:
        """Whether any table may take several options."""
        return any(len(options) > 1 for options in self._of_each.values())

    def columns_task(self, options: Options) -> ShardingTask:
        """Returns the task of what single devices hold (`workload.options.columns_task`).

        Raises:
            PlanError: There is no memory for the copies.
        """
        try:
            return columns_task(self.task, options)
        except FieldError:
            copied = [name for name, option in options.items() if option.copied]
            size = self.task.copies_memory(copied).total
            free = self.task.usable_bytes
            raise PlanError(
                f"copies of {len(copied)} tables take {format_bytes(size)} on each device, and "
                f"device {free.argmin()} has {format_bytes(int(free.min()))}: allow copies of fewer"
            ) from None

    @cached_property
    def cached(self) -> Sequence[Options]:
        """Sets in which tables are in host memory that do not fit into that of devices, with caches
        that are smaller from set to set; none where tables may not be there.
        """
        if not self._host_bytes:
            return []
        from autoshard.workload.host_memory import cached_rows  # other tasks do without it

        budgets = [share * float(self.task.usable_bytes.sum()) for share in _SHARES]
        found = list[Options]()
        for counts in cached_rows(self.task, budgets):
            caches = {
                name: replace(self.required.get(name, COLUMN_WISE), cached_rows=count)
                for name, count in counts.items()
            }
            found.append({**self.required, **caches})
        return [some for number, some in enumerate(found) if some not in found[:number]]

    @property
    def fit_into_devices(self) -> bool:
        """Whether the memory of all devices together is as large as all tables."""
        all_bytes = sum(map(self.task.table_bytes, self.task.tables))
        return all_bytes <= int(self.task.usable_bytes.sum())

    def check_host(self, plan: ShardingPlan) -> None:
        """Raises PlanError if a device's tables need more of the host's memory than there is."""
        if not plan.cached_rows:
            return
        held = plan.host_bytes(self.task)
        most = max(range(len(held)), key=held.__getitem__)
        if held[most] > self._host_bytes:
            raise PlanError(
                f"device {most} would keep {format_bytes(held[most])} in host memory, of which "
                f"each device has {format_bytes(self._host_bytes)}: give more with "
                "--host-memory-gb, or add devices"
            )

    def allowed(self, found: Sequence[Sharded]) -> list[ShardingPlan]:
        """Returns the plans of which hosts have the memory; PlanError if there is none."""
        plans, lack = [each.plan(self.task) for each in found], None
        allowed = list[ShardingPlan]()
        for plan in plans:
            try:
                self.check_host(plan)
                allowed.append(plan)
            except PlanError as error:
                lack = error
        if lack is not None and not allowed:
            raise lack
        return allowed

    def within_memory(self, caches: bool = True) -> Iterator[Options]:
        """Yields sets for tasks of short memory: in which few of the largest tables are by rows, or
        tables are in host memory, if they may be.
        """
        rows, task = self.in_blocks(COLUMN_WISE, self._ranks), self.task
        names = [
            table.name
            for table in sorted(task.tables, key=lambda table: -task.table_bytes(table))
            if table.name not in self.required and rows in self._rows_of(table)
        ]
        for count in sorted({min(count, len(names)) for count in _COUNTS} - {0}):
            yield {**self.required, **dict.fromkeys(names[:count], rows)}
        yield from self.cached if caches else ()

    def sharded(self, sharder: Sharder, options: Options) -> Sharded:
        """Returns the plan in which a sharder places the columns of the other tables.

        Raises:
            PlanError: There is no memory for copies, or the sharder finds no plan.
        """
        task = self.columns_task(options)
        placed = sharder.shard(task).placed(task) if task.tables else []
        return Sharded.of_columns(self.task, placed, options)

    def any_plan(self, rows: bool = True, caches: bool = True) -> Sharded:
        """Returns any plan that fits into memory.

        Args:
            rows: Whether large tables may be by rows where no plan fits without.
            caches: Whether tables may be in host memory then.

        Raises:
            PlanError: There is none, by the required options.
        """
        lack: PlanError | None = None
        for some in (self.required, *(self.within_memory(caches) if rows else ())):
            try:
                task = self.columns_task(some)
                return Sharded.of_columns(
                    self.task, pack(task, split=True) if task.tables else [], some
                )
            except PlanError as error:
                lack = lack or error
        assert lack is not None
        raise lack

    @cached_property
    def _of_each(self) -> Mapping[str, tuple[ShardingOption, ...]]:
        rules = self.task.rules
        kept = {name for rule in rules if not rule.allows_copies for name in rule.tables}
        found = dict[str, tuple[ShardingOption, ...]]()
        for table in self.task.tables:
            name, required = table.name, self.required.get(table.name)
            shared = [COLUMN_WISE] if required is None else [required]
            if required is None and self._may_have_rows:
                shared += self._rows_of(table)
            options = list(shared)
            if required is None and self._may_copy and self._ranks > 1 and name not in kept:
                options.append(DATA_PARALLEL)
            hot, caches = self.hot_rows.get(name, 0), self._caches.get(name, ())
            if hot and self._may_have_hot_rows(table):
                options += [replace(o, hot_rows=hot) for o in shared if _cold_fit(table, hot, o)]
            options += [replace(o, cached_rows=count) for o in shared for count in caches]
            found[name] = tuple(options)
        return found

    @cached_property
    def _caches(self) -> Mapping[str, Sequence[int]]:
        """Sizes of caches, in rows, that a table may have in host memory, by table."""
        found = dict[str, dict[int, None]]()
        for options in self.cached:
            for name, option in options.items():
                if option.cached_rows is not None:
                    found.setdefault(name, {})[option.cached_rows] = None
        return {name: tuple(counts) for name, counts in found.items()}

    def _may_have_hot_rows(self, table: EmbeddingTable) -> bool:
        """Whether each device may have a copy of hot rows of a table."""
        rules, names = self.task.rules, {table.name for table in self.task.tables}
        kept = {name for rule in rules if not rule.allows_hot_rows for name in rule.tables}
        return table.name not in kept and hot_name(table.name) not in names

    @cached_property
    def _in_columns(self) -> frozenset[str]:
        """Tables that no rule allows by rows."""
        rules = self.task.rules
        return frozenset(name for rule in rules if not rule.allows_rows for name in rule.tables)

    def _rows_of(self, table: EmbeddingTable) -> Sequence[ShardingOption]:
        """Returns blocks of rows on all devices, and on those of each node."""
        if table.name in self._in_columns:
            return ()
        ranks, nodes = self._ranks, self.task.nodes
        of_node, found = ranks // nodes, list[ShardingOption]()
        if ranks > 1 and can_be_blocks(table.rows, ranks):
            found.append(self.in_blocks(COLUMN_WISE, ranks))
        if 1 < of_node < ranks and can_be_blocks(table.rows, of_node):
            found += [self.in_blocks(COLUMN_WISE, of_node, n * of_node) for n in range(nodes)]
        return found

    def _required(self, kind: Kind) -> Sequence[str]:
        """Returns the tables that rules of a kind name; PlanError if others forbid that."""
        required = {
            name: rule for rule in self.task.rules if rule.kind == kind for name in rule.tables
        }
        for other in self.task.rules:
            allows = other.allows_copies if kind == "copied" else other.allows_rows
            for name in () if allows else other.tables:
                if name in required:
                    raise PlanError(
                        f"the constraints {required[name].name!r} and {other.name!r} cannot be "
                        f"kept together for table {name}: drop one"
                    )
        if kind == "row_wise":
            for table in self.task.tables:
                if table.name in required and not (
                    self._ranks > 1 and can_be_blocks(table.rows, self._ranks)
                ):
                    why = f"{table.rows} rows in {self._ranks} even blocks leave a device empty"
                    raise PlanError(
                        f"the constraint {required[table.name].name!r} cannot be kept for table "
                        f"{table.name}: {why if self._ranks > 1 else 'rows need two devices'}"
                    )
        return list(required)


def _cold_fit(table: EmbeddingTable, hot: int, option: ShardingOption) -> bool:
    """Whether all blocks of cold rows have some."""
    return option.row_blocks == 1 or can_be_blocks(table.rows - hot, option.row_blocks)
