"""Whether the predicted costs of a plan have changed since the plan was made.

One question is tested for all tables together: whether the price of the plan, or the work of all
its devices, has changed. So the number of tables needs no correction. The price of each group of
batches of a window gives its noise, as in the method of batch means: it holds for lookups that
depend on each other within a batch, among tables, and among batches of a group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.workload import EmbeddingTable, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.profiling.window import GROUPS, WindowCounts

FALSE_ALARMS = 0.001  # probability of an alarm in a window without a change
LEAST_CHANGE = 0.005  # of costs: smaller ones are no drift
_QUESTIONS = 2  # the price of the plan, and the work of all devices
_MIN_ERROR = 1e-9


@dataclass(frozen=True)
class CostChange:
    """Costs of a plan by a window's lookups over those by the lookups that it was made for.

    Args:
        ratio: Predicted step time over that of the reference.
        ratio_90: Its 90 % interval. It holds what is uncertain as few batches were counted. The
            error of the cost model is not in it: it is nearly the same in both.
        work_ratio: The same of the step time if devices were balanced. It may change where the
            slowest device does not, and then another plan may be faster.
        p_value: Probability of a change as large in one of both ratios if costs had not changed.
        is_drift: Whether one of them differs from 1 by more than LEAST_CHANGE. If not, this is said
            with probability FALSE_ALARMS at most.
    """

    ratio: float
    ratio_90: tuple[float, float]
    work_ratio: float
    p_value: float
    is_drift: bool


def cost_change(
    oracle: EstimatedCosts,
    plan: ShardingPlan,
    task: ShardingTask,
    batches: float,
    window: WindowCounts,
) -> CostChange:
    """Returns how costs of a plan changed from the task's tables to those of a window.

    Args:
        oracle: Cost oracle.
        plan: Plan in use.
        task: Its task, whose tables are the reference.
        batches: Number of batches in which these tables were counted.
        window: Counts of all batches of a window.
    """
    before, after, *groups = log_prices(
        oracle,
        plan,
        task,
        [task.tables, window.tables(), *map(window.tables, range(GROUPS))],
    )
    # As if batches of the reference had varied as much, which they have unless costs changed.
    share = 1 + window.batches / batches
    errors = np.maximum(np.std(groups, axis=0, ddof=1) * math.sqrt(share / GROUPS), _MIN_ERROR)
    change = after - before
    law = stats.t(GROUPS - 1)
    beyond = np.maximum(np.abs(change) - math.log1p(LEAST_CHANGE), 0.0)
    half = law.ppf(0.95) * errors[0]
    return CostChange(
        math.exp(change[0]),
        (math.exp(change[0] - half), math.exp(change[0] + half)),
        math.exp(change[1]),
        min(1.0, _QUESTIONS * 2 * float(law.sf(np.abs(change) / errors).min())),
        _QUESTIONS * 2 * float(law.sf(beyond / errors).min()) < FALSE_ALARMS,
    )


def sampling_error(
    oracle: EstimatedCosts,
    plans: tuple[ShardingPlan, ShardingPlan],
    task: ShardingTask,
    window: WindowCounts,
) -> float:
    """Returns the standard error of the logarithm of the ratio of two plans' prices."""
    tables = [window.tables(group) for group in range(GROUPS)]
    first, second = (log_prices(oracle, plan, task, tables)[:, 0] for plan in plans)
    return float(np.std(first - second, ddof=1)) / math.sqrt(GROUPS)


@one_thread()
def log_prices(
    oracle: EstimatedCosts,
    plan: ShardingPlan,
    task: ShardingTask,
    described: Sequence[Sequence[EmbeddingTable]],
) -> Floats:
    """Returns the logarithms of the step time, and of that of balanced devices: [descriptions, 2].

    Args:
        oracle: Cost oracle, which keeps nothing of these tables.
        plan: Plan.
        task: Task of the plan.
        described: Descriptions of the task's tables.
    """
    own = oracle.fresh()
    costs = [own.plan_cost(plan, replace(task, tables=tuple(tables))) for tables in described]
    return np.log([(cost.step_ms, cost.mean_ms) for cost in costs])
