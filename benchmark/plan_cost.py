"""The cost of a plan: all phases of each device, step time and balance."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from autoshard.benchmark.measurement import MeasurementError, MeasureSettings
from autoshard.workload import (
    CostOracle,
    Objective,
    ShardCost,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.arrays import Floats
from autoshard.workload.plans.step_price import (
    StepPrice,
    copies_uncounted,
    further_ways_ms,
    stages_of_phases,
    step_ms,
)
from autoshard.workload.tasks.objective import PHASES
from autoshard.workload.ways import WAYS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from autoshard.benchmark.pool.pool import BenchmarkPool

_COLUMNS = ("fwd", "bwd", "a2a fwd", "a2a bwd")


@dataclass(frozen=True)
class DeviceCost:
    """Milliseconds that one device spends in each phase of a training step."""

    name: str
    tables: int
    memory_bytes: int
    forward_ms: float
    backward_ms: float
    forward_exchange_ms: float
    backward_exchange_ms: float
    spread: float

    @property
    def phases_ms(self) -> tuple[float, float, float, float]:
        """Times in the order of PHASES."""
        return (
            self.forward_ms,
            self.backward_ms,
            self.forward_exchange_ms,
            self.backward_exchange_ms,
        )

    @property
    def total_ms(self) -> float:
        """Sum of all phases."""
        return sum(self.phases_ms)

    @property
    def compute_ms(self) -> float:
        """Forward plus backward of the fused operator."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class PlanCost:
    """The cost of a plan: phase times of devices, and the step time by the objective.

    Args:
        devices: All devices.
        objective: Objective of the task.
        ranks_per_core: Ranks per device in measured all-to-alls.
        common_ms: What a step takes on all devices alike.
    """

    devices: tuple[DeviceCost, ...]
    objective: Objective
    ranks_per_core: float = 1.0
    common_ms: float = 0.0

    @property
    def phases_ms(self) -> Floats:
        """Times of all devices, [devices, PHASES]."""
        return np.array([device.phases_ms for device in self.devices], dtype=float)

    @property
    def stages_ms(self) -> Floats:
        """Times of all devices, [devices, stages]."""
        return stages_of_phases(self.objective, self.phases_ms)

    @property
    def step_ms(self) -> float:
        """Step time: the sum of stages, each as long as its slowest device, and what is common."""
        return float(step_ms(self.stages_ms)) + self.common_ms

    @property
    def mean_ms(self) -> float:
        """Step time if each stage were balanced perfectly."""
        return float(self.stages_ms.mean(0).sum()) + self.common_ms

    @property
    def balance(self) -> float:
        """Mean over slowest device, of all stages together: 1.0 if no device waits."""
        return self.mean_ms / self.step_ms if self.step_ms else 1.0

    def table(self, title: str) -> Table:
        """Returns the report with a row for each device, for rich's console."""
        caption = (
            f"a step takes {self.step_ms:.2f} ms ({self.objective}; bold: slowest of a stage), "
            f"mean {self.mean_ms:.2f} ms, balance {self.balance:.3f}"
        )
        if self.common_ms:
            caption += f"; {self.common_ms:.2f} ms of it are the same on all devices"
        if self.ranks_per_core > 1:
            caption += (
                f"; a2a with {self.ranks_per_core:g} ranks on each device that measured: it reads "
                "higher than with a device for each"
            )
        report = Table(
            title=f"{title} (ms a step; a2a is the all-to-all)",
            title_justify="left",
            caption=caption,
            caption_justify="left",
        )
        known = [n for n, ms in enumerate(self.phases_ms.T) if ms.any() or "a2a" not in _COLUMNS[n]]
        for column in ("device", "tables", "MB", *(_COLUMNS[n] for n in known), "total", "+/-"):
            # Names with kinds of devices are cut at 80 characters if heads are as long.
            head = column.replace(" ", "\n") if " " in self.devices[0].name else column
            report.add_column(head, justify="left" if column == "device" else "right")
        for device, waited_for in zip(self.devices, self._waited_for(), strict=True):
            report.add_row(
                device.name,
                str(device.tables),
                f"{device.memory_bytes / 1e6:,.0f}",
                *(
                    f"[bold]{device.phases_ms[phase]:.2f}[/bold]"
                    if phase in waited_for
                    else f"{device.phases_ms[phase]:.2f}"
                    for phase in known
                ),
                f"{device.total_ms:.2f}",
                f"{device.spread:.1%}",
            )
        return report

    def _waited_for(self) -> list[set[int]]:
        """Returns for each device the phases in which the others wait for it."""
        found: list[set[int]] = [set() for _ in self.devices]
        slowest = self.stages_ms.argmax(0).tolist()
        for phases, device in zip(self.objective.stages, slowest, strict=True):
            found[device] |= set(phases)
        return found

    def picture(self, path: Path | str, title: str) -> None:
        """Writes a stacked bar chart of devices as PNG or SVG.

        Phases that do not count are pale; a dashed line marks the step time.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.6 + 0.9 * max(4, len(self.devices)), 4.2), layout="constrained")
        axes = figure.subplots()
        places = range(len(self.devices))
        bottom = [0.0] * len(self.devices)
        counted = {phase for stage in self.objective.stages for phase in stage}
        for number, phase in enumerate(PHASES):
            heights = [device.phases_ms[number] for device in self.devices]
            alpha = 1.0 if number in counted else 0.3
            axes.bar(places, heights, bottom=bottom, label=phase, alpha=alpha)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.axhline(self.step_ms, color="black", linewidth=0.8, linestyle="--")
        axes.set_xticks(list(places), [device.name for device in self.devices])
        axes.set_ylabel("ms a step")
        axes.set_title(
            f"{title}: {self.step_ms:.2f} ms, balance {self.balance:.3f}\n({self.objective})",
            fontsize="medium",
        )
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        save_picture(figure, path)


def save_picture(figure: "Figure", path: Path | str) -> None:
    """Writes a PNG or SVG file; UserError if that is not possible."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the picture cannot be written: {error}") from error


def price_plan(
    plan: ShardingPlan,
    task: ShardingTask,
    oracle: CostOracle,
    exchange_ms: tuple[Sequence[float], Sequence[float]] | None = None,
    ranks_per_core: float = 1.0,
    common_ms: float = 0.0,
) -> PlanCost:
    """Returns the plan's cost by any oracle.

    Args:
        plan: Plan of the task.
        task: The task.
        oracle: Returns costs of shards.
        exchange_ms: Forward and backward all-to-all of each rank; by default those of the
            objective.
        ranks_per_core: Ranks per device in measured all-to-alls.
        common_ms: What a step takes on all devices alike.
    """
    plan.check(task)
    shards = plan.shards(task)
    hardware = [name for name, s in zip(task.hardware, shards, strict=False) if s is not None]
    answers = iter(oracle.costs([shard for shard in shards if shard is not None], hardware))
    if exchange_ms is None:
        columns = np.array(plan.exchanged_columns(task))
        linked = StepPrice.of_plan(task, plan).exchange_ms(columns).tolist()
        exchange_ms = linked, linked
    forward, backward = exchange_ms
    costs = [ShardCost(0.0, 0.0) if shard is None else next(answers) for shard in shards]
    devices = tuple(
        DeviceCost(
            name=task.devices[number].name,
            tables=tables,
            memory_bytes=memory,
            forward_ms=cost.forward_ms,
            backward_ms=cost.backward_ms,
            forward_exchange_ms=forward[number],
            backward_exchange_ms=backward[number],
            spread=cost.spread,
        )
        for number, (tables, cost, memory) in enumerate(
            zip(plan.num_tables(), costs, plan.device_bytes(task), strict=True)
        )
    )
    return PlanCost(devices, task.objective, ranks_per_core, common_ms)


def measure_plan(
    plan: ShardingPlan,
    task: ShardingTask,
    pool: "BenchmarkPool",
    with_exchange: bool = True,
    seed: int = 0,
) -> PlanCost:
    """Measures each device's shard and the all-to-all among them on the pool."""
    from autoshard.benchmark.pool.pool import (
        MeasuredCosts,  # loads Ray, which planning does without
    )

    plan.check(task)
    if plan.has_copies:
        raise copies_uncounted(plan, task)
    for way in (way for way in WAYS if way.unmeasured):
        for table, option in plan.options.items():
            if way.taken_by(option):
                raise MeasurementError(f"table {way.says(table)}, and {way.unmeasured}")
    oracle = MeasuredCosts(pool, MeasureSettings(task.batch_size, task.operator, seed))
    if not with_exchange or plan.num_devices == 1:
        return price_plan(plan, task, oracle)
    sizes, each = pool.node_sizes()[: task.nodes], len(task.devices) // task.nodes
    nodes = task.nodes if len(sizes) == task.nodes and sizes[-1] >= each else None
    columns = [round(number) for number in plan.exchanged_columns(task)]
    exchange = pool.exchange(columns, task.batch_size, nodes)
    return price_plan(
        plan,
        task,
        oracle,
        (exchange.forward_ms, exchange.backward_ms),
        exchange.key.ranks / exchange.key.devices,
        further_ways_ms(plan, task),
    )
