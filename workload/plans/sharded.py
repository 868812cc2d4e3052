"""Plans as searches have them: pieces of tables in columns, and options of the others."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from autoshard.workload.plans.plan import ShardingPlan
from autoshard.workload.tables.table import Piece
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import Options, option_of, pinned_parts


class Sharded(NamedTuple):
    """A plan as searches have it.

    Args:
        placed: Pieces of tables in columns, and their devices.
        options: Options of the other tables.
    """

    placed: Sequence[tuple[Piece, int]]
    options: Options = MappingProxyType({})

    @staticmethod
    def can_be(plan: ShardingPlan) -> bool:
        """Returns whether searches know such plans: no slices of columns in blocks of rows."""
        return not plan.has_grids

    @staticmethod
    def of(plan: ShardingPlan, task: ShardingTask) -> "Sharded":
        """Returns a plan."""
        held = plan.held_tables(task)
        placed = [
            (Piece(held[each.table], each.start, each.width), each.device)
            for each in plan.placements
            if len(each.devices) == 1
        ]
        return Sharded(placed, plan.all_options())

    @staticmethod
    def of_columns(
        task: ShardingTask, placed: Sequence[tuple[Piece, int]], options: Options
    ) -> "Sharded":
        """Returns the plan with these options, given what single devices hold by them."""
        names = {t.name for t in task.tables if option_of(options, t.name).by_columns}
        return Sharded([pair for pair in placed if pair[0].table.name in names], options)

    @property
    def is_split(self) -> bool:
        """Whether a table is in pieces."""
        return any(piece.width < piece.table.dim for piece, _ in self.placed)

    def plan(self, task: ShardingTask) -> ShardingPlan:
        """Returns the plan; columns of a table that meet on a device are one piece.

        Columns are assigned anew, so that a device has one piece of a table.
        """
        return ShardingPlan.of_pieces(task, self.placed).with_options(task, self.options)

    def columns_placed(self, task: ShardingTask) -> list[tuple[Piece, int]]:
        """Returns what the task of single devices places (`columns_task`): blocks of rows, too."""
        pinned = [
            part
            for table in task.tables
            for part in pinned_parts(task, table, option_of(self.options, table.name))
        ]
        return [*self.placed, *pinned]
