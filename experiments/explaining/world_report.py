"""The report on plans of the same tables for several numbers of devices: scaling, knee, price."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.experiments.console.outputs import save_picture
from autoshard.experiments.explaining.plan_report import ReportPart, new_table
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.documents import Schema

WORLDS_SCHEMA = Schema("autoshard.world_sizes", 1)
_GB = 2**30
_TITLE_WIDTH = 110  # characters
_MS, _HOUR_S, _MILLION = 1e3, 3600, 1e6
_WORTH = 0.5  # of the throughput of a device before, that a device added has to bring


@dataclass(frozen=True)
class World:
    """A plan for a number of devices.

    Args:
        num_devices: Number of devices.
        nodes: Number of nodes, as far as links tell.
        batch_size: Samples of a batch, of all devices together.
        step_ms: Expected step time.
        interval_90_ms: Its 90 % interval.
        idle: Share of the step for which the mean device waits for the slowest ones.
        memory_bytes: Memory used on the fullest device, reserved memory included.
        full: Share of that device's memory.
        link: Link of all-to-alls; None if they do not count.
    """

    num_devices: int
    nodes: int
    batch_size: int
    step_ms: float
    interval_90_ms: tuple[float, float]
    idle: float
    memory_bytes: int
    full: float
    link: str | None

    @staticmethod
    def of(
        plan: ShardingPlan, task: ShardingTask, oracle: EstimatedCosts, dense_ms: float
    ) -> "World":
        """Returns the world of a plan, whose price leaves out `dense_ms` of each step."""
        cost, found = oracle.plan_cost(plan, task), StepPredictor(oracle, task).of(plan)
        low, high = found.interval_ms
        pairs = zip(task.devices, plan.device_memory(task), strict=True)
        used = [(parts.total + device.reserved_bytes, device) for device, parts in pairs]
        size, device = max(used, key=lambda pair: pair[0] / pair[1].memory_bytes)
        return World(
            len(task.devices),
            task.nodes,
            task.batch_size,
            found.expected_ms + dense_ms,
            (low + dense_ms, high + dense_ms),
            (cost.step_ms - cost.mean_ms) / (cost.step_ms + dense_ms),
            size,
            size / device.memory_bytes,
            str(task.objective.link) if task.objective.exchanges(len(task.devices)) else None,
        )

    @property
    def samples_s(self) -> float:
        """Samples per second."""
        return _MS * self.batch_size / self.step_ms

    @property
    def of_a_device(self) -> float:
        """Samples per second of a device."""
        return self.samples_s / self.num_devices

    def price(self, device_hour: float) -> float:
        """Returns the price of a million samples, by that of a device for an hour."""
        return _MILLION * device_hour / (_HOUR_S * self.of_a_device)


@dataclass(frozen=True)
class NoPlan:
    """A number of devices without a plan.

    Args:
        num_devices: Number of devices.
        needed_bytes: Memory of a device with which tables fit; None if memory is not what lacks.
        reason: Why there is no plan.
    """

    num_devices: int
    needed_bytes: int | None
    reason: str


@dataclass(frozen=True)
class WorldSizes:
    """Plans for several numbers of devices, in ascending order.

    Args:
        worlds: Numbers of devices with a plan: at least one.
        missing: Numbers of devices without one.
        least_devices: Least number of devices into whose memory tables fit; None if not sought.
        workload: Tables, batches, objective and dense part.
        device_hour: Price of a device for an hour; None if it is not known.
    """

    worlds: Sequence[World]
    missing: Sequence[NoPlan]
    least_devices: int | None
    workload: str
    device_hour: float | None

    @property
    def title(self) -> str:
        """The workload, and the links of all-to-alls."""
        links = dict[str, int]()
        for world in self.worlds:
            if world.link is not None:
                links.setdefault(world.link, world.num_devices)
        if not links:
            return self.workload
        first, *others = links.items()
        more = "".join(f", from {number} devices over {link}" for link, number in others)
        return f"{self.workload}, all-to-alls over {first[0]}{more}"

    def efficiency(self, world: World) -> float:
        """Returns the throughput of a device over that of one in the smallest world."""
        return world.of_a_device / self.worlds[0].of_a_device

    @property
    def knee(self) -> World:
        """The largest world whose added devices are worth it, each compared with those before it.

        A world is worth it if each device that it has more than the last one that is worth it
        brings at least half of the throughput of a device there.
        """
        knee = self.worlds[0]
        for world in self.worlds[1:]:
            if gain(knee, world) >= _WORTH:
                knee = world
        return knee

    def parts(self) -> Iterator[ReportPart]:
        """Yields the parts of the printed report."""
        yield self.title
        hour, columns = (
            self.device_hour,
            ["devices", "step ms", "90% interval", "samples/s"],
        )
        columns += ["efficiency", "idle", "GB (full)"] + ["price/M"] * (hour is not None)
        several = any(world.nodes > 1 for world in self.worlds)
        shown, rows = new_table(columns, texts=0), dict[int, list[str]]()
        for lack in self.missing:
            gb = (
                ""
                if lack.needed_bytes is None
                else f"needs {ceil(lack.needed_bytes / _GB * 10) / 10:,.1f}"
            )
            rows[lack.num_devices] = [str(lack.num_devices), "no plan", "", "", "", "", gb]
        for world in self.worlds:
            low, high = map(_format_ms, world.interval_90_ms)
            number = f"{world.num_devices}/{world.nodes}" if several else str(world.num_devices)
            row = [number, _format_ms(world.step_ms), f"{low} to {high}"]
            row += [f"{world.samples_s:,.0f}", f"{self.efficiency(world):.0%}"]
            row += [f"{world.idle:.0%}", f"{world.memory_bytes / _GB:,.1f} ({world.full:.0%})"]
            rows[world.num_devices] = row + ([] if hour is None else [f"{world.price(hour):,.3g}"])
        for _, row in sorted(rows.items()):
            shown.add_row(*row)
        yield shown
        if several:
            yield "devices are given with their nodes: 16/2 are 16 devices on 2 nodes"
        yield from (
            f"{lack.num_devices} devices: {lack.reason}"
            for lack in self.missing
            if lack.needed_bytes is None
        )
        if self.least_devices is not None:
            yield f"the least number of devices whose memory suffices: {self.least_devices}"
        yield self._knee_line()

    def _knee_line(self) -> str:
        """Returns which number of devices the rule names, and which one is cheapest."""
        if len(self.worlds) == 1:
            return "there is a plan for one number of devices only: name more for a knee"
        knee = self.knee
        if more := [world for world in self.worlds if world.num_devices > knee.num_devices]:
            best = max(more, key=lambda world: gain(knee, world))
            line = (
                f"knee: {knee.num_devices} devices: each one added brings less than half of the "
                f"throughput of one there (at most {gain(knee, best):.0%}, up to "
                f"{best.num_devices})"
            )
        else:
            line = (
                f"knee: none up to {knee.num_devices} devices: each one added brings at least half "
                "of the throughput of one before it"
            )
        if (hour := self.device_hour) is not None:
            cheapest = min(self.worlds, key=lambda world: world.price(hour))
            line += (
                f"; cheapest: {cheapest.num_devices} devices, {cheapest.price(hour):,.3g} for a "
                f"million samples ({knee.price(hour):,.3g} on {knee.num_devices})"
            )
        return line

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document with its schema version."""
        hour = self.device_hour
        worlds = [
            {
                **asdict(world),
                "samples_s": world.samples_s,
                "efficiency": self.efficiency(world),
                "price_of_million": None if hour is None else world.price(hour),
            }
            for world in self.worlds
        ]
        return WORLDS_SCHEMA.stamp(
            {
                "worlds": worlds,
                "missing": [asdict(lack) for lack in self.missing],
                "least_devices": self.least_devices,
                "knee": self.knee.num_devices,
                "device_hour": hour,
            }
        )

    def picture(self, path: Path) -> None:
        """Writes a PNG or SVG: throughput with its 90 % interval, and efficiency or price."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator

        worlds, knee, hour = self.worlds, self.knee, self.device_hour
        numbers = [world.num_devices for world in worlds]
        figure = Figure(figsize=(9, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        speeds = [world.samples_s for world in worlds]
        low, high = zip(*(world.interval_90_ms for world in worlds), strict=True)
        batches = [_MS * world.batch_size for world in worlds]
        slow = [batch / ms for batch, ms in zip(batches, high, strict=True)]
        fast = [batch / ms for batch, ms in zip(batches, low, strict=True)]
        left.fill_between(numbers, slow, fast, alpha=0.2, label="90 % interval")
        left.plot(numbers, speeds, marker="o", label="expected")
        ideal = [worlds[0].of_a_device * number for number in numbers]
        left.plot(
            numbers, ideal, color="black", linewidth=0.8, linestyle="--", label="in proportion"
        )
        left.set(yscale="log", ylabel="samples per second")
        values = [self.efficiency(world) if hour is None else world.price(hour) for world in worlds]
        right.plot(numbers, values, marker="o")
        right.set_ylim(bottom=0)
        right.set_ylabel("price of a million samples" if hour else "efficiency (smallest world: 1)")
        for axes in (left, right):
            axes.axvline(knee.num_devices, color="gray", linewidth=0.8, label="knee")
            for lack in self.missing:
                axes.axvline(lack.num_devices, color="tab:red", linestyle=":", label="no plan")
            axes.set(xscale="log", xlabel="devices")
            every = [*numbers, *(lack.num_devices for lack in self.missing)]
            axes.set_xticks(every, map(str, every))
            axes.xaxis.set_minor_locator(NullLocator())
        handles, labels = left.get_legend_handles_labels()
        found = dict(zip(labels, handles, strict=True))  # each once
        figure.legend(
            found.values(),
            found.keys(),
            loc="outside lower center",
            ncols=len(found),
            frameon=False,
        )
        figure.suptitle(fill(self.title, _TITLE_WIDTH), fontsize="medium")
        save_picture(figure, path)


def gain(before: World, world: World) -> float:
    """Returns what each device added brings, over the throughput of a device before."""
    added = world.num_devices - before.num_devices
    return (world.samples_s - before.samples_s) / added / before.of_a_device


def _format_ms(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
