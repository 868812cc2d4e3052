"""Copies of small, often used tables on all devices; another sharder places the others.

With even devices, a table's lookups cost each of them a share of the operators and of the
all-to-alls. A copy costs each its own lookups, and the update and all-reduce of all rows instead.
Both are nearly additive, so the tables that gain from a copy follow from their own numbers. How
many of them are worth their memory, and the start of copies, is decided by greedy plans. Where one
table outweighs all others, greedy plans of whole tables gain nothing from copies, and plans with
splits may: then the sharder plans with copies and without, and the faster plan counts.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.cost_greedy import FusedGreedySharder
from autoshard.workload import EmbeddingTable, PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.errors import FieldError
from autoshard.workload.rules import Kind, Rule
from autoshard.workload.sizes import format_bytes
from autoshard.workload.step_price import StepPrice

_MIN_GAIN = 0.01  # of the step: less is not worth another optimizer for copied tables
_SHARES = (1.0, 0.5, 0.25, 0.1)  # of the tables that gain: fewer where they do not fit into memory


class CopyingSharder:
    """Copies tables to all devices where that is faster, or a constraint says so.

    Args:
        sharder: Places the other tables.
        oracle: Prices plans. Without one, or where it does not know what copies take, only those
            tables are copied that have to be.
        plans_twice: Whether the sharder may plan with copies and without, where greedy plans do not
            tell which is faster.
    """

    def __init__(
        self, sharder: Sharder, oracle: EstimatedCosts | None = None, plans_twice: bool = True
    ) -> None:
        self._sharder = sharder
        self._oracle = oracle
        self._plans_twice = plans_twice

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if none is found."""
        required = _required(task)
        if self._oracle is None or self._oracle.copies is None:
            return self._with(required, task)
        self._oracle.check(task)
        ranked, is_clear = _ranked(self._oracle, task, required)
        if not (is_clear or self._plans_twice):
            return self._with(required, task)
        found, oracle = list[ShardingPlan](), self._oracle
        if not is_clear:
            with suppress(PlanError):
                found.append(self._with(required, task))
        limit_ms = (1 - _MIN_GAIN) * oracle.step_ms(found[0], task) if found else math.inf
        for copied in ranked:
            if found and _least_ms(oracle, task, copied) > limit_ms:
                continue
            with suppress(PlanError):
                found.append(self._with(copied, task))
                break
        if len(found) > 1:
            return min(found, key=lambda plan: oracle.step_ms(plan, task))
        return found[0] if found else self._with(required, task)

    def _with(self, copied: frozenset[str], task: ShardingTask) -> ShardingPlan:
        return plan_with_copies(self._sharder.shard, copied, task)


def required_tables(
    task: ShardingTask, kind: Kind, allows: Callable[[Rule], bool]
) -> dict[str, Rule]:
    """Returns the tables that rules of a kind name, each with its rule.

    Args:
        task: Task with the rules.
        kind: The way that is demanded.
        allows: Returns whether a rule allows its tables to be sharded in that way.

    Raises:
        PlanError: Another rule forbids that way for one of the tables.
    """
    rules = [rule for rule in task.rules if rule.kind == kind]
    required = {name: rule for rule in rules for name in rule.tables}
    for other in task.rules:
        for name in () if allows(other) else other.tables:
            if name in required:
                raise PlanError(
                    f"the constraints {required[name].name!r} and {other.name!r} cannot be kept "
                    f"together for table {name}: drop one"
                )
    return required


def _required(task: ShardingTask) -> frozenset[str]:
    return frozenset(required_tables(task, "copied", lambda rule: rule.allows_copies))


def plan_with_copies(
    shard: Callable[[ShardingTask], ShardingPlan], copied: frozenset[str], task: ShardingTask
) -> ShardingPlan:
    """Returns the plan with copies of these tables, in which a function places the others.

    Raises:
        PlanError: There is no memory for the copies, or no plan for the others.
    """
    try:
        rest = task.without(copied)
    except FieldError:
        size = task.copies_memory(copied).total
        number = int(task.usable_bytes.argmin())
        raise PlanError(
            f"copies of {len(copied)} tables take {format_bytes(size)} on each device, and device "
            f"{number} has {format_bytes(int(task.usable_bytes[number]))}: allow copies of fewer"
        ) from None
    placements = shard(rest).placements if rest.tables else ()
    return ShardingPlan(placements, len(task.devices), tuple(copied))


def _ranked(
    oracle: EstimatedCosts, task: ShardingTask, required: frozenset[str]
) -> tuple[list[frozenset[str]], bool]:
    """Returns sets of tables that may be worth their copies, that with the fastest greedy plan
    first, and whether that plan is faster than the one without them.
    """
    forbidden = {name for rule in task.rules if not rule.allows_copies for name in rule.tables}
    free = [t for t in task.tables if t.name not in forbidden and t.name not in required]
    if len(task.devices) == 1 or not free:
        return [], True
    gains_ms, spread_ms, starts_ms = _gains_ms(oracle, task, free)
    order, gaining = np.argsort(-gains_ms), int((gains_ms > 0).sum())
    may_copy_all = len(free) + len(required) == len(task.tables)
    # Without tables, operators do not start. Beside some, outputs are put in order anew.
    gain_of_all_ms = float(gains_ms.sum()) + starts_ms if may_copy_all else 0.0
    gain_ms = float(gains_ms[gains_ms > 0].sum())
    if max(gain_ms, gain_of_all_ms) < _MIN_GAIN * spread_ms:
        return [], True
    greedy, step_ms = FusedGreedySharder(oracle), dict[frozenset[str], float]()

    def fits(count: int) -> bool:
        """Prices the greedy plan with copies of those that gain most; False if it does not fit."""
        copied = required | {free[number].name for number in order[:count]}
        with suppress(PlanError):
            plan = plan_with_copies(greedy.shard, copied, task)
            step_ms[copied] = oracle.step_ms(plan, task)
        return copied in step_ms

    fits(0)
    for share in _SHARES if gaining else ():
        if fits(max(1, round(share * gaining))):
            break
    if gaining < len(free) and gain_of_all_ms >= _MIN_GAIN * spread_ms:
        fits(len(free))
    without_ms = step_ms.pop(required, math.inf)
    ranked = sorted(step_ms, key=lambda copied: step_ms[copied])
    faster = [copied for copied in ranked if step_ms[copied] < without_ms]
    if faster:
        return faster, True
    return ranked, False


def _least_ms(oracle: EstimatedCosts, task: ShardingTask, copied: frozenset[str]) -> float:
    """Returns a step that a plan with copies of these tables hardly falls short of."""
    rest = task.without(copied, reserve=False)
    whole = ShardingPlan.table_wise(rest, [0] * len(rest.tables))
    return even_ms(oracle, rest) + oracle.common_ms(task, replace(whole, copied=tuple(copied)))


def even_ms(oracle: EstimatedCosts, task: ShardingTask) -> float:
    """Returns what each device takes if the tables of a task, if any, are spread evenly.

    Where devices differ, they are spread so that all take equally long.
    """
    devices, whole = len(task.devices), oracle.amounts([t.whole() for t in task.tables]).sum(0)
    exchange_ms = StepPrice.of_task(task).column_ms() * task.exchanged_columns
    each_ms = oracle.price(whole[None] + oracle.of_devices(task.hardware)).total_ms.numpy()
    with np.errstate(divide="ignore"):  # without tables
        shared_ms = 1 / np.broadcast_to(1 / each_ms.astype(float), devices).sum()
    return float(shared_ms + exchange_ms / devices)


def _gains_ms(
    oracle: EstimatedCosts, task: ShardingTask, tables: Sequence[EmbeddingTable]
) -> tuple[Floats, float, float]:
    """Returns by how much a copy of each table shortens the step of even devices, [tables]; that
    step; and what operators take to start less what copies do.
    """
    overhead = oracle.model.counted_overhead
    assert overhead is not None
    assert overhead.copies is not None
    ranks, price = len(task.devices), StepPrice.of_task(task)
    amounts = oracle.amounts([table.whole() for table in task.tables])
    mine = oracle.amounts([table.whole() for table in tables])
    whole = amounts.sum(0)
    without_ms = oracle.price(whole - mine).total_ms.double().numpy()
    whole_ms = float(oracle.price(whole[None]).total_ms)
    compute_ms = (whole_ms - without_ms) / ranks
    columns = np.array([table.whole().exchanged_columns for table in tables])
    exchange_ms = price.column_ms() * columns / ranks
    common_ms = overhead.common_ms_of(tables, task)
    copies_ms = overhead.copies.each_ms(task, tables)
    gains_ms = np.asarray(compute_ms + exchange_ms + common_ms - copies_ms)
    spread_ms = (whole_ms + price.column_ms() * task.exchanged_columns) / ranks
    spread_ms += oracle.common_ms(task)
    starts_ms = overhead.forward.start_ms + overhead.backward.start_ms - overhead.copies.start_ms
    return gains_ms, spread_ms, starts_ms
