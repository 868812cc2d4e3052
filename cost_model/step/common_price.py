"""The part of a step's cost that is equal on all devices, as a sum over the options of tables.

Each option of a table adds loads, as each piece adds amounts to its device; the price of their sum
adds what is paid once: the start of a further exchange, the order of outputs. So a search prices
many changes of options at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.cost_model.step.overhead import StepOverhead, splits_of
from autoshard.workload import EmbeddingTable, Objective, ShardingPlan, ShardingTask, UserError
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.plans.step_price import (
    FurtherExchanges,
    copies_uncounted,
    first_copy,
    further_ways_ms,
    node_columns,
)
from autoshard.workload.ways.option import Options, OutputExchange, ShardingOption, all_copies

# Loads of an option: its exchange, copies, its own milliseconds, and its columns on each node.
_COPIES, OWN_MS = len(OutputExchange), len(OutputExchange) + 1
NODES = OWN_MS + 1  # the first load of a node


@dataclass(frozen=True)
class CommonRates:
    """Prices sums of loads: of one task, or of several tasks side by side.

    For one task the fields are numbers, and loads may have any leading dimensions. For several
    tasks the fields are arrays [tasks], and so are the sums.

    Args:
        overhead: What training takes beside operators, if that counts.
        exchanges: What further exchanges take.
        own: Samples of one rank.
        columns_in_order: Columns that are put in order anew where there are splits or several kinds
            of options.
        dense_ms: Milliseconds of the dense part of the model.
    """

    overhead: StepOverhead | None
    exchanges: FurtherExchanges
    own: Any
    columns_in_order: Any
    dense_ms: Any

    @staticmethod
    def of(
        overhead: StepOverhead | None,
        objective: Objective,
        batch_size: int,
        ranks: int,
        columns_in_order: float,
    ) -> "CommonRates":
        """Returns the rates of a task."""
        exchanges = FurtherExchanges.of(objective, batch_size, ranks)
        own = batch_size / ranks
        return CommonRates(overhead, exchanges, own, columns_in_order, objective.dense_ms)

    @property
    def row(self) -> tuple[float, ...]:
        """The numbers of one task, for `rows`."""
        return *vars(self.exchanges).values(), self.own, self.columns_in_order, self.dense_ms

    @staticmethod
    def rows(overhead: StepOverhead | None, table: Floats) -> "CommonRates":
        """Returns the rates of tasks side by side, each a row of numbers: [tasks, numbers]."""
        *exchanges, own, columns_in_order, dense_ms = table.T
        return CommonRates(overhead, FurtherExchanges(*exchanges), own, columns_in_order, dense_ms)

    def ms(self, loads: Floats, splits: Ints | int = 0) -> Floats:
        """Returns milliseconds of a step with these sums of loads.

        Args:
            loads: Sums over all tables, [..., loads].
            splits: Slices of outputs that are more than one for a feature, [...], or a number.
        """
        columns, rows, node_rows, copies = np.moveaxis(loads[..., :OWN_MS], -1, 0)
        found = loads[..., OWN_MS] + np.zeros(np.shape(splits))
        found = found + self.exchanges.ms(columns > 0, rows > 0, node_rows > 0, loads[..., NODES:])
        if self.overhead is None:
            return np.asarray(found)
        in_blocks, shared = rows + node_rows > 0, self.overhead.shared_rates
        kinds = (columns > 0) + 1 * in_blocks + (copies > 0)
        in_order = (np.asarray(splits) > 0) | (kinds > 1)
        found += shared[-1] + self.dense_ms
        found += self.own * self.columns_in_order * shared[3] * in_order
        found += self.own * shared[4] * splits
        found += (self.overhead.input_latency_ms or 0.0) * (num_sharded(loads) > 0)
        found += self.overhead.of_rows.start_ms * (in_blocks & (columns > 0))
        if self.overhead.copies is not None:
            found += self.overhead.copies.start_ms * (copies > 0)
        return np.asarray(found)


def num_sharded(loads: Floats) -> Floats:
    """Returns how many tables are not copied, of sums of loads [..., loads]."""
    return np.asarray(loads[..., :_COPIES].sum(-1))


def loads_of_whole(tables: int) -> Floats:
    """Returns loads of so many whole tables, without their own milliseconds: [NODES]."""
    found = np.zeros(NODES)
    found[OutputExchange.OUTPUTS] = tables
    return found


class CommonPrice:
    """Prices what all devices bear, by the options of a task's tables.

    Args:
        overhead: What training takes beside operators, if that counts.
        task: The task.
    """

    def __init__(self, overhead: StepOverhead | None, task: ShardingTask) -> None:
        self.task = task
        self._ranks, self._per_node = len(task.devices), len(task.devices) // task.nodes
        self._tables = {table.name: table for table in task.tables}
        self.rates = CommonRates.of(
            overhead, task.objective, task.batch_size, self._ranks, task.columns_in_order
        )
        self._overhead = overhead
        self._known: dict[tuple[str, ShardingOption], Floats] = {}  # searches ask again and again
        names = [table.name for table in task.tables]
        # Of tables as they are, all at once; of what options make of them, when asked for.
        self._sharded_ms = dict(zip(names, self._of_sharded(task.tables).tolist(), strict=True))
        self._copies_ms = dict(zip(names, self._of_copies(task.tables).tolist(), strict=True))

    @property
    def knows_copies(self) -> bool:
        """Whether it is known what copies take."""
        return self._overhead is not None and self._overhead.copies is not None

    @property
    def counts_splits(self) -> bool:
        """Whether slices of outputs take time of their own."""
        return self._overhead is not None

    def loads(self, table: str, option: ShardingOption) -> Floats:
        """Returns what a table adds by an option: [loads]."""
        key = table, option
        if key not in self._known:
            self._known[key] = self._loads(table, option)
        return self._known[key]

    def _loads(self, table: str, option: ShardingOption) -> Floats:
        found, whole = np.zeros(NODES + self.task.nodes), self._tables[table]
        exchange = option.exchange(whole, self._ranks)
        found[_COPIES], found[OWN_MS] = float(option.has_copies), self._own_ms(whole, option)
        if exchange is None:
            return found
        found[exchange] = 1.0
        if exchange is OutputExchange.OUTPUTS:
            return found
        if exchange is OutputExchange.NODE_SUMS:
            found[NODES + option.homes[0] // self._per_node] = whole.whole().output_width
        if self._overhead is not None:
            found[OWN_MS] += self._overhead.of_rows.ms(self.task, {table: len(option.homes)})
        return found

    def loads_of(self, options: Options) -> Floats:
        """Returns the sum over all tables: [loads]."""
        found = np.zeros(NODES + self.task.nodes)
        found[OutputExchange.OUTPUTS] = sum(table not in options for table in self._tables)
        found[OWN_MS] = sum(ms for name, ms in self._sharded_ms.items() if name not in options)
        for table, option in options.items():
            found += self.loads(table, option)
        return found

    def whole_ms(self, splits: int = 0) -> float:
        """Returns what all devices bear if no table has an option, with so many splits."""
        return float(self.ms(self.loads_of({}), splits))

    def plan_ms(self, plan: ShardingPlan) -> float:
        """Returns what all devices bear in a step by a plan.

        Raises:
            UserError: The plan has copies, and what they take is unknown.
        """
        self.check(plan)
        splits = splits_of(plan.placed(self.task)) if self.counts_splits else 0
        loads = self.loads_of(plan.all_options())
        loads[NODES:] = node_columns(plan, self.task)  # of a grid, those of all its slices
        return float(self.ms(loads, splits))

    def check(self, plan: ShardingPlan) -> None:
        """Raises UserError if the plan has copies, and it is not known what they take."""
        if plan.has_copies and not self.knows_copies:
            raise self._copies_unknown(plan)

    def error_ms(self, plan: ShardingPlan, normal: Floats) -> Floats:
        """Returns the error of `plan_ms`, [scenarios], which is that of copies.

        Args:
            plan: The plan, which has copies.
            normal: Standard normal draws, one for each scenario; copies take the same relative
                error in all plans.
        """
        assert self._overhead is not None
        overhead = self._overhead.copies
        assert overhead is not None  # or `plan_ms` has no price
        relative = np.exp(overhead.deviation * normal - overhead.deviation**2 / 2) - 1
        copies = all_copies(self.task, plan.options)
        return np.asarray(overhead.ms(self.task, copies) * relative)

    def exchanges_ms(self, plan: ShardingPlan) -> float:
        """Returns the part of `plan_ms` that links take."""
        return further_ways_ms(plan, self.task)

    def _copies_unknown(self, plan: ShardingPlan) -> UserError:
        if self._overhead is None:
            return copies_uncounted(plan, self.task)
        return UserError(
            f"{first_copy(plan)}, and the cost model does not know what copies take: rehearse.py "
            "--num-copying measures it"
        )

    def ms(self, loads: Floats, splits: Ints | int = 0) -> Floats:
        """Returns milliseconds of a step with these sums of loads (`CommonRates.ms`)."""
        return self.rates.ms(loads, splits)

    def copy_gains_ms(self, tables: Sequence[str]) -> Floats:
        """Returns by how much less all devices bear without a copy of each table, [tables].

        It is below 0 where copies take longer than a rank's own part of lookups elsewhere.
        """
        return np.array([self._sharded_ms[name] - self._copies_ms[name] for name in tables])

    def _of_sharded(self, tables: Sequence[EmbeddingTable]) -> Floats:
        """Returns what each table that is not copied adds on all devices, [tables]."""
        if self._overhead is None:
            return np.zeros(len(tables))
        return self._overhead.common_ms_of(tables, self.task)

    def _of_copies(self, tables: Sequence[EmbeddingTable]) -> Floats:
        """Returns what a copy of each table takes, [tables]; infinite where that is unknown."""
        if self._overhead is None or self._overhead.copies is None:
            return np.full(len(tables), np.inf)
        return self._overhead.copies.each_ms(self.task, tables)

    def _own_ms(self, table: EmbeddingTable, option: ShardingOption) -> float:
        """Returns what a table adds on all devices, whatever its exchange."""
        if option.hot_rows is None:
            known = self._copies_ms if option.has_copies else self._sharded_ms
            return float(known[table.name])
        task, batch = self.task, self.task.batch_size
        copies, held = option.copies(table, batch), option.held(table, batch)
        found_ms = float(self._of_copies(copies).sum() + self._of_sharded([held]).sum())
        if self._overhead is None:
            return found_ms
        # Outputs of hot rows are put in order, too: there are outputs of two kinds.
        own = 0.0 if task.beside or not copies else batch / self._ranks
        regrouped_ms = self._overhead.shared_rates[3] * own * table.dim * table.features
        counted_ms = self._overhead.hot_rows.ms(task, {table.name: option.hot_rows})
        return found_ms + float(regrouped_ms) + counted_ms


class CommonPrices:
    """Prices of what all devices bear, of which the last task's is kept.

    Args:
        overhead: What training takes beside operators, if that counts.
    """

    def __init__(self, overhead: StepOverhead | None) -> None:
        self._overhead = overhead
        self._last: CommonPrice | None = None

    def of(self, task: ShardingTask) -> CommonPrice:
        """Returns the price of a task."""
        if self._last is None or self._last.task is not task:
            self._last = CommonPrice(self._overhead, task)
        return self._last
