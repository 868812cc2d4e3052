"""What it takes to go from one plan to another, what that gains, and when it has paid."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.cost_model import StepPrediction, StepPredictor
from autoshard.experiments.explaining.plan_report import Part, format_columns, report
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.documents import Schema
from autoshard.workload.moves import Move, Traffic, moved_bytes, moves_between, traffic_of

DIFF_SCHEMA = Schema("autoshard.plan_diff", 1)
_MB, _GB = 1e6, 1e9  # as links are sold
_NAMED = 20  # moves that are shown


@dataclass(frozen=True)
class PlanDiff:
    """Two plans of a task: moves, what is gained, and what moving takes.

    Args:
        task: of both.
        moves: that make the new plan of the old one.
        old: what the old one is worth.
        new: what the new one is.
        link_gb_s: GB (of 10^9 bytes) a second that a device sends, and takes at the same time.
    """

    task: ShardingTask
    moves: tuple[Move, ...]
    old: StepPrediction
    new: StepPrediction
    link_gb_s: float

    @staticmethod
    def of(
        old: ShardingPlan,
        new: ShardingPlan,
        predictor: StepPredictor,
        task: ShardingTask,
        link: float,
    ) -> "PlanDiff":
        """From the plans; PlanError unless both are of the task."""
        return PlanDiff(
            task, moves_between(old, new, task), predictor.of(old), predictor.of(new), link
        )

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """Of each device."""
        return traffic_of(self.moves, len(self.task.devices))

    @property
    def moving_s(self) -> float:
        """Seconds until the busiest device is through."""
        return max(each.most for each in self.traffic) / (self.link_gb_s * _GB)

    @property
    def gain_ms(self) -> float:
        """Of a step, expected; less than 0 where the new plan is the slower one."""
        return self.old.expected_ms - self.new.expected_ms

    @property
    def steps(self) -> int | None:
        """After which moving has paid for itself; None if it never does."""
        if not self.moves:
            return 0
        return math.ceil(1000 * self.moving_s / self.gain_ms) if self.gain_ms > 0 else None

    def to_json(self) -> dict[str, Any]:
        """All that is told, as a JSON document with its schema version."""
        than = self.new.over(self.old)
        return DIFF_SCHEMA.stamp(
            {
                "moves": [asdict(move) for move in self.moves],
                "moved_bytes": moved_bytes(self.moves),
                "devices": [
                    {"name": device.name, "out_bytes": each.out, "in_bytes": each.into}
                    for device, each in zip(self.task.devices, self.traffic, strict=True)
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

    def parts(self) -> Iterator[Part]:
        """For people."""
        if not self.moves:
            yield "nothing moves: each column lies where it lay"
            return
        yield from self._moves_told()
        yield from self._traffic_told()
        yield self._gain_told()
        yield self._payment_told()

    def _moves_told(self) -> Iterator[Part]:
        names = [device.name for device in self.task.devices]
        tables = {table.name: table for table in self.task.tables}
        shown = report(("table", "columns", "from", "to", "MB"), texts=4)
        largest = sorted(self.moves, key=lambda move: -move.bytes)
        for move in largest[:_NAMED]:
            columns = format_columns(tables[move.table], move.start, move.width)
            ends = names[move.source], names[move.target]
            shown.add_row(move.table, columns, *ends, f"{move.bytes / _MB:,.1f}")
        if left := largest[_NAMED:]:
            told = f"and {len(left)} more"
            shown.add_row(told, "", "", "", f"{moved_bytes(left) / _MB:,.1f}")
        moved = {move.table for move in self.moves}
        yield (
            f"what moves: {len(moved)} of {len(tables)} tables, "
            f"{moved_bytes(self.moves) / _MB:,.1f} MB of weights and optimizer state"
        )
        yield shown

    def _traffic_told(self) -> Iterator[Part]:
        shown = report(("device", "out MB", "in MB"))
        for device, each in zip(self.task.devices, self.traffic, strict=True):
            shown.add_row(device.name, *(f"{size / _MB:,.1f}" for size in each))
        yield shown

    def _gain_told(self) -> str:
        than = self.new.over(self.old)
        return (
            f"gained: a step is expected to take {_told(self.new)} in place of {_told(self.old)}; "
            f"{self.task.objective}: {than.ratio:.3f} of it ({than.low:.3f} to {than.high:.3f}), "
            f"faster with probability {than.probability:.2f}"
        )

    def _payment_told(self) -> str:
        most = max(range(len(self.traffic)), key=lambda device: self.traffic[device].most)
        line = (
            f"paid: moving takes {self.moving_s:.3g} s, until {self.task.devices[most].name} is "
            f"through with {self.traffic[most].most / _MB:,.1f} MB at {self.link_gb_s:g} GB/s (an "
            "assumption: --link-gb-s)"
        )
        if self.steps is None:
            return f"{line}; it does not pay: the new plan is not expected to be faster"
        return f"{line}; it has paid for itself after {self.steps:,} step{'s' * (self.steps > 1)}"


def _told(prediction: StepPrediction) -> str:
    low, high = prediction.interval_ms
    return f"{prediction.expected_ms:.2f} ms (90 % interval {low:.2f} to {high:.2f})"


def _prediction_json(prediction: StepPrediction) -> dict[str, Any]:
    return {"expected_ms": prediction.expected_ms, "interval_90_ms": list(prediction.interval_ms)}
