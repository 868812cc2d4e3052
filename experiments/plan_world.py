#!/usr/bin/env python
"""Plan the same tables for several numbers of devices: step time, throughput, memory and price."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from autoshard.cost_model import CostModel, EstimatedCosts, StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.inputs import build_task, check_file, read_devices
from autoshard.experiments.console.machine import PlanningOptions
from autoshard.experiments.console.progress import following
from autoshard.sharders import (
    SHARDERS,
    check_takes_seconds,
    make_sharder,
    needs_of,
    open_context,
    oracle_of,
    spec_of,
)
from autoshard.sharders.explaining.summary import ReportPart, new_table
from autoshard.workload import (
    Device,
    Objective,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
    documents,
    load_tables,
)
from autoshard.workload.bounds import check_bounds

WORLDS_SCHEMA = documents.Schema("autoshard.world_sizes", 2)
_BATCH_SIZE = 1024
_GB, _HOUR_MS = 2**30, 3.6e6
_WORTH = 0.5  # of the throughput of a device before, that a device added has to bring


@dataclass(frozen=True, kw_only=True)
class PlanWorldConfig(PlanningOptions):
    """Plan the same tables for several numbers of devices, to choose how many to train on.

    Reports step time, throughput, efficiency, memory, and with --device-hour the price of a million
    samples. The knee is the largest number at which each device added brings at least half of the
    throughput of a device before it.
    """

    tables: str
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_devices: str
    """Numbers of devices, separated by commas, such as 8,16,32."""
    memory_gb: str | None = None
    """Memory of a device in GB of 2^30 bytes, the same for all. Default: 85 % of what the GPU has
    that --hardware names."""
    batch_size: int | None = None
    """Samples of a batch, all ranks together, for each number of devices. Default: 1024."""
    batch_per_device: int | None = None
    """Samples of a batch on each rank, in place of --batch-size: batches grow with the number of
    devices."""
    dense_ms: float | None = None
    """Milliseconds that the dense part of your model adds to a step on the smallest number of
    devices. On others it is taken to be proportional to the samples of a rank. Plans do not depend
    on it. Default: 0."""
    device_hour: float | None = None
    """Price of a device for an hour, in any currency."""
    constraints: Path | None = None
    """YAML file of constraints."""
    sharder: str = "autoshard"
    """Algorithm that makes the plans; shard.py --help lists them."""
    seconds: float | None = None
    """Time limit in seconds of planning for all numbers of devices together. Default: plans are
    those of shard.py."""
    json: Path | None = None
    """JSON file for the table."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        if "pool" in spec_of(self.sharder).needs:
            able = [name for name, spec in SHARDERS.items() if "pool" not in spec.needs]
            raise UserError(
                f"--sharder {self.sharder} measures, and nothing is measured here: take one of "
                f"{', '.join(able)}"
            )
        if self.batch_size is not None and self.batch_per_device is not None:
            raise UserError("--batch-size and --batch-per-device exclude each other: leave one out")
        if self.seconds is not None:
            check_takes_seconds(self.sharder)
        check_bounds(
            self,
            at_least={"batch_size": 1, "batch_per_device": 1},
            more_than={"device_hour": 0, "seconds": 0},
        )
        for number in self.numbers:
            self.check_memory(self.devices_of(number))
            self.for_devices(number).build_objective(number)  # raises for wrong options
        self.check_machine()
        check_file(self.json, "--json")

    @property
    def numbers(self) -> list[int]:
        """Numbers of devices in ascending order; UserError unless they are distinct."""
        words = [word.strip() for word in self.num_devices.split(",")]
        if not all(word.isdecimal() and int(word) for word in words):
            raise UserError(
                "--num-devices must be whole numbers of at least 1, separated by commas, as in "
                f"8,16,32, got {self.num_devices!r}"
            )
        numbers = sorted(map(int, words))
        if twice := [some for some, other in pairwise(numbers) if some == other]:
            raise UserError(f"--num-devices names {twice[0]} twice: name each number once")
        return numbers

    @cached_property  # said once
    def _memory_gb(self) -> str:
        return self.known_memory_gb(self.memory_gb)

    def devices_of(self, number: int) -> tuple[Device, ...]:
        """Returns the devices of a world."""
        return read_devices(self._memory_gb, number, "--num-devices")

    def batch_of(self, number: int) -> int:
        """Returns the samples of a batch of all devices together."""
        if self.batch_per_device is not None:
            return self.batch_per_device * number
        return self.batch_size or _BATCH_SIZE

    def objective_of(self, number: int, model: CostModel) -> Objective:
        """Returns the objective of a world, without the dense part.

        Raises:
            UserError: All-to-alls would have no price in a world that has some.
        """
        objective = replace(self.for_devices(number), dense_ms=None).build_objective(number, model)
        if objective.link is None and number > 1 and objective.name != "compute":
            raise UserError(
                f"all-to-alls of {number} devices have no price, so that more devices would always "
                "be better: give --link, as in --link 25GB/s,30us"
            )
        if (note := self.nodes_note(model, number, objective.link)) is not None:
            cli.note(note)
        return objective

    def dense_of(self, number: int) -> float:
        """Returns the milliseconds of the dense part in a step of a world."""
        samples = [self.batch_of(each) / each for each in (number, self.numbers[0])]
        return (self.dense_ms or 0.0) * samples[0] / samples[1]


@dataclass(frozen=True)
class World:
    """A plan for a number of devices.

    Args:
        num_devices: Number of devices.
        batch_size: Samples of a batch, of all devices together.
        step_ms: Expected step time.
        interval_90_ms: Its 90 % interval.
        idle: Share of the step for which the mean device waits for the slowest ones.
        full: Share of the memory of the fullest device, reserved memory included.
        link: Link of all-to-alls; None if they do not count.
    """

    num_devices: int
    batch_size: int
    step_ms: float
    interval_90_ms: tuple[float, float]
    idle: float
    full: float
    link: str | None

    @staticmethod
    def of(
        plan: ShardingPlan, task: ShardingTask, oracle: EstimatedCosts, dense_ms: float
    ) -> "World":
        """Returns the world of a plan, whose price leaves out `dense_ms` of each step."""
        cost, found = oracle.plan_cost(plan, task), StepPredictor(oracle, task).of(plan)
        low, high = found.interval_ms
        pairs = zip(task.devices, plan.device_bytes(task), strict=True)
        return World(
            len(task.devices),
            task.batch_size,
            found.expected_ms + dense_ms,
            (low + dense_ms, high + dense_ms),
            (cost.step_ms - cost.mean_ms) / (cost.step_ms + dense_ms),
            max((size + device.reserved_bytes) / device.memory_bytes for device, size in pairs),
            str(task.objective.link) if task.objective.exchanges(len(task.devices)) else None,
        )

    @property
    def samples_s(self) -> float:
        """Samples per second."""
        return 1000 * self.batch_size / self.step_ms

    @property
    def of_a_device(self) -> float:
        """Samples per second of a device."""
        return self.samples_s / self.num_devices

    def price(self, device_hour: float) -> float:
        """Returns the price of a million samples, by that of a device for an hour."""
        return 1e9 * device_hour / (_HOUR_MS * self.of_a_device)


@one_thread()
def main(config: PlanWorldConfig) -> None:
    """Plans for each number of devices, and prints and writes the table."""
    config.check()
    tables, numbers = load_tables(config.tables), config.numbers
    model = config.priced(config.model_for(), devices=None)
    objectives = {number: config.objective_of(number, model) for number in numbers}
    context = open_context(
        needs_of([config.sharder]), tables, config.batch_of(numbers[0]), model, config.policy,
        config.store,
    )  # fmt: skip
    if context.policy is not None:
        context.policy.check(numbers[-1])
    budget, worlds, missing = Budget(config.seconds), list[World](), dict[int, PlanError]()
    with following(len(numbers), "numbers of devices planned") as step:
        for place, number in enumerate(numbers):
            try:
                task = build_task(
                    tables, config.devices_of(number), config.batch_of(number), model,
                    objectives[number], config.constraints,
                )  # fmt: skip
                oracle = oracle_of(context.costs, task, config.store)
                seconds = budget.part(1 / (len(numbers) - place)).seconds
                of_number = replace(context, oracle=oracle, seconds=seconds)
                plan = make_sharder(config.sharder, of_number).shard(task)
                worlds.append(World.of(plan, task, oracle, config.dense_of(number)))
            except PlanError as lack:
                missing[number] = lack
            step()
    if not worlds:
        most = numbers[-1]
        raise UserError(f"no plan for {_devices(most)}, nor for fewer: {missing[most]}")
    cli.say(_title(config, len(tables), objectives[numbers[0]].name, worlds))
    cli.show(_report(worlds, missing, config.device_hour))
    if config.json is not None:
        documents.write(config.json, WORLDS_SCHEMA.stamp({
            "worlds": [asdict(world) | {"samples_s": world.samples_s} for world in worlds],
            "missing": {str(number): str(lack) for number, lack in missing.items()},
            "knee": knee_of(worlds).num_devices,
        }))  # fmt: skip


def knee_of(worlds: Sequence[World]) -> World:
    """Returns the largest world whose added devices are worth it, each compared with the last such
    one: a device added brings at least half of the throughput of a device there.
    """
    knee = worlds[0]
    for world in worlds[1:]:
        if gain(knee, world) >= _WORTH:
            knee = world
    return knee


def gain(before: World, world: World) -> float:
    """Returns what each device added brings, over the throughput of a device before."""
    added = world.num_devices - before.num_devices
    return (world.samples_s - before.samples_s) / added / before.of_a_device


def _title(config: PlanWorldConfig, tables: int, objective: str, worlds: Sequence[World]) -> str:
    """Returns the workload, and the links of all-to-alls."""
    each = " on each device" if config.batch_per_device is not None else ""
    dense = f", {config.dense_ms:g} ms of dense part" if config.dense_ms else ""
    links = dict[str, int]()
    for world in worlds:
        if world.link is not None:
            links.setdefault(world.link, world.num_devices)
    over = ", ".join(f"from {number} devices on over {link}" for link, number in links.items())
    exchanges = f", all-to-alls {over}" if over else ""
    samples = f"batches of {config.batch_of(1):,} samples{each}"
    return f"{tables} tables, {samples}, {objective}{dense}{exchanges}"


def _report(
    worlds: Sequence[World], missing: Mapping[int, PlanError], hour: float | None
) -> Iterator[ReportPart]:
    """Yields the table, reasons for missing rows, and the knee."""
    columns = ["devices", "step ms", "90% interval", "samples/s", "efficiency", "idle", "full"]
    shown = new_table([*columns, *(["price/M"] if hour is not None else [])], texts=0)
    for world in worlds:
        low, high = world.interval_90_ms
        row = [str(world.num_devices), f"{world.step_ms:,.2f}", f"{low:,.2f} to {high:,.2f}"]
        row += [f"{world.samples_s:,.0f}", f"{world.of_a_device / worlds[0].of_a_device:.0%}"]
        row += [f"{world.idle:.0%}", f"{world.full:.0%}"]
        shown.add_row(*row, *([f"{world.price(hour):,.3g}"] if hour is not None else []))
    yield shown
    yield from (f"no plan for {_devices(number)}: {lack}" for number, lack in missing.items())
    knee = knee_of(worlds)
    line = f"knee: {knee.num_devices} devices, the most of which each one added brings at least "
    line += "half of the throughput of one before"
    if hour is not None:
        cheapest = min(worlds, key=lambda world: world.price(hour))
        line += f"; cheapest: {cheapest.num_devices} devices"
    yield line


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"


if __name__ == "__main__":
    cli.run_command(main, PlanWorldConfig)
