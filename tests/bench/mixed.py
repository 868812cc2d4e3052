"""Devices that differ: two of two threads and two of one, measured one kind after the other.

A plan that takes all devices for equal waits for the slow ones. If a fast device is s times as
fast, a plan that knows it can take 2 / (s + 1) of that.
"""

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

from autoshard.benchmark import MeasuredCosts, MeasureSettings, price_plan
from autoshard.benchmark.hardware import cpu_fingerprint, physical_cores, with_threads
from autoshard.benchmark.pool import end_pool, pool_names
from autoshard.benchmark.probing import probe_here
from autoshard.cost_model import EstimatedCosts, OtherHardware, OutsideTraining, load_model
from autoshard.cost_model.mixed_costs import MixedCosts
from autoshard.cost_model.probed_machine import on_machine
from autoshard.cost_model.roofline import roofline_model
from autoshard.sharders import AnnealingSharder, SharderContext, load_policy, make_sharder
from autoshard.workload import (
    Device,
    Objective,
    ShardingPlan,
    ShardingTask,
    load_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from bench.metric import Metric
from bench.workbench import cpu_pool, say

_THREADS, _BATCH_SIZE, _PROBE_SECONDS = 2, 1024, 20.0
_SOURCES = ("synthetic:40:11:small", "synthetic:60:12", "criteo")
_GPU_BATCH_SIZE, _GPUS = 16384, ("h100-80gb", "a100-80gb")
_AMPLE = 2**40


def mixed_metrics() -> list[Metric]:
    """Measured steps on cores, and plans for two generations of GPUs by data sheet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        warnings.simplefilter("ignore", OutsideTraining)
        return [*_measured_metrics(), *_gpu_metrics()]


def _measured_metrics() -> list[Metric]:
    if len(physical_cores()) < _THREADS:
        say("devices of two threads are left out: this machine has one core")
        return []
    say("devices of one and of two threads")
    slow, fast = cpu_fingerprint(), with_threads(cpu_fingerprint(), _THREADS)
    model = load_model("cpu")
    parts = {}
    for name, threads in ((fast, _THREADS), (slow, 1)):
        own = on_machine(model, probe_here("cpu", _PROBE_SECONDS, threads))
        parts[name] = EstimatedCosts(own.for_objective(Objective()), _BATCH_SIZE)
    found = []
    with tempfile.TemporaryDirectory() as folder, cpu_pool(Path(folder) / "costs.db") as pool:
        measured = MeasuredCosts(pool, MeasureSettings(_BATCH_SIZE))
        for source in _SOURCES:
            task = _task(source, [fast, fast, slow, slow], _BATCH_SIZE)
            plan, blind = _plans(task, parts, slow)
            knowing, equal = (price_plan(each, task, measured).step_ms for each in (plan, blind))
            # How fast the fast ones are, by the shards of the plan that takes all for equal.
            alike = [replace(task, devices=_devices([name] * 4)) for name in (fast, slow)]
            both = [price_plan(blind, each, measured).phases_ms.sum() for each in alike]
            speed = float(both[1] / both[0])
            allowed = 2 / (speed + 1)
            found += [
                Metric(f"{source} on 2 fast and 2 slow cores: speed of the fast ones", "", speed),
                Metric(f"{source} on 2 fast and 2 slow cores: measured step over that of a plan "
                       "for equal devices", "", knowing / equal),
                Metric(f"{source} on 2 fast and 2 slow cores: the same over what speeds allow",
                       "at most 1.05", knowing / equal / allowed),
            ]  # fmt: skip
        for name in pool_names():
            end_pool(name)
    return found


def _gpu_metrics() -> list[Metric]:
    say("four GPUs of one generation and four of another, by data sheet")
    found = []
    for source in ("synthetic:100:0", "synthetic:300:3"):
        models = [roofline_model(DATA_SHEETS[name]) for name in _GPUS]
        fast, slow = (model.provenance.hardware for model in models)
        task = _task(source, [fast] * 4 + [slow] * 4, _GPU_BATCH_SIZE)
        parts = {
            model.provenance.hardware: EstimatedCosts(
                model.for_objective(task.objective, 8), _GPU_BATCH_SIZE
            )
            for model in models
        }
        plan, blind = _plans(task, parts, fast)
        mixed = MixedCosts(parts)
        annealed = AnnealingSharder(mixed.fresh(), seconds=60.0).shard(task)
        knowing, equal, long = (mixed.step_ms(each, task) for each in (plan, blind, annealed))
        where = f"{source} on 4 x H100 and 4 x A100, by price"
        found += [
            Metric(f"{where}: step over that of a plan for equal devices", "", knowing / equal),
            Metric(f"{where}: step over that of a minute of annealing", "at most 1.02",
                   knowing / long),
        ]  # fmt: skip
    return found


def _devices(hardware: list[str]) -> tuple[Device, ...]:
    return tuple(Device(f"device{n}", _AMPLE, hardware=name) for n, name in enumerate(hardware))


def _task(source: str, hardware: list[str], batch_size: int) -> ShardingTask:
    return ShardingTask(load_tables(source), _devices(hardware), batch_size, objective=Objective())


def _plans(
    task: ShardingTask, parts: dict[str, EstimatedCosts], equal: str
) -> tuple[ShardingPlan, ShardingPlan]:
    """Returns the plan that knows the devices, and one that takes all for one kind."""
    policy = load_policy("cpu")
    plan = make_sharder("autoshard", SharderContext(MixedCosts(parts), policy)).shard(task)
    alike = replace(task, devices=_devices([""] * len(task.devices)))
    return plan, make_sharder("autoshard", SharderContext(parts[equal], policy)).shard(alike)
