"""Where the ranks of a rehearsal are, and whether a plan can be trained there."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ray

from autoshard.benchmark.backends.base import DeviceBackend, Node, Place
from autoshard.benchmark.pool.devices import reports_of
from autoshard.workload import PlanError, ShardingPlan, ShardingTask, UserError
from autoshard.workload.plans.replicas import rank_bytes
from autoshard.workload.sizes import format_bytes

_PROCESS_BYTES = 600 * 2**20  # of a rank with its libraries, before it has tables


def places_of_ranks(
    ranks: int, backend: DeviceBackend, nodes: Mapping[str, Node], at_once: bool = False
) -> list[Place]:
    """Returns the place of each rank; ranks share devices that are too few, if possible.

    GPUs are shared by ranks in turns only. They share one: only one rank computes at a time, and
    Ray gives parts of the same GPU as long as it has enough left.
    """
    found = backend.places(nodes, ray.get(reports_of(nodes)), ())
    are_too_few = ranks > len(found) * backend.max_ranks
    if not found or (are_too_few and at_once):
        raise UserError(
            f"{ranks} ranks need a {backend.noun} each, and the cluster has {len(found)}: take a "
            "plan for as many devices, or another kind of --devices"
        )
    found = found[:1] if are_too_few else found
    places = [found[rank % len(found)] for rank in range(ranks)]
    shares = [place.memory_bytes // places.count(place) - _PROCESS_BYTES for place in places]
    if backend.is_shared and min(shares) <= 0:
        fit = sum(place.memory_bytes // _PROCESS_BYTES for place in found)
        raise UserError(
            f"{ranks} ranks need {ranks * _PROCESS_BYTES / 1e9:.1f} GB of memory for their "
            f"processes alone: at most {fit} fit here, with small tables"
        )
    return [
        replace(place, memory_bytes=share if backend.is_shared else 0)
        for place, share in zip(places, shares, strict=True)
    ]


def check_plan(
    plan: ShardingPlan, task: ShardingTask, places: Sequence[Place], backend: DeviceBackend
) -> None:
    """Raises PlanError unless a plan fits; ranks that share a machine, or a GPU, share its memory.

    Args:
        plan: The plan.
        task: Its task, with the ranks as devices.
        places: Place of each rank.
        backend: Of the devices.
    """
    _check_nodes(plan, [place.owner for place in places])
    owners = [place.owner if backend.is_shared else str(place.unit) for place in places]
    free = Counter[str]()
    for owner, place in zip(owners, places, strict=True):
        free[owner] += place.memory_bytes
    shared = [replace(d, memory_bytes=free[o]) for d, o in zip(task.devices, owners, strict=True)]
    on_owners = replace(task, devices=tuple(shared))
    plan.check(plan.replicas.task(on_owners) if plan.replicas else on_owners)
    needed = Counter[str]()
    for owner, size in zip(owners, rank_bytes(plan, task), strict=True):
        needed[owner] += size
    what = "machine" if backend.is_shared else backend.noun
    for owner, size in needed.items():
        if size > free[owner]:
            raise PlanError(
                f"the plan needs {format_bytes(size)} on one {what}, whose ranks have "
                f"{format_bytes(free[owner])} together: take tables of {free[owner] / size:.2f} "
                f"times the rows, or more {what}s"
            )


def _check_nodes(plan: ShardingPlan, owners: Sequence[str]) -> None:
    """Raises PlanError if the devices of a node in the plan are on several machines.

    One machine may stand for several nodes.
    """
    for placement in plan.placements if plan.replicas is None else ():
        spread = len(placement.devices)
        ranks = [rank for rank in placement.devices if rank < len(owners)]
        if 1 < spread < len(owners) and len({owners[rank] for rank in ranks}) > 1:
            raise PlanError(
                f"table {placement.table} is in blocks of rows on a node of ranks {ranks[0]} to "
                f"{ranks[-1]}, which are on several machines: take machines with {spread} devices "
                "each, or a plan without --devices-per-node"
            )
