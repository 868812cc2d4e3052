"""Predicted steps without the option of a table, and with other resources."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from autoshard.cost_model import EstimatedCosts, StepPrediction, StepPredictor
from autoshard.sharders.context import SharderContext, oracle_of
from autoshard.sharders.registry import make_sharder
from autoshard.sharders.search.plan_search import PlanSearch
from autoshard.workload import Link, PlanError, ShardingPlan, ShardingTask, UserError
from autoshard.workload.plans.placements import Placement
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.plans.step_price import norm_power
from autoshard.workload.tasks.links import AnyLink, Network

_PRICED = 64  # tables whose options are looked at, the costliest first
_DEVICES = 8  # on which a table is tried whole: those that do least without it


class WholeTable(NamedTuple):
    """A plan but for one table, which is whole on the device where that is cheapest.

    Args:
        table: Name of the table.
        device: Its device.
        expected_ms: The expected step time of the plan.
    """

    table: str
    device: int
    expected_ms: float


def without_options(
    oracle: EstimatedCosts,
    task: ShardingTask,
    plan: ShardingPlan,
    costs_ms: Mapping[str, float],
    count: int,
) -> list[WholeTable]:
    """Returns what a step takes if a table is whole, for the tables where that takes longest.

    Tables are left out that fit nowhere whole, or that rules want otherwise.

    Args:
        oracle: Predicts costs.
        task: The task.
        plan: The plan.
        costs_ms: What each table adds to a step.
        count: Maximum number of tables.
    """
    names = sorted(in_parts(plan), key=lambda name: -costs_ms[name])[:_PRICED]
    if not names or not Sharded.can_be(plan):
        return []
    power = norm_power(oracle.residuals.prior.rest)
    search = PlanSearch(oracle.expectation(), task, power, Sharded.of(plan, task))
    found = list[tuple[float, str, int, ShardingPlan]]()
    for name in names:
        if not (changes := search.wholes(name, _DEVICES)):
            continue
        priced = zip(search.price(changes).tolist(), (c.enter[0][1] for c in changes), strict=True)
        for ms, device in sorted(priced):
            whole = with_whole(plan, task, name, device)
            if ms < float("inf") and _is_valid(whole, task):
                found.append((ms, name, device, whole))
                break
    found.sort(key=lambda each: -each[0])
    predictor = StepPredictor(oracle, task)
    steps = [
        WholeTable(name, device, predictor.expected_of(whole))
        for _, name, device, whole in found[:count]
    ]
    return sorted(steps, key=lambda step: -step.expected_ms)


def in_parts(plan: ShardingPlan) -> list[str]:
    """Returns the tables that are not table-wise: in several pieces, copied, or in host memory."""
    several = (name for name, pieces in plan.by_table().items() if len(pieces) > 1)
    return list(dict.fromkeys([*several, *plan.all_options()]))


def with_whole(plan: ShardingPlan, task: ShardingTask, table: str, device: int) -> ShardingPlan:
    """Returns a plan with one of its tables whole on a device, in its memory."""
    dim = next(each.dim for each in task.tables if each.name == table)
    others = (each for each in plan.placements if each.table != table)
    options = {name: option for name, option in plan.options.items() if name != table}
    return replace(plan, placements=(*others, Placement(table, 0, dim, device)), options=options)


def _is_valid(plan: ShardingPlan, task: ShardingTask) -> bool:
    try:
        plan.check(task)
    except PlanError:
        return False
    return True


class Alternative(NamedTuple):
    """A change of the task, and the step of the best plan for it.

    Args:
        what: What is changed.
        step: The predicted step; None if there is no plan.
        note: Why there is none.
    """

    what: str
    step: StepPrediction | None
    note: str = ""


def replanner(context: SharderContext) -> str:
    """Returns the name of the sharder by which alternatives are planned."""
    return "cost_fused_search" if context.policy is None else "autoshard"


def alternatives(
    task: ShardingTask, plan: ShardingPlan, context: SharderContext
) -> Iterator[Alternative]:
    """Yields the steps of plans for the same task and for others: more memory, a faster link, one
    device more.

    Args:
        task: The task.
        plan: Its plan, which is kept where no better one is found.
        context: Cost model, policy, seed and resources of options.
    """
    again = f"planned again by {replanner(context)}, nothing changed"
    for what, other in ((again, task), *_tasks(task, context.costs)):
        try:
            yield Alternative(what, _best_step(other, plan, context))
        except UserError as error:
            yield Alternative(what, None, str(error))


def _best_step(task: ShardingTask, plan: ShardingPlan, context: SharderContext) -> StepPrediction:
    oracle = oracle_of(context.costs, task)
    context = replace(context, oracle=oracle, measurer=None, seconds=None)
    plans = [make_sharder(replanner(context), context).shard(task)]
    if plan.num_devices == len(task.devices) and _is_valid(plan, task):
        plans.append(plan)
    predictor = StepPredictor(oracle, task)
    return min(map(predictor.of, plans), key=lambda step: step.expected_ms)


def _tasks(task: ShardingTask, oracle: EstimatedCosts) -> Iterator[tuple[str, ShardingTask]]:
    """Yields other tasks of the same tables, and what is changed in each."""
    larger = (replace(each, memory_bytes=2 * each.memory_bytes) for each in task.devices)
    yield "twice the memory of each device", replace(task, devices=tuple(larger))
    objective, ranks = task.objective, len(task.devices)
    link, more = objective.link, 1
    if isinstance(link, Network) and ranks >= link.devices_per_node:
        more = link.devices_per_node
    if link is not None and objective.counts_exchanges and ranks > 1:
        faster = replace(task, objective=replace(objective, link=_twice_as_fast(link, task.nodes)))
        where = " between nodes" if task.nodes > 1 else ""
        yield f"twice the bandwidth of the link{where}", faster
    if objective.copies_over is not None:  # replica groups: there would be another device in each
        return
    if link is None and objective.name != "compute":
        link = oracle.link(ranks + more)
    dense_ms = objective.dense_ms * ranks / (ranks + more)  # each device has fewer samples
    added = (replace(task.devices[-1], name=f"device{ranks + number}") for number in range(more))
    yield (
        "one device more" if more == 1 else f"one node of {more} devices more",
        replace(
            task,
            devices=(*task.devices, *added),
            objective=replace(objective, link=link, dense_ms=dense_ms),
        ),
    )


def _twice_as_fast(link: AnyLink, nodes: int) -> AnyLink:
    """Returns a link of twice the bandwidth; of several nodes, that between them is."""
    if isinstance(link, Network):
        if nodes > 1:
            return replace(link, between=_faster(link.between))
        return replace(link, inside=_faster(link.inside))
    return _faster(link)


def _faster(link: Link) -> Link:
    ring = link.ring_bytes_s
    return replace(link, bytes_s=2 * link.bytes_s, ring_bytes_s=None if ring is None else 2 * ring)
