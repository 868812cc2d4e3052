"""What a plan sends over the links inside nodes and between them in a step of training."""

from collections.abc import Iterator
from typing import NamedTuple

from autoshard.workload.plans.plan import ShardingPlan
from autoshard.workload.tables.operators import WEIGHT_BYTES
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import OutputExchange, all_copies

_ID_BYTES = _LENGTH_BYTES = 8  # of a lookup, of a bag
_OUTPUT_BYTES = 4
_BOTH_WAYS = 2  # outputs forward, gradients backward


class Traffic(NamedTuple):
    """Bytes of a step, those that all devices send together.

    Args:
        what: What is sent.
        inside: To devices of the same node.
        between: To devices of other nodes.
    """

    what: str
    inside: float
    between: float


def step_traffic(plan: ShardingPlan, task: ShardingTask) -> list[Traffic]:
    """Returns what a step by a plan sends, by kind; kinds of which there is none are left out."""
    found = dict[str, Traffic]()
    for what, inside, between in _parts(plan, task):
        before = found.get(what, Traffic(what, 0.0, 0.0))
        found[what] = Traffic(what, before.inside + inside, before.between + between)
    return list(found.values())


def _parts(plan: ShardingPlan, task: ShardingTask) -> Iterator[Traffic]:
    ranks, nodes, batch = len(task.devices), task.nodes, task.batch_size
    node = ranks // nodes
    near, far = (node - 1) / ranks, (ranks - node) / ranks  # of what goes to each device alike
    crossing = nodes / ranks if nodes > 1 else 0.0  # of the steps of a ring, those between nodes
    tables = plan.held_tables(task)
    for placement in plan.placements:
        table = tables[placement.table]
        spread = len(placement.devices)
        lengths = _LENGTH_BYTES * table.bags * spread  # to each block
        inputs = batch * (_ID_BYTES * table.pooling_factor + lengths)
        yield Traffic("ids and lengths", inputs * near, inputs * far)
        sums = _BOTH_WAYS * _OUTPUT_BYTES * batch * placement.width * table.features
        exchange = OutputExchange.of(table, spread, ranks)
        if exchange is OutputExchange.OUTPUTS or not table.pooled:
            yield Traffic("outputs and gradients", sums * near, sums * far)
        elif exchange is OutputExchange.SUMS:
            passed = sums * (ranks - 1)  # around a ring
            yield Traffic("partial sums of rows", passed * (1 - crossing), passed * crossing)
        else:
            reduced = sums * (spread - 1)  # in the node, then sent to others
            yield Traffic("partial sums of rows", reduced, sums * far)
    weight_bytes = WEIGHT_BYTES[task.operator.weights]
    for table in all_copies(task, plan.options):
        passed = 2 * (ranks - 1) * weight_bytes * table.rows * table.dim
        yield Traffic("gradients of copies", passed * (1 - crossing), passed * crossing)
