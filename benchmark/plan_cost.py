"""What a plan costs: compute and communication of each device, the slowest, how even they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from autoshard.benchmark.measurement import MeasureSettings
from autoshard.benchmark.pool import BenchmarkPool, MeasuredCosts
from autoshard.workload import CostOracle, ShardCost, ShardingPlan, ShardingTask, UserError

_COLUMNS = ("device", "tables", "MB", "fwd", "bwd", "a2a fwd", "a2a bwd", "total", "+/-")
PHASES = ("forward", "backward", "forward all-to-all", "backward all-to-all")


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
        """In the order of PHASES."""
        return (
            self.forward_ms,
            self.backward_ms,
            self.forward_exchange_ms,
            self.backward_exchange_ms,
        )

    @property
    def total_ms(self) -> float:
        """All phases together."""
        return sum(self.phases_ms)

    @property
    def compute_ms(self) -> float:
        """Forward and backward of the fused operator."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class PlanCost:
    """The cost of a plan. The slowest device sets the pace; balance is mean over maximum."""

    devices: tuple[DeviceCost, ...]
    ranks_per_core: float = 1.0

    @property
    def max_ms(self) -> float:
        """Milliseconds of the slowest device."""
        return max(device.total_ms for device in self.devices)

    @property
    def mean_ms(self) -> float:
        """Mean milliseconds of the devices."""
        return sum(device.total_ms for device in self.devices) / len(self.devices)

    @property
    def max_compute_ms(self) -> float:
        """Milliseconds of the slowest fused operator, communication left out."""
        return max(device.compute_ms for device in self.devices)

    @property
    def balance(self) -> float:
        """1.0 if all devices take equally long."""
        return self.mean_ms / self.max_ms if self.max_ms else 1.0

    def table(self, title: str) -> Table:
        """The report: a row a device, ready for rich's console."""
        report = Table(
            title=f"{title} (ms a step; a2a is the all-to-all)",
            title_justify="left",
            caption=f"max {self.max_ms:.2f} ms, mean {self.mean_ms:.2f} ms, "
            f"balance {self.balance:.3f}{self._sharing_note()}",
            caption_justify="left",
        )
        for column in _COLUMNS:
            report.add_column(column, justify="left" if column == "device" else "right")
        slowest = self.max_ms
        for device in self.devices:
            report.add_row(
                device.name,
                str(device.tables),
                f"{device.memory_bytes / 1e6:,.0f}",
                *(f"{value:.2f}" for value in device.phases_ms),
                f"{device.total_ms:.2f}",
                f"{device.spread:.1%}",
                style="bold" if device.total_ms == slowest else "",
            )
        return report

    def _sharing_note(self) -> str:
        if self.ranks_per_core <= 1:
            return ""
        return (
            f"; a2a with {self.ranks_per_core:g} ranks on each device that measured: "
            "it reads higher than with a device for each"
        )

    def picture(self, path: Path | str, title: str) -> None:
        """A PNG or SVG: a bar a device, stacked by phase, and a line at the maximum."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.6 + 0.9 * max(4, len(self.devices)), 4.2), layout="constrained")
        axes = figure.subplots()
        places = range(len(self.devices))
        bottom = [0.0] * len(self.devices)
        for number, phase in enumerate(PHASES):
            heights = [device.phases_ms[number] for device in self.devices]
            axes.bar(places, heights, bottom=bottom, label=phase)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.axhline(self.max_ms, color="black", linewidth=0.8, linestyle="--")
        axes.set_xticks(list(places), [device.name for device in self.devices])
        axes.set_ylabel("ms a step")
        axes.set_title(f"{title}: max {self.max_ms:.2f} ms, balance {self.balance:.3f}")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
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
) -> PlanCost:
    """The plan's cost by any oracle; `exchange_ms`: each rank's forward and backward all-to-all."""
    plan.check(task)
    shards = plan.shards(task)
    answers = iter(oracle.costs([shard for shard in shards if shard is not None]))
    idle = [0.0] * len(shards)
    forward, backward = exchange_ms or (idle, idle)
    costs = [ShardCost(0.0, 0.0) if shard is None else next(answers) for shard in shards]
    devices = tuple(
        DeviceCost(
            name=task.devices[number].name,
            tables=0 if shard is None else len({piece.table.name for piece in shard.slices}),
            memory_bytes=memory,
            forward_ms=cost.forward_ms,
            backward_ms=cost.backward_ms,
            forward_exchange_ms=forward[number],
            backward_exchange_ms=backward[number],
            spread=cost.spread,
        )
        for number, (shard, cost, memory) in enumerate(
            zip(shards, costs, plan.device_bytes(task), strict=True)
        )
    )
    return PlanCost(devices, ranks_per_core)


def measure_plan(
    plan: ShardingPlan,
    task: ShardingTask,
    pool: BenchmarkPool,
    with_exchange: bool = True,
    seed: int = 0,
) -> PlanCost:
    """Measure every device's shard, and the all-to-all among them, on the pool."""
    plan.check(task)
    oracle = MeasuredCosts(pool, MeasureSettings(task.batch_size, task.operator, seed))
    if not with_exchange or plan.num_devices == 1:
        return price_plan(plan, task, oracle)
    dims = [0 if shard is None else shard.total_dim for shard in plan.shards(task)]
    exchange = pool.exchange(dims, task.batch_size)
    return price_plan(
        plan,
        task,
        oracle,
        (exchange.forward_ms, exchange.backward_ms),
        exchange.key.ranks / exchange.key.devices,
    )
