"""The published heuristics: one greedy loop, and what each of them believes a table costs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from autoshard.workload import EmbeddingTable, PlanError, ShardingPlan, ShardingTask, TableSlice
from autoshard.workload.beliefs import BELIEFS
from autoshard.workload.packing import does_not_fit
from autoshard.workload.sizes import told
from autoshard.workload.terms import Bundle, Terms, bytes_of_bundles

Floats = npt.NDArray[np.float64]
TableCost = Callable[[EmbeddingTable, np.random.Generator], float]


def _believed(
    belief: Callable[[TableSlice], float], table: EmbeddingTable, _rng: np.random.Generator
) -> float:
    return belief(table.whole())


HEURISTICS: dict[str, TableCost] = {
    "round_robin": lambda _table, _rng: 1.0,
    "random": lambda _table, rng: float(rng.random()),
    **{name: partial(_believed, belief) for name, belief in BELIEFS.items()},
}
USUAL_HEURISTICS = tuple(BELIEFS)  # those that somebody would use


class DeadEnd(PlanError):  # noqa: N818 - what happened, as in the game
    """No device has room for a table, or may take it. Why is found out when somebody asks: with
    rules that takes time, and often another sharder finds a plan.
    """

    def __init__(self, task: ShardingTask, table: str, needed: int, most: int) -> None:
        super().__init__(task, table, needed, most)
        self._task, self._table, self._needed, self._most = task, table, needed, most

    def __str__(self) -> str:
        task, rooms = self._task, self._task.room_bytes
        needs = [task.table_bytes(table) for table in task.tables]
        if task.rules or sum(needs) > rooms.sum() or max(needs) > rooms.max():
            return str(does_not_fit(task, split=False))
        return (
            f"table {self._table} needs {told(self._needed)} and no device has more than "
            f"{told(self._most)} left: add devices or memory"
        )


class GreedySharder:
    """Places whole tables, the costliest first, each on the device with the least so far.

    Args:
        cost: what a table is believed to cost, in any unit.
        seed: for costs that are drawn at random.
    """

    def __init__(self, cost: TableCost, seed: int = 0) -> None:
        self._cost = cost
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names what no device has room for, or may take."""
        rng = np.random.default_rng(self._seed)
        costs = {table.name: self._cost(table, rng) for table in task.tables}
        bundles = Terms(task).bundles()
        return greedy_plan(task, bundles, [sum_of(bundle, costs) for bundle in bundles])


def sum_of(bundle: Bundle, costs: Mapping[str, float]) -> float:
    """Of its tables' costs."""
    return sum(costs[piece.table.name] for piece in bundle.slices)


def greedy_plan(
    task: ShardingTask, bundles: Sequence[Bundle], costs: Sequence[float]
) -> ShardingPlan:
    """Balances the sums of the costs of what is placed over the devices."""
    load = np.zeros(len(task.devices))

    def placed(number: int, device: int) -> None:
        load[device] += costs[number]

    return place_in_turn(task, bundles, costs, lambda _number: load, placed)


def place_in_turn(
    task: ShardingTask,
    bundles: Sequence[Bundle],
    costs: Sequence[float],
    burden: Callable[[int], Floats],
    placed: Callable[[int, int], None],
) -> ShardingPlan:
    """The greedy loop: the costliest first, each on the device with the least burden. What rules
    leave few devices for comes before the others.

    Args:
        task: what is to be sharded.
        bundles: its tables, as `Terms.bundles` has them.
        costs: of each bundle; they give the order.
        burden: each device's, for the bundle of that number.
        placed: hears of each bundle and its device.
    """
    terms, free = Terms(task), task.room_bytes
    lawful, freedom = terms.lawful(bundles), terms.freedom(bundles)
    conflicts = terms.conflicts(bundles)
    sizes = bytes_of_bundles(task.operator, task.batch_size, bundles)
    chosen = np.full(len(bundles), -1)
    for number in sorted(range(len(bundles)), key=lambda n: (freedom[n], -costs[n])):
        needed = int(sizes[number])
        fitting = lawful[number] & (free >= needed)
        if conflicts is not None:
            homes = chosen[conflicts[number]]
            fitting[homes[homes >= 0]] = False
        if not fitting.any():
            raise DeadEnd(task, bundles[number].name, needed, int(free.max()))
        device = int(np.where(fitting, burden(number), np.inf).argmin())
        chosen[number] = device
        free[device] -= needed
        placed(number, device)
    devices = {
        piece.table.name: home
        for bundle, home in zip(bundles, chosen.tolist(), strict=True)
        for piece in bundle.slices
    }
    return ShardingPlan.table_wise(task, [devices[table.name] for table in task.tables])
