"""`Way`: what plans, rules, searches and reports have to know of a way of sharding a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.workload.tables.table import EmbeddingTable
from autoshard.workload.tasks.rules import Kind
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import COLUMN_WISE, Options, ShardingOption

if TYPE_CHECKING:
    from autoshard.workload.plans.plan import ShardingPlan

_SHOWN = 3  # names in a sentence


@dataclass(frozen=True)
class OptionLimits:
    """Limits of the options of a task's tables.

    Args:
        task: The task.
        copies: Whether tables may be copied that need not be: that has a price.
        rows: Whether tables may be in blocks of rows that need not be.
        hot_rows: Tables whose hot rows may be copied, and how many rows that are.
        hash_ids: Whether rows in blocks are numbered by a hash of their ids.
        in_host_memory: Sets of options in which tables are in host memory, with caches.
    """

    task: ShardingTask
    copies: bool = True
    rows: bool = True
    hot_rows: Mapping[str, int] = field(default_factory=dict)
    hash_ids: bool = False
    in_host_memory: Sequence[Options] = ()

    @staticmethod
    def required(task: ShardingTask) -> "OptionLimits":
        """Returns the limits by which tables take what rules demand alone."""
        return OptionLimits(task, copies=False, rows=False)


class Way:
    """A way of sharding a table beside whole tables and slices of columns.

    Attributes:
        name: Label in differences of plans, and key in their JSON.
        demanded_by: Kind of rule by which its tables have no other option; None if there is none.
        forbidden_by: Kinds of rules whose tables may not have it.
        actions: Kinds of actions of the environment that give a table such an option.
        unmeasured: Why shards of such tables cannot be measured; None if they can.
    """

    name: str
    demanded_by: Kind | None = None
    forbidden_by: frozenset[Kind] = frozenset()
    actions: tuple[str, ...] = ()
    unmeasured: str | None = None

    def forbids(self, kind: Kind, option: ShardingOption, devices: int) -> bool:
        """Returns whether a table with a rule of this kind may not have an option that is sharded
        so, on so many devices.
        """
        return kind in self.forbidden_by

    def taken_by(self, option: ShardingOption) -> bool:
        """Returns whether a table with this option is sharded so."""
        raise NotImplementedError

    def rows_of(self, option: ShardingOption) -> int | None:
        """Returns the number of rows that an option names, by which tables differ in a way."""
        return None

    def says(self, table: str, yes: bool = True) -> str:
        """Returns the clause that a table is sharded so, or is not, for messages."""
        raise NotImplementedError

    def words(self, option: ShardingOption, slices: int, ranks: int) -> str:
        """Returns what an option that is sharded so is called in reports, as TorchRec's planner
        calls it.

        Args:
            option: The option.
            slices: Number of slices of columns.
            ranks: Number of devices.
        """
        raise NotImplementedError

    def where(self, option: ShardingOption, homes: str) -> str:
        """Returns where rows of a table that is sharded so are, with pieces on devices `homes`."""
        return homes

    def options(
        self, table: EmbeddingTable, known: Sequence[ShardingOption], limits: OptionLimits
    ) -> list[ShardingOption]:
        """Returns options that a table may have beside those of ways before this one."""
        raise NotImplementedError

    def after(
        self,
        action: str,
        option: ShardingOption,
        known: Sequence[ShardingOption],
        limits: OptionLimits,
    ) -> ShardingOption | None:
        """Returns the option of a table after one of `actions`; None if that changes nothing.

        By default a table in columns takes the first option that is sharded so.

        Args:
            action: Kind of action.
            option: Option of the table before.
            known: Options that it may take, columns first.
            limits: Limits of options.
        """
        if option != COLUMN_WISE:
            return None
        return next((each for each in known if self.taken_by(each)), None)

    def demanded(self, table: EmbeddingTable, limits: OptionLimits) -> ShardingOption:
        """Returns the option of a table that a rule demands; FieldError if it cannot have it."""
        raise NotImplementedError

    def fault(
        self, table: EmbeddingTable, option: ShardingOption, task: ShardingTask
    ) -> str | None:
        """Returns why a table with an option cannot be sharded so; None if it can, or is not."""
        return None

    def notes(self, plan: "ShardingPlan", task: ShardingTask) -> Iterator[str]:
        """Yields what users of a plan have to know of tables that are sharded so."""
        raise NotImplementedError


def names_of(tables: Sequence[str]) -> str:
    """Returns the first few names."""
    more = f" and {len(tables) - _SHOWN} more" if len(tables) > _SHOWN else ""
    return ", ".join(tables[:_SHOWN]) + more
