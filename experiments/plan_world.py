#!/usr/bin/env python
"""Plan the same tables for several numbers of devices: step time, throughput, memory and price."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path

from autoshard.cost_model import CostModel
from autoshard.cost_model.threads import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.inputs import build_task, read_devices
from autoshard.experiments.console.machine import MachineOptions
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.console.outputs import PICTURES, check_file
from autoshard.experiments.console.progress import following
from autoshard.experiments.console.side_by_side import processes_for, side_by_side
from autoshard.experiments.explaining.plan_report import show
from autoshard.experiments.explaining.world_report import NoPlan, World, WorldSizes
from autoshard.sharders import (
    SHARDERS,
    check_takes_seconds,
    cost_model_beside,
    make_sharder,
    needs_of,
    open_context,
    oracle_of,
    spec_of,
)
from autoshard.workload import (
    Device,
    Objective,
    PlanError,
    ShardingTask,
    UserError,
    documents,
    load_tables,
)
from autoshard.workload.bounds import check_bounds
from autoshard.workload.packing.table_options import TableOptions
from autoshard.workload.sizes import format_bytes

_BATCH_SIZE = 1024
_MAX_DEVICES = 2**12  # up to which the least number that fits is sought
_MAX_BYTES = 2**50
_PRECISION = 0.01  # of the memory that is needed


@dataclass(frozen=True, kw_only=True)
class PlanWorldConfig(MachineOptions, ObjectiveOptions):
    """Plan the same tables for several numbers of devices, to choose how many to train on.

    Reports step time, throughput, efficiency, memory, and with --device-hour the price of a million
    samples. The knee is the largest number at which each device added brings at least half of the
    throughput of a device before it.
    """

    tables: str
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_devices: str
    """Numbers of devices, separated by commas, such as 8,16,32."""
    memory_gb: str
    """Memory of a device in GB of 2^30 bytes, the same for all."""
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
    policy: Path = Path("cpu")
    """Folder of a trained policy, or the name of a shipped one."""
    cost_model: Path | None = None
    """Folder of a cost model, or the name of a shipped one. Default: the one in the policy's
    folder, else the shipped one."""
    store: Path = Path("costs.db")
    """SQLite file of measurements; those of these tables correct the predictions."""
    picture: Path | None = None
    """PNG or SVG file for a chart of throughput, and of price or efficiency."""
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
        self.check_machine(self.cost_model)
        check_file(self.picture, "--picture", PICTURES)
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

    def devices_of(self, number: int) -> tuple[Device, ...]:
        """Returns the devices of a world."""
        return read_devices(self.memory_gb, number, "--num-devices")

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
        return objective

    def dense_of(self, number: int) -> float:
        """Returns the milliseconds of the dense part in a step of a world."""
        samples = [self.batch_of(each) / each for each in (number, self.numbers[0])]
        return (self.dense_ms or 0.0) * samples[0] / samples[1]


@one_thread()
def main(config: PlanWorldConfig) -> None:
    """Plans for each number of devices, and prints, draws and writes the table."""
    config.check()
    tables, numbers = load_tables(config.tables), config.numbers
    source = config.cost_model or cost_model_beside(config.policy)
    model = config.priced(config.model_for(source, config.store), devices=None)
    objectives = {number: config.objective_of(number, model) for number in numbers}
    context = open_context(
        needs_of([config.sharder]), tables, config.batch_of(numbers[0]), model, config.policy,
        config.store,
    )  # fmt: skip
    if context.policy is not None:
        context.policy.check(numbers[-1])

    def build(devices: tuple[Device, ...]) -> ShardingTask:
        number = len(devices)
        objective = objectives.get(number, objectives[numbers[-1]])
        return build_task(
            tables, devices, config.batch_of(number), model, objective, config.constraints
        )

    chooses_rows = spec_of(config.sharder).ways == "chosen"

    def fits(number: int, memory_bytes: int) -> bool:
        """Returns whether tables fit into so many equal devices, by rows if the sharder may."""
        try:
            TableOptions(build(Device.uniform(number, memory_bytes))).any_plan(chooses_rows)
        except PlanError:
            return False
        return True

    budget, processes = Budget(config.seconds), processes_for(len(numbers))
    memory = config.devices_of(numbers[0])[0].memory_bytes

    def plan(number: int) -> World | NoPlan:
        try:
            task = build(config.devices_of(number))
            oracle = oracle_of(context.costs, task, config.store)
            rounds = ceil((len(numbers) - numbers.index(number)) / processes)  # from this one on
            of_number = replace(context, oracle=oracle, seconds=budget.part(1 / rounds).seconds)
            plan = make_sharder(config.sharder, of_number).shard(task)
            return World.of(plan, task, oracle, config.dense_of(number))
        except PlanError as fault:
            return NoPlan(number, _needed_bytes(fits, number, memory), str(fault))

    worlds, missing = list[World](), list[NoPlan]()
    with following(len(numbers), "numbers of devices planned") as step:
        for found in side_by_side(plan, numbers):
            worlds.append(found) if isinstance(found, World) else missing.append(found)
            step()
    lacking = [lack.num_devices for lack in missing if lack.needed_bytes is not None]
    least = _least_devices(fits, lacking[-1], memory, worlds) if lacking else None
    if least is not None and (of_node := config.devices_per_node or 1) < least:
        least = -(-least // of_node) * of_node  # in full nodes
    if not worlds:
        raise _no_plan(missing[-1], memory, least)
    sizes = WorldSizes(worlds, missing, least, _workload(config, len(tables), objectives),
                       config.device_hour)  # fmt: skip
    show(sizes.parts())
    if config.picture is not None:
        sizes.picture(config.picture)
    if config.json is not None:
        documents.write(config.json, sizes.to_json())


def _least(low: int, high: int, fits: Callable[[int], bool], precision: float = 0.0) -> int:
    """Returns the least number that fits, to a relative precision; `low` does not, `high` does."""
    while high - low > max(1, precision * low):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _needed_bytes(fits: Callable[[int, int], bool], number: int, memory: int) -> int | None:
    """Returns the bytes of a device with which tables fit; None if memory is not what lacks."""
    if fits(number, memory) or not fits(number, _MAX_BYTES):
        return None
    high = 2 * memory
    while not fits(number, high):
        memory, high = high, 2 * high
    return _least(memory, high, lambda size: fits(number, size), _PRECISION)


def _least_devices(
    fits: Callable[[int, int], bool], low: int, memory: int, worlds: Sequence[World]
) -> int | None:
    """Returns the least number of devices, more than `low`, into which tables fit; None if none."""
    high = min((world.num_devices for world in worlds if world.num_devices > low), default=2 * low)
    while high <= _MAX_DEVICES and not fits(high, memory):
        low, high = high, 2 * high
    if high > _MAX_DEVICES:
        return None
    return _least(low, high, lambda number: fits(number, memory))


def _no_plan(lack: NoPlan, memory: int, least: int | None) -> UserError:
    """Returns the error if there is no plan for any number of devices."""
    if lack.needed_bytes is None:
        return UserError(f"no plan for {lack.num_devices} devices: {lack.reason}")
    more = "" if least is None else f", or take {least} devices"
    return UserError(
        f"no number of devices has a plan: each of {lack.num_devices} has {format_bytes(memory)} "
        f"and needs {format_bytes(lack.needed_bytes)}: add memory{more}"
    )


def _workload(config: PlanWorldConfig, tables: int, objectives: Mapping[int, Objective]) -> str:
    """Returns what all numbers of devices have in common."""
    smallest, per_device = config.numbers[0], config.batch_per_device is not None
    each = " on each device" if per_device else ""
    dense = f", {config.dense_ms:g} ms of dense part" if config.dense_ms else ""
    dense += f" on {smallest}" if dense and not per_device else ""
    name = objectives[smallest].name
    return f"{tables} tables, batches of {config.batch_of(1):,} samples{each}, {name}{dense}"


if __name__ == "__main__":
    cli.run_command(main, PlanWorldConfig)
