"""Published heuristics: one greedy loop with different cost proxies of a table."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from autoshard.workload import EmbeddingTable, Piece, PlanError, ShardingPlan, ShardingTask
from autoshard.workload.access.features import COST_PROXIES
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.packing.admission import Occupancy, RuleMasks
from autoshard.workload.packing.pack import does_not_fit
from autoshard.workload.packing.units import bytes_of_units
from autoshard.workload.sizes import format_bytes

TableCost = Callable[[EmbeddingTable, np.random.Generator], float]


def _proxy_cost(
    proxy: Callable[[Piece], float], table: EmbeddingTable, _rng: np.random.Generator
) -> float:
    return proxy(table.whole())


HEURISTICS: dict[str, TableCost] = {
    "round_robin": lambda _table, _rng: 1.0,
    "random": lambda _table, rng: float(rng.random()),
    **{name: partial(_proxy_cost, proxy) for name, proxy in COST_PROXIES.items()},
}
USUAL_HEURISTICS = tuple(COST_PROXIES)  # without round_robin and random
# Of what a unit adds to a device, what it adds at least beside another that has just come.
_LEAST = 0.8


class InfeasibleError(PlanError):
    """No device has memory for a table, or may take it.

    The reason is analysed when the message is read, because that takes time with constraints.
    """

    def __init__(self, task: ShardingTask, table: str, needed: int, largest: int) -> None:
        super().__init__(task, table, needed, largest)
        self._task, self._table, self._needed, self._largest = task, table, needed, largest

    def __str__(self) -> str:
        task, memory = self._task, self._task.usable_bytes
        needs = [task.table_bytes(table) for table in task.tables]
        if task.rules or sum(needs) > memory.sum() or max(needs) > memory.max():
            return str(does_not_fit(task, split=False))
        return (
            f"table {self._table} needs {format_bytes(self._needed)} and no device has more than "
            f"{format_bytes(self._largest)} left: add devices or memory"
        )


class GreedySharder:
    """Places whole tables in descending order of cost, each on the device with the lowest sum.

    Args:
        cost: Cost proxy of a table, in any unit.
        seed: Seed of random costs.
    """

    def __init__(self, cost: TableCost, seed: int = 0) -> None:
        self._cost = cost
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if no device may take a table."""
        rng = np.random.default_rng(self._seed)
        return greedy_plan(task, {table.name: self._cost(table, rng) for table in task.tables})


def greedy_plan(
    task: ShardingTask,
    table_costs: Mapping[str, float],
    column_cost: float = 0.0,
    slowness: Floats | None = None,
) -> ShardingPlan:
    """Returns a plan that balances the sums of costs of tables and output columns over devices.

    Args:
        task: Task to plan.
        table_costs: Cost of each table.
        column_cost: Cost of an output column.
        slowness: What tables take on each device, relative to others; None if devices are equal.
    """
    masks, load = RuleMasks(task), np.zeros(len(task.devices))
    units = masks.units
    costs = [sum(table_costs[piece.table.name] for piece in unit.pieces) for unit in units]
    if column_cost:  # counting columns takes a tenth of a plan
        costs = [c + column_cost * unit.columns for c, unit in zip(costs, units, strict=True)]

    def placed(number: int, device: int) -> None:
        load[device] += costs[number]

    def with_it(numbers: Ints) -> Floats:
        burdens = load if slowness is None else (load + costs[numbers[0]]) * slowness
        return burdens[None]

    held = Occupancy(masks, task.usable_bytes[None])
    return place_in_turn(task, masks, held, costs, with_it, placed)


def place_in_turn(
    task: ShardingTask,
    masks: RuleMasks,
    held: Occupancy,
    costs: Sequence[float],
    burdens: Callable[[Ints], Floats],
    placed: Callable[[int, int], None],
    at_once: int = 1,
) -> ShardingPlan:
    """Places units in descending order of cost, each on the device with the lowest burden.

    Units that constraints restrict to few devices come first. Burdens of several units are asked
    for at once, and again when the lowest may be that of a device that has taken one of them.

    Args:
        task: Task to plan.
        masks: Its constraints and units.
        held: Its devices, empty.
        costs: Cost of each unit, which determines the order.
        burdens: Returns the burden of each device for the units of these numbers, [units, devices].
        placed: Called with the number of each unit and its device.
        at_once: Maximum number of units whose burdens are asked for at once.

    Raises:
        InfeasibleError: No device has memory for a unit, or may take it.
    """
    units = masks.units
    sizes = bytes_of_units(task.operator, task.batch_size, units)
    chosen, first, borne = np.full(len(units), -1), 0, np.zeros(len(task.devices))
    order = np.lexsort((-np.array(costs), masks.freedom(np.arange(len(units)))))
    while first < len(order):
        numbers = order[first : first + at_once]
        with_it, changed = burdens(numbers), np.zeros(len(borne), bool)
        for place, number in enumerate(numbers.tolist()):
            here = numbers[place : place + 1]
            fitting = held.admits(here, sizes[here])[0]
            device = int(np.where(fitting, with_it[place], np.inf).argmin())
            if changed[device]:
                break
            if not fitting[device]:
                needed, largest = int(sizes[number]), int(held.free.max())
                raise InfeasibleError(task, units[number].name, needed, largest)
            chosen[number] = device
            held.enter(number, int(sizes[number]), device)
            placed(number, device)
            with_it[place + 1 :, device] += _LEAST * (with_it[place, device] - borne[device])
            borne[device], changed[device] = with_it[place, device], True
            first += 1
    devices = {
        piece.table.name: home
        for unit, home in zip(units, chosen.tolist(), strict=True)
        for piece in unit.pieces
    }
    return ShardingPlan.table_wise(task, [devices[table.name] for table in task.tables])
