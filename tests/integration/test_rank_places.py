"""Plans with tables on nodes, for ranks on one machine and on several."""

import pytest

from autoshard.benchmark.backends.base import Place
from autoshard.benchmark.backends.cpu import CpuBackend
from autoshard.integration.rehearsal.places import check_plan
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
)

TABLE = EmbeddingTable("giant", 8_000, 32, 4.0)


def check(machines: str, first: int) -> None:
    """A plan with the table in blocks on two ranks, which are on machines of these names."""
    places = [
        Place("cpu", machine, number, machine, f"cpu{number}", 2**30)
        for number, machine in enumerate(machines)
    ]
    network = Network(Link(1e9), Link(1e8), 2)
    devices = Device.uniform(len(machines), 2**30)
    task = ShardingTask((TABLE,), devices, 64, objective=Objective("step", network))
    plan = ShardingPlan((Placement("giant", 0, 32, first, 2),), len(machines))
    check_plan(plan, task, places, CpuBackend())


@pytest.mark.parametrize(("machines", "first"), [("aaaa", 2), ("aabb", 0), ("aabb", 2)])
def test_one_machine_may_be_several_nodes(machines: str, first: int) -> None:
    check(machines, first)


def test_a_node_is_on_one_machine() -> None:
    with pytest.raises(
        PlanError,
        match="table giant is in blocks of rows on a node of ranks 2 to 3, which are on several "
        "machines: take machines with 2 devices each",
    ):
        check("aaab", 2)
