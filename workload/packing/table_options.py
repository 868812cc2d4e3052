"""Which options each table of a task may take, as far as rules, rows and the cost model allow."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.workload.errors import FieldError
from autoshard.workload.packing.pack import pack
from autoshard.workload.plans.plan import PlanError, ShardingPlan
from autoshard.workload.plans.protocols import Sharder
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.table import EmbeddingTable
from autoshard.workload.tasks.rules import Kind, Rule
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways import WAYS, OptionLimits, Way
from autoshard.workload.ways.option import (
    COLUMN_WISE,
    Options,
    ShardingOption,
    columns_task,
)
from autoshard.workload.ways.rows import Rows, in_blocks

_COUNTS = (1, 4, 16)  # of tables by rows that are tried where no plan fits without
_WORSE = 2  # plans in a row that are no faster end `until_worse`


@dataclass(frozen=True)
class OptionResources:
    """Resources of sharding options beside the memory of devices.

    Args:
        num_hot_ids: Tables whose most used rows are known, and how many of these: plans may copy
            them to all devices.
        hash_ids: Whether rows in blocks are numbered by a hash of their ids.
        host_bytes: Memory of the host for each device, where tables may be that do not fit into
            devices' memory; 0 if none may.
    """

    num_hot_ids: Mapping[str, int] = field(default_factory=dict)
    hash_ids: bool = False
    host_bytes: int = 0


NO_RESOURCES = OptionResources()


class TableOptions:
    """The options that the tables of a task may take.

    Args:
        limits: The task, and which options have a price. Caches follow from `host_bytes`.
        host_bytes: Memory of the host for each device, for tables for which device memory is too
            small; 0 if none may be there.

    Attributes:
        required: Options of tables to which rules leave no other.

    Raises:
        PlanError: Rules that cannot be kept together.
    """

    def __init__(self, limits: OptionLimits, host_bytes: int = 0) -> None:
        self.limits, self._host_bytes = limits, host_bytes
        self.task = task = limits.task
        self._kinds = {table.name: set[Kind]() for table in task.tables}  # of rules
        for rule in task.rules:
            for name in rule.tables:
                self._kinds[name].add(rule.kind)
        self.required = {
            name: self._demanded(way, table, rule)
            for table in task.tables
            for way in WAYS
            for rule in task.rules
            if rule.kind == way.demanded_by and (name := table.name) in rule.tables
        }

    def in_blocks(self, option: ShardingOption, count: int, first: int = 0) -> ShardingOption:
        """Returns an option in columns, but for `count` blocks of rows from device `first` on."""
        return in_blocks(option, count, first, self.limits)

    def of(self, table: EmbeddingTable) -> tuple[ShardingOption, ...]:
        """Returns the options of a table, columns first; one if rules leave no other."""
        return self._of_each[table.name]

    @property
    def any_choice(self) -> bool:
        """Whether any table may take several options."""
        return any(len(options) > 1 for options in self._of_each.values())

    def columns_task(self, options: Options) -> ShardingTask:
        """Returns the task of what single devices hold (`workload.ways.option.columns_task`).

        Raises:
            PlanError: There is no memory for the copies.
        """
        try:
            return columns_task(self.task, options)
        except FieldError as lack:
            raise PlanError(f"{lack.problem}: allow copies of fewer") from None

    @cached_property
    def cached(self) -> Sequence[Options]:
        """Sets in which tables are in host memory that do not fit into that of devices, with caches
        that are smaller from set to set; none where tables may not be there.
        """
        if not self._host_bytes:
            return []
        from autoshard.workload.ways.cache_sizes import options_with_caches  # few tasks need it

        return options_with_caches(self.task, self.required)

    @property
    def fit_into_devices(self) -> bool:
        """Whether the memory of all devices together is as large as all tables."""
        all_bytes = sum(map(self.task.table_bytes, self.task.tables))
        return all_bytes <= int(self.task.usable_bytes.sum())

    def allowed(self, found: Sequence[Sharded]) -> list[ShardingPlan]:
        """Returns the plans of which hosts have the memory; PlanError if there is none."""
        plans = [each.plan(self.task) for each in found]
        lacks = [self._lack_of_host(plan) for plan in plans]
        if all(lacks):
            raise PlanError(next(filter(None, lacks)))
        return [plan for plan, lack in zip(plans, lacks, strict=True) if lack is None]

    def _lack_of_host(self, plan: ShardingPlan) -> str | None:
        """Returns which device's tables need more of the host's memory than there is, if any."""
        if not plan.cached_rows:
            return None
        held = plan.host_bytes(self.task)
        most = max(range(len(held)), key=held.__getitem__)
        if held[most] <= self._host_bytes:
            return None
        return (
            f"device {most} would keep {format_bytes(held[most])} in host memory, of which "
            f"each device has {format_bytes(self._host_bytes)}: give more with "
            "--host-memory-gb, or add devices"
        )

    def within_memory(self, in_host: bool = True) -> Iterator[Options]:
        """Yields sets for tasks of short memory: in which few of the largest tables are by rows, or
        tables are in host memory, if they may be.
        """
        task = self.task
        rows = self.in_blocks(COLUMN_WISE, len(task.devices))
        may_have_rows = Rows()
        limits = replace(self.limits, rows=True)
        names = [
            table.name
            for table in sorted(task.tables, key=lambda table: -task.table_bytes(table))
            if table.name not in self.required
            and rows in self._options(may_have_rows, table, (), limits)
        ]
        for count in sorted({min(count, len(names)) for count in _COUNTS} - {0}):
            yield {**self.required, **dict.fromkeys(names[:count], rows)}
        yield from self.cached if in_host else ()

    def sharded(self, sharder: Sharder, options: Options) -> Sharded:
        """Returns the plan in which a sharder places the columns of the other tables.

        Raises:
            PlanError: There is no memory for copies, or the sharder finds no plan.
        """
        task = self.columns_task(options)
        placed = sharder.shard(task).placed(task) if task.tables else []
        return Sharded.of_columns(self.task, placed, options)

    def any_plan(self, in_host: bool = True) -> Sharded:
        """Returns any plan that fits into memory.

        Args:
            in_host: Whether tables may be in host memory then.

        Raises:
            PlanError: There is none, by the required options.
        """
        lack: PlanError | None = None
        for some in (self.required, *self.within_memory(in_host)):
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
        limits = replace(self.limits, in_host_memory=self.cached)
        found = dict[str, tuple[ShardingOption, ...]]()
        for table in self.task.tables:
            required = self.required.get(table.name)
            options = [COLUMN_WISE if required is None else required]
            for way in WAYS:
                if required is None or way.demanded_by is None:
                    options += self._options(way, table, options, limits)
            found[table.name] = tuple(options)
        return found

    def _options(
        self,
        way: Way,
        table: EmbeddingTable,
        known: Sequence[ShardingOption],
        limits: OptionLimits,
    ) -> list[ShardingOption]:
        """Returns the options of a way that no rule forbids a table."""
        kinds, ranks = self._kinds[table.name], len(self.task.devices)
        return [
            option
            for option in way.options(table, known, limits)
            if not any(way.forbids(kind, option, ranks) for kind in kinds)
        ]

    def _demanded(self, way: Way, table: EmbeddingTable, rule: Rule) -> ShardingOption:
        """Returns the option that a rule demands; PlanError if that cannot be."""
        name = table.name
        for other in self.task.rules:
            if name in other.tables and other.kind in way.forbidden_by:
                raise PlanError(
                    f"the constraints {rule.name!r} and {other.name!r} cannot be kept together for "
                    f"table {name}: drop one"
                )
        try:
            return way.demanded(table, self.limits)
        except FieldError as why:
            raise PlanError(
                f"the constraint {rule.name!r} cannot be kept for table {name}: {why.problem}"
            ) from None


def until_worse(
    steps_ms: Iterable[float], found: Sequence[object], least_ms: float = math.inf
) -> None:
    """Consumes the steps of plans that are made one after another, until some in a row are no
    faster than the fastest one.

    Args:
        steps_ms: Milliseconds of each plan; infinite without one.
        found: What there is to choose from, more with each plan. Without any, all are made.
        least_ms: The fastest one that there is already.
    """
    worse = 0
    for step_ms in steps_ms:
        worse = 0 if step_ms < least_ms else worse + 1
        least_ms = min(least_ms, step_ms)
        if worse >= _WORSE and found:
            return
