"""The difference of two plans: moves, change of the step time, and when moving has paid off."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autoshard.cost_model import EstimatedCosts, StepPrediction, StepPredictor
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.sharders.explaining.summary import ReportPart, format_columns, new_table
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.documents import Schema
from autoshard.workload.plans.moves import Move, Traffic, moved_bytes, traffic_of
from autoshard.workload.tables.table import HOT
from autoshard.workload.ways import WAYS

DIFF_SCHEMA = Schema("autoshard.plan_diff", 1)
_MB, _GB = 1e6, 1e9  # decimal, as for links
_SHOWN = 20  # moves


def changes_of_options(old: ShardingPlan, new: ShardingPlan) -> dict[str, tuple[int, int]]:
    """Returns how many tables come to be sharded in each way, and how many no longer are; of tables
    with another number of rows in the same way, both.
    """
    was, now, found = old.all_options(), new.all_options(), dict[str, tuple[int, int]]()
    for way in WAYS:
        before, after = (
            {
                (name, way.rows_of(option))
                for name, option in options.items()
                if way.taken_by(option)
            }
            for options in (was, now)
        )
        found[way.name] = len(after - before), len(before - after)
    return found


def present_step(
    options: ObjectiveOptions, oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask
) -> StepPrediction:
    """Predicts the step of a plan in use, on the devices that it is for.

    On another number of devices than the task has, it is priced by the link for so many; the time
    of the dense part is taken to be proportional to the samples of a device.
    """
    ranks, last = plan.num_devices, len(task.devices) - 1
    if ranks != len(task.devices):
        objective = options.for_devices(ranks).build_objective(ranks, oracle.model)
        dense_ms = objective.dense_ms * len(task.devices) / ranks
        task = replace(
            task,
            devices=tuple(task.devices[min(number, last)] for number in range(ranks)),
            rules=(),
            objective=replace(objective, dense_ms=dense_ms),
        )
        oracle = oracle.for_objective(task.objective, ranks)
    return StepPredictor(oracle, task).of(plan)


@dataclass(frozen=True)
class PlanDiff:
    """The difference of two plans of the same tables."""

    task: ShardingTask  # the task of the new plan
    moves: tuple[Move, ...]  # moves from the old plan to the new one
    old: StepPrediction  # prediction for the old plan
    new: StepPrediction  # prediction for the new plan
    # GB (of 10^9 bytes) per second that a device sends and receives at the same time
    link_gb_s: float
    link_source: str = "an assumption: --link-gb-s"  # where that is from
    # by way of sharding: tables that come to be sharded so, and that no longer are
    ways: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    old_devices: int | None = None  # of the old plan, if it is for another number of devices

    @property
    def names(self) -> list[str]:
        """Names of devices, also of those that are gone."""
        names, numbers = [device.name for device in self.task.devices], self.old_devices or 0
        return names + [f"device{number}" for number in range(len(names), numbers)]

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """Bytes that each device sends and receives."""
        return traffic_of(self.moves, len(self.names))

    @property
    def moving_s(self) -> float:
        """Seconds until the busiest device has sent and received everything."""
        return max(traffic.most for traffic in self.traffic) / (self.link_gb_s * _GB)

    @property
    def gain_ms(self) -> float:
        """Expected reduction of the step time, in ms; negative where the new plan is slower."""
        return self.old.expected_ms - self.new.expected_ms

    @property
    def steps(self) -> int | None:
        """Steps after which moving has paid off; None if it never does."""
        if not self.moves and (self.gain_ms >= 0 or not any(map(any, self.ways.values()))):
            return 0
        return math.ceil(1000 * self.moving_s / self.gain_ms) if self.gain_ms > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document with its schema version."""
        than = self.new.over(self.old)
        return DIFF_SCHEMA.stamp(
            {
                "moves": [asdict(move) for move in self.moves],
                "ways": {way: list(counts) for way, counts in self.ways.items()},
                "moved_bytes": moved_bytes(self.moves),
                "devices": [
                    {"name": name, "out_bytes": traffic.out, "in_bytes": traffic.into}
                    for name, traffic in zip(self.names, self.traffic, strict=True)
                ],
                "old": _prediction_json(self.old),
                "new": _prediction_json(self.new),
                "ratio": than.ratio,
                "ratio_90": [than.low, than.high],
                "probability_faster": than.probability,
                "gain_ms": self.gain_ms,
                "link_gb_s": self.link_gb_s,
                "moving_s": self.moving_s,
                "steps_until_paid": self.steps,
            }
        )

    def parts(self) -> Iterator[ReportPart]:
        """Yields the parts of the printed report."""
        names, devices = self.names, len(self.task.devices)
        if (before := self.old_devices or devices) != devices:
            which = ", ".join(names[min(before, devices) : max(before, devices)])
            how = "new" if devices > before else "gone"
            yield f"from {before} devices to {devices}; {how}: {which}"
        for way, (come, go) in self.ways.items():
            if come or go:
                yield f"{way}: {come} tables come, {go} go"
        if self.moves:
            yield from self._moves()
        else:
            yield "nothing moves: each column stays on its device"
            if before == devices and not any(map(any, self.ways.values())):
                return
        than = self.new.over(self.old)
        yield (
            f"gained: expected step time {_format(self.new)} in place of {_format(self.old)}; "
            f"{self.task.objective}: {than.ratio:.3f} of it ({than.low:.3f} to {than.high:.3f}), "
            f"faster with probability {than.probability:.2f}"
        )
        if not self.moves:
            return
        name, busiest = max(zip(names, self.traffic, strict=True), key=lambda pair: pair[1].most)
        line = (
            f"paid: moving takes {self.moving_s:.3g} s, limited by {name} with "
            f"{busiest.most / _MB:,.1f} MB at {self.link_gb_s:g} GB/s ({self.link_source})"
        )
        if before > devices:  # because of the devices, whether it pays or not
            yield line.removeprefix("paid: ")
        elif self.steps is None:
            yield f"{line}; it does not pay off: the new plan is not expected to be faster"
        else:
            yield f"{line}; it has paid off after {self.steps:,} step{'s' * (self.steps > 1)}"

    def _moves(self) -> Iterator[ReportPart]:
        """Yields the moves, and what each device sends and receives."""
        names = self.names
        tables = {table.name: table for table in self.task.tables}
        shown = new_table(("table", "columns", "from", "to", "MB"), texts=4)
        largest = sorted(self.moves, key=lambda move: -move.bytes)
        for move in largest[:_SHOWN]:
            columns = f"all {move.width}"  # of hot rows, which are no table of the task
            if move.table in tables:
                columns = format_columns(tables[move.table], move.start, move.width)
            if move.rows is not None:
                columns += f", rows {move.rows[0]:,}-{move.rows[1]:,}"
            places = names[move.source], names[move.target]
            shown.add_row(move.table, columns, *places, f"{move.bytes / _MB:,.1f}")
        if others := largest[_SHOWN:]:
            size = f"{moved_bytes(others) / _MB:,.1f}"
            shown.add_row(f"and {len(others)} more", "", "", "", size)
        moving = {table_of(move.table, tables) for move in self.moves}
        yield (
            f"what moves: {len(moving)} of {len(tables)} tables, "
            f"{moved_bytes(self.moves) / _MB:,.1f} MB of weights and optimizer state"
        )
        yield shown
        shown = new_table(("device", "out MB", "in MB"))
        for name, traffic in zip(names, self.traffic, strict=True):
            shown.add_row(name, *(f"{size / _MB:,.1f}" for size in traffic))
        yield shown


def table_of(moved: str, tables: Collection[str]) -> str:
    """Returns the table that moves, whose hot rows have a name of their own."""
    return moved if moved in tables else moved.removesuffix(HOT)


def _format(prediction: StepPrediction) -> str:
    low, high = prediction.interval_ms
    return f"{prediction.expected_ms:.2f} ms (90% interval {low:.2f} to {high:.2f})"


def _prediction_json(prediction: StepPrediction) -> dict[str, Any]:
    return {"expected_ms": prediction.expected_ms, "interval_90_ms": list(prediction.interval_ms)}
