"""The published heuristics: one greedy loop, and what each of them believes a table costs."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from autoshard.workload import EmbeddingTable, PlanError, ShardingPlan, ShardingTask, TableSlice
from autoshard.workload.beliefs import BELIEFS
from autoshard.workload.packing import does_not_fit
from autoshard.workload.sizes import told

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
        """A valid plan; PlanError names the table that no device has room for."""
        rng = np.random.default_rng(self._seed)
        costs = [self._cost(table, rng) for table in task.tables]
        return greedy_plan(task, costs)


def greedy_plan(task: ShardingTask, costs: Sequence[float]) -> ShardingPlan:
    """Balances the sums of the tables' costs over the devices."""
    load = [0.0] * len(task.devices)

    def placed(number: int, device: int) -> None:
        load[device] += costs[number]

    return place_in_turn(task, costs, lambda _number: load, placed)


def place_in_turn(
    task: ShardingTask,
    costs: Sequence[float],
    burden: Callable[[int], Sequence[float]],
    placed: Callable[[int, int], None],
) -> ShardingPlan:
    """The greedy loop: the costliest table first, each on the device with the least burden.

    Args:
        task: what is to be sharded.
        costs: of each table; they give the order.
        burden: each device's, for the table of that number.
        placed: hears of each table and its device.
    """
    free = [device.memory_bytes for device in task.devices]
    chosen = [0] * len(task.tables)
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        needed = task.table_bytes(task.tables[number])
        fitting = [device for device, room in enumerate(free) if room >= needed]
        if not fitting:
            rooms = [device.memory_bytes for device in task.devices]
            needs = [task.table_bytes(table) for table in task.tables]
            if sum(needs) > sum(rooms) or max(needs) > max(rooms):
                raise does_not_fit(task, split=False)
            raise PlanError(
                f"table {task.tables[number].name} needs {told(needed)} and no device has more "
                f"than {told(max(free))} left: add devices or memory"
            )
        burdens = burden(number)
        device = min(fitting, key=lambda d: burdens[d])
        chosen[number] = device
        free[device] -= needed
        placed(number, device)
    return ShardingPlan.table_wise(task, chosen)
