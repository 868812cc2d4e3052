"""Prices a training step from what its devices compute and exchange.

A step is a sequence of stages. Devices wait for each other at the end of a stage, so a stage takes
as long as its slowest device, and a step takes the sum of its stages. Which phases share a stage is
said by the task's objective. Everything that prices a plan, a candidate of a search, an episode, a
reward or a report does it here.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from autoshard.workload.arrays import Bools, Floats
from autoshard.workload.errors import UserError
from autoshard.workload.plans.plan import ShardingPlan
from autoshard.workload.tasks.links import Network
from autoshard.workload.tasks.objective import Objective
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import OutputExchange

if TYPE_CHECKING:  # heavy, and not needed here
    from torch import Tensor

Array = TypeVar("Array", Floats, "Tensor")

_ELEMENT_BYTES = 4  # bytes per element of a table's output, which is fp32 whatever its weights are
_MS = 1e3
_INPUT_EXCHANGES = 2  # of each way: lengths and ids
_MIN_MS = 1e-12
_MIN_RESIDUAL = 0.01  # a norm of a higher power than this gives is a maximum


@dataclass(frozen=True)
class StepPrice:
    """Prices the steps of one task, or of several tasks side by side.

    For one task the fields are numbers and arrays may have any leading dimensions. For several
    tasks the fields are columns [tasks, 1] and arrays are [tasks, devices].

    Args:
        separate: 1 where forward and backward compute are stages of their own, 0 where they share
            one stage.
        exchanges: All-to-alls of a step that count: 2 (forward and backward) or 0.
        ranks: Devices that take part in an all-to-all.
        columns: Output columns of all devices together.
        slope_ms: Milliseconds for each column that one device sends to another.
        latency_ms: Milliseconds before anything flows.
    """

    separate: Any
    exchanges: Any
    ranks: Any
    columns: Any
    slope_ms: Any
    latency_ms: Any

    @staticmethod
    def of(objective: Objective, batch_size: int, ranks: int, columns: float) -> "StepPrice":
        """Returns the price of a task with so many devices and output columns."""
        separate, exchanges = float(objective.computes_apart), objective.exchanges(ranks)
        if objective.link is None or not exchanges:
            return StepPrice(separate, 0.0, float(ranks), columns, 0.0, 0.0)
        sample_bytes = _ELEMENT_BYTES * batch_size / ranks  # one column for one other rank
        link = objective.link.all_to_all(ranks)
        slope_ms = _MS * sample_bytes / link.bytes_s
        latency_ms = _MS * link.latency_s
        return StepPrice(separate, float(exchanges), float(ranks), columns, slope_ms, latency_ms)

    @staticmethod
    def of_task(task: ShardingTask) -> "StepPrice":
        """Returns the price of a task; without tables, as all are copied, nothing is exchanged."""
        objective = task.objective if task.tables else replace(task.objective, link=None)
        columns = task.exchanged_columns
        return StepPrice.of(objective, task.batch_size, len(task.devices), columns)

    @staticmethod
    def of_plan(task: ShardingTask, plan: ShardingPlan) -> "StepPrice":
        """Returns the price of what single devices hold by a plan: copies exchange nothing."""
        columns = float(sum(plan.exchanged_columns(task)))
        objective = task.objective if columns else replace(task.objective, link=None)
        return StepPrice.of(objective, task.batch_size, len(task.devices), columns)

    @staticmethod
    def rows(table: "Tensor") -> "StepPrice":
        """Returns a view of prices of tasks side by side, each a row of fields: [tasks, fields]."""
        return StepPrice(*table[..., None].unbind(1))

    @property
    def row(self) -> tuple[float, ...]:
        """The fields of one task's price, for `rows`."""
        return tuple(vars(self).values())  # `astuple` copies deeply: 10 times slower

    def exchange_ms(self, columns: Array) -> Array:
        """Returns what each device spends in one all-to-all, in either direction.

        A device sends its columns of the others' samples and receives the others' columns of its
        own samples, both at once: the longer one counts.

        Args:
            columns: Output columns of each device.
        """
        sent, received = columns * (self.ranks - 1), self.columns - columns
        longer = (sent + received + abs(sent - received)) / 2  # for numpy and torch alike
        return cast("Array", self.latency_ms + self.slope_ms * longer)

    def column_ms(self) -> float:
        """Returns what a column adds to the all-to-alls of the device that sends most."""
        return float(self.exchanges * self.slope_ms * (self.ranks - 1))

    def stages_ms(self, forward: Array, backward: Array, columns: Array) -> tuple[Array, ...]:
        """Returns what each device spends in each stage that counts: compute, then all-to-alls.

        Several tasks side by side always have three stages, some of which may be 0.

        Args:
            forward: Milliseconds of forward compute of each device.
            backward: Milliseconds of backward compute.
            columns: Output columns of each device, in a shape that broadcasts with the others.
        """
        compute: tuple[Array, ...] = self.compute_stages(forward, backward)
        if isinstance(self.exchanges, float) and not self.exchanges:
            return compute
        return compute + (self.exchange_stage(columns),)  # noqa: RUF005 - one element type

    def step_ms(self, forward: Floats, backward: Floats, columns: Floats) -> Floats:
        """Returns the step time, shape [...]: a stage takes as long as its slowest device.

        Args:
            forward: Milliseconds of forward compute, [..., devices].
            backward: Milliseconds of backward compute, same shape.
            columns: Output columns, in a shape that broadcasts with the others.
        """
        stages = self.stages_ms(forward, backward, columns)
        return np.asarray(sum(stage.max(-1) for stage in stages))

    def exchange_stage(self, columns: Array) -> Array:
        """Returns what each device spends in both all-to-alls; 0 where they do not count."""
        return cast("Array", self.exchanges * self.exchange_ms(columns))

    def sending_stage(self, columns: Array) -> Array:
        """Returns the all-to-alls by what each device sends, for norms over devices.

        No device receives for longer than the one with the most columns sends, so the slowest
        device takes as long as in `exchange_stage`. What others receive would hide it in a norm.
        """
        return cast("Array", self.exchanges * self.latency_ms + self.column_ms() * columns)

    def compute_stages(self, forward: Array, backward: Array) -> tuple[Array, ...]:
        """Returns the stages of compute alone."""
        if isinstance(self.separate, float):
            return (forward, backward) if self.separate else (forward + backward,)
        apart = backward * self.separate
        return forward + (backward - apart), apart

    def expected_ms(
        self, forward: Floats, backward: Floats, columns: Floats, residual: float
    ) -> Floats:
        """Returns the expected time of a step of one task, shape [...].

        All-to-alls are the same in all scenarios; compute is uncertain.

        Args:
            forward: Milliseconds, shape [..., devices, scenarios].
            backward: Milliseconds, same shape.
            columns: Output columns, shape [..., devices].
            residual: Relative deviation of a device's compute that is left in each scenario.
        """
        power = norm_power(residual)
        expected = self.exchange_stage(columns).max(-1)
        for stage in self.compute_stages(forward, backward):
            expected = expected + expected_slowest(stage, power)
        return np.asarray(expected)


def step_ms(stages: Floats) -> Floats:
    """Returns the time of a step, shape [...], from stages of devices [..., devices, stages]."""
    return np.asarray(stages.max(-2).sum(-1))


def norm_power(residual: float) -> float:
    """Returns the power of the norm that is the expected maximum of values, each with this relative
    deviation.

    Deviations are taken to be distributed as the largest of many (Frechet's law, which for a few
    percent is near the normal one): then the expectation is exactly a norm.
    """
    return math.pi / (math.sqrt(6) * max(residual, _MIN_RESIDUAL))


def expected_slowest(costs_ms: Floats, power: float) -> Floats:
    """Returns the expected maximum over devices, in the mean over scenarios, shape [...].

    Args:
        costs_ms: Milliseconds, shape [..., devices, scenarios].
        power: Of the norm, as `norm_power` gives it.
    """
    most = np.maximum(costs_ms.max(-2, keepdims=True), _MIN_MS)
    norms = most[..., 0, :] * np.power(costs_ms / most, power).sum(-2) ** (1 / power)
    return np.asarray(norms.mean(-1))


def first_copy(plan: ShardingPlan) -> str:
    """Returns the clause that a table, or hot rows of it, are copied, of the first such one."""
    name, option = next(each for each in plan.options.items() if each[1].has_copies)
    return f"{option.copied_part(name)} copied to all devices"


def copies_uncounted(plan: ShardingPlan, task: ShardingTask) -> UserError:
    """Returns the error that the price of fused operators does not contain a plan's copies."""
    return UserError(
        f"{first_copy(plan)}, and objective {task.objective.name} counts fused "
        "operators, which copies are not: take objective step"
    )


@dataclass(frozen=True)
class FurtherExchanges:
    """What exchanges take that come after those of tables in columns, on all devices alike.

    For one task the fields are numbers; for several tasks side by side, they are arrays [tasks].

    TorchRec exchanges the outputs of tables by rows, and of tables by rows within a node, each by
    themselves. Of the latter all is counted here, by the node that has most of them; of the former
    the start, if they are not the only ones, and that of rings is another one. What they move is a
    part of `exchange_ms`.

    Args:
        start_ms: Start of the exchanges of a further kind.
        rings_ms: What rings of all devices take more to start than all-to-alls.
        node_rings_ms: Start of the rings in nodes.
        node_column_ms: For each column on the node that has most columns of tables by rows.
    """

    start_ms: float = 0.0
    rings_ms: float = 0.0
    node_rings_ms: float = 0.0
    node_column_ms: float = 0.0

    @staticmethod
    def of(objective: Objective, batch_size: int, ranks: int) -> "FurtherExchanges":
        """Returns the exchanges of a task; all is 0 where exchanges do not count."""
        link, exchanges = objective.link, objective.exchanges(ranks)
        if link is None or not exchanges:
            return FurtherExchanges()
        latency_s = link.all_to_all(ranks).latency_s
        node_rings_s = node_column_s = 0.0
        if isinstance(link, Network):  # inside, and then between
            node_rings_s = link.inside.ring(link.devices_per_node).latency_s
            node_column_s = _ELEMENT_BYTES * batch_size * link.node_rows_s(ranks)
        return FurtherExchanges(
            _MS * (exchanges + _INPUT_EXCHANGES) * latency_s,
            _MS * exchanges * (link.ring(ranks).latency_s - latency_s),
            _MS * exchanges * node_rings_s,
            _MS * exchanges * node_column_s,
        )

    def ms(self, columns: Bools, rows: Bools, node_rows: Bools, node_columns: Floats) -> Floats:
        """Returns what further exchanges take, [...].

        Args:
            columns: Whether any table is whole or in columns, [...].
            rows: Whether any is by rows on all devices.
            node_rows: Whether any is by rows on the devices of a node.
            node_columns: Columns of these on each node, [..., nodes].
        """
        further = np.maximum(1 * columns + rows + node_rows - 1, 0) * (rows | node_rows)
        rings_ms = self.rings_ms * rows + self.node_rings_ms * node_rows
        return np.asarray(
            self.start_ms * further + rings_ms + self.node_column_ms * node_columns.max(-1)
        )


def node_columns(plan: ShardingPlan, task: ShardingTask) -> Floats:
    """Returns the columns of partial sums that are reduced within each node: [nodes]."""
    ranks, found = len(task.devices), np.zeros(task.nodes)
    features = {table.name: table.features for table in task.tables}
    for each in plan.placements:
        if 1 < len(each.devices) < ranks:
            node = each.device // (ranks // task.nodes)
            found[node] += each.width * features[each.table]
    return found


def further_ways_ms(plan: ShardingPlan, task: ShardingTask) -> float:
    """Returns what the further exchanges of a plan take (`FurtherExchanges`)."""
    ranks, tables = len(task.devices), {table.name: table for table in task.tables}
    kinds = {OutputExchange.of(tables[p.table], len(p.devices), ranks) for p in plan.placements}
    exchanges = FurtherExchanges.of(task.objective, task.batch_size, ranks)
    columns, rows, node_rows = (np.array(kind in kinds) for kind in OutputExchange)
    return float(exchanges.ms(columns, rows, node_rows, node_columns(plan, task)))


def stages_of_phases(objective: Objective, phases_ms: Floats) -> Floats:
    """Returns what devices spend in each stage: [..., devices, stages].

    Args:
        objective: Which phases share a stage.
        phases_ms: What devices spend in each phase, [..., devices, PHASES]; all-to-alls may be
            measured ones.
    """
    stages = [phases_ms[..., list(phases)].sum(-1) for phases in objective.stages]
    return np.stack(stages, axis=-1)
