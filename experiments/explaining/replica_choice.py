"""Chooses a replica group size by price, and reports the prices of all sizes."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.sharders import SharderContext, make_sharder, oracle_of
from autoshard.sharders.explaining.summary import ReportPart, new_table
from autoshard.sharders.replanning.replicating import NoReplicas, ReplicaPlan, plan_replicas
from autoshard.workload import PlanError, ShardingPlan, ShardingTask, UserError
from autoshard.workload.packing.pack import pack
from autoshard.workload.plans.replicas import group_sizes, layouts
from autoshard.workload.plans.step_price import StepPrice

_GB = 2**30


@dataclass(frozen=True)
class ReplicaChoice:
    """The cheapest plan, and the plans of all group sizes that were compared.

    Args:
        chosen: The cheapest plan.
        oracle: Oracle of a group.
        every: Results of all sizes, in ascending order.
    """

    chosen: ReplicaPlan
    oracle: EstimatedCosts
    every: Sequence[ReplicaPlan | NoReplicas]

    def parts(self) -> Iterator[ReportPart]:
        """Yields the table of prices, and what was chosen."""
        groups, total = self.chosen.groups, self.chosen.groups.num_devices
        yield (
            f"replica groups of {total} devices, copies averaged every {groups.sync_interval} "
            "steps (ms; all-to-all: of outputs and gradients; sync: share of a step; GB: of the "
            "fullest device)"
        )
        shown = new_table(
            ("copies averaged", "group size", "copies", "all-to-all", "sync", "step", "GB"), texts=1
        )
        lacks = []
        for each in self.every:
            if isinstance(each, NoReplicas):
                copies = str(total // each.group_size)
                shown.add_row("", str(each.group_size), copies, "", "", "no plan", "")
                lacks.append(f"groups of {each.group_size}: {each.reason}")
                continue
            held = max(each.plan.device_bytes(each.task)) / _GB
            shown.add_row(
                "" if each.groups.count == 1 else _AVERAGED[each.groups.consecutive],
                str(each.groups.group_size),
                str(each.groups.count),
                f"{_exchange_ms(each.plan, each.task):,.2f}",
                f"{each.shared_sync_ms:,.2f}",
                f"{each.total_ms:,.2f}",
                f"{held:,.1f}",
            )
        yield shown
        yield from lacks
        if groups.count == 1:
            yield f"cheapest: one group of {total}, which needs no DMPCollection"
        else:
            yield (
                f"the plan is for {groups.count} groups of {groups.group_size} devices, such as "
                f"{_named(groups.ranks(0))} (DMPCollection's "
                f"use_inter_host_allreduce={groups.consecutive})"
            )


_AVERAGED = {False: "among neighbours", True: "among groups of neighbours"}


def _named(ranks: range) -> str:
    names = [str(rank) for rank in ranks]
    return ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])


def _exchange_ms(plan: ShardingPlan, task: ShardingTask) -> float:
    columns = np.array(plan.exchanged_columns(task))
    return float(StepPrice.of_plan(task, plan).exchange_stage(columns).max())


def choose_replicas(
    task: ShardingTask,
    context: SharderContext,
    sharder: str,
    group_size: int | None,
    sync_interval: int,
    store: Path | None,
) -> ReplicaChoice:
    """Plans for groups of a size, or of each size, and chooses the cheapest plan.

    Args:
        task: Task of all devices.
        context: What the sharder needs, for all devices.
        sharder: Name of the sharder.
        group_size: Devices of a group; None: all divisors of the number of devices are compared.
        sync_interval: Steps from one average of the copies to the next.
        store: File of measurements, which correct costs.

    Raises:
        UserError: The price of averages is unknown, or no size has a plan.
    """
    if task.objective.link is None or not task.objective.counts_exchanges:
        raise UserError(
            "replica groups are compared by what exchanges take: give --link, as in --link "
            "25GB/s,30us, and an objective other than compute"
        )

    def decide(of_group: ShardingTask) -> tuple[ShardingPlan, float]:
        oracle = oracle_of(context.costs, of_group, store)
        plan = make_sharder(sharder, replace(context, oracle=oracle)).shard(of_group)
        return plan, StepPredictor(oracle, of_group).of(plan).expected_ms

    sizes = group_sizes(len(task.devices)) if group_size is None else [group_size]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other batch sizes: the task's was warned of
        every = list(plan_replicas(task, sizes, sync_interval, decide))
        found = [each for each in every if isinstance(each, ReplicaPlan)]
        if not found:
            raise _no_plan(task, every)
        chosen = min(found, key=lambda each: each.total_ms)
        return ReplicaChoice(chosen, oracle_of(context.costs, chosen.task, store), every)


def _no_plan(task: ShardingTask, every: Sequence[ReplicaPlan | NoReplicas]) -> UserError:
    """Returns the error if no size has a plan; names the least size into which tables fit."""
    last = every[-1]
    assert isinstance(last, NoReplicas)
    if not isinstance(last.reason, PlanError):
        return last.reason
    larger = (s for s in group_sizes(len(task.devices)) if s > last.group_size and _fits(task, s))
    least = next(larger, None)
    more = "" if least is None else f" (the least size that fits is {least})"
    return UserError(f"no plan for replica groups of {last.group_size}{more}: {last.reason}")


def _fits(task: ShardingTask, size: int) -> bool:
    """Returns whether tables fit into groups of a size, rules aside."""
    try:
        for groups in layouts(task, size):
            pack(groups.task(replace(task, rules=())), split=True)
    except UserError:
        return False
    return True
