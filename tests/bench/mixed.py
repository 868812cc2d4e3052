"""Devices that differ: cores with all of their time and cores with a quota, one after the other.

A plan that takes all devices for equal waits for the slow ones. If a fast device is s times as
fast, a plan that knows it can take 2 / (s + 1) of that. Both plans go by costs that the same
measured shards correct, as `shard.py --measure` does.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from autoshard.benchmark import MachineProbe, Measurement, MeasureSettings, Timing
from autoshard.benchmark.measurement import Directions
from autoshard.benchmark.probe.probing import probe_here
from autoshard.benchmark.probe.report import Passes
from autoshard.cost_model import (
    EstimatedCosts,
    OtherHardware,
    OutsideTraining,
    TableResiduals,
    load_model,
)
from autoshard.cost_model.learning.calibration import MIN_CALIBRATION_SHARDS, calibrate
from autoshard.cost_model.learning.probed_machine import on_machine
from autoshard.cost_model.networks.dataset import CostDataset
from autoshard.cost_model.pricing.mixed_costs import MixedCosts
from autoshard.cost_model.roofline import roofline_model
from autoshard.sharders import (
    AnnealingSharder,
    MeasuringSharder,
    SharderContext,
    load_policy,
    make_sharder,
)
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    Shard,
    Sharder,
    ShardingPlan,
    ShardingTask,
    load_tables,
    random_shards,
)
from autoshard.workload.arrays import Floats
from autoshard.workload.data_sheets import DATA_SHEETS
from bench.metric import Metric
from bench.time_shards import ROUND_SECONDS
from bench.workbench import say

_PERCENT, _BATCH_SIZE, _PROBE_SECONDS = 60, 1024, 20.0
_MEASURE_SECONDS = 240.0  # one after the other: what four devices measure in a minute
_ROUNDS = 3
# Plans' shards are built so often. Where a shard is in memory, and when it is timed, changes a
# forward pass by up to a fifth, which rounds of one process do not show.
_BUILDS = 3
_ERROR = 0.1  # relative, of a shard that is built once
_SOURCES = {
    "40 small tables": "synthetic:40:11:small",
    "60 tables": "synthetic:60:12",
    "60 small tables": "synthetic:60:13:small",
}
_GPU_SOURCES = {"100 tables": "synthetic:100:0", "300 tables": "synthetic:300:3"}
_GPU_BATCH_SIZE, _GPUS = 16384, ("h100-80gb", "a100-80gb")
_AMPLE = 2**40


def mixed_metrics() -> list[Metric]:
    """Measured steps on cores, and plans for two generations of GPUs by data sheet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        warnings.simplefilter("ignore", OutsideTraining)
        return [*_measured_metrics(), *_gpu_metrics()]


def _measured_metrics() -> list[Metric]:
    say(f"cores with all of their time and with {_PERCENT} % of it")
    model, probe = load_model("cpu"), probe_here("cpu", _PROBE_SECONDS)
    fast, slow = probe.hardware, f"{probe.hardware}, {_PERCENT} % of its time"
    some = random_shards(load_tables("synthetic:30:21:small"), 4, 6, seed=1)
    try:
        both = [each.sum() for each in _timed(some, (100, _PERCENT), _BUILDS)]
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"no control group can be made here: {error}")
        return []
    factor, found = float(both[1] / both[0]), []
    parts = {
        each.hardware: EstimatedCosts(
            on_machine(model, each).for_objective(Objective()), _BATCH_SIZE
        )
        for each in (probe, _slowed(probe, factor, slow))
    }
    for name, source in _SOURCES.items():
        task = _task(source, [fast, fast, slow, slow], _BATCH_SIZE)
        timer = _Timer({fast: 100, slow: _PERCENT}, task.tables)
        plans = _plans(task, parts, fast, timer)
        shards = [shard for plan in plans for shard in plan.shards(task) if shard is not None]
        # Each shard is timed on both kinds; of a plan's shards, that of its device counts.
        timed = _timed(shards, (100, _PERCENT), _BUILDS)
        ms = {kind: found.reshape(2, 4, 2) for kind, found in zip((fast, slow), timed, strict=True)}
        knowing, equal = (
            float(np.concatenate([ms[fast][n, :2], ms[slow][n, 2:]]).max(0).sum()) for n in range(2)
        )
        speed = float(ms[slow].sum() / ms[fast].sum())
        where = f"{name} on 2 cores and 2 with {_PERCENT} % of their time"
        found += [
            Metric(f"{where}: speed of the fast ones", "", speed),
            Metric(f"{where}: measured step over that of a plan for equal devices",
                   "", knowing / equal),
            Metric(f"{where}: the same over what speeds allow", "at most 1.05",
                   knowing / equal / (2 / (speed + 1))),
        ]  # fmt: skip
    return found


def _slowed(probe: MachineProbe, factor: float, hardware: str) -> MachineProbe:
    """Returns the probe of hardware that takes so many times as long."""
    shards = [
        replace(each, ms=Passes(*(None if ms is None else factor * ms for ms in (
            each.ms.forward, each.ms.backward))))
        for each in probe.shards
    ]  # fmt: skip
    return replace(probe, hardware=hardware, shards=tuple(shards))


class _Timer:
    """A `Measurer` that times shards on one core with each quota, one after the other.

    Args:
        percents: Quota of each kind of devices.
        tables: Tables of the task.
    """

    devices = 1

    def __init__(self, percents: Mapping[str, int], tables: Sequence[EmbeddingTable]) -> None:
        self._percents, self._tables = percents, tables
        self._found: dict[str, list[Measurement]] = {kind: [] for kind in percents}
        self._known: set[str] = set()

    def fits(self, shard: Shard) -> bool:
        """Returns whether there is memory for the shard."""
        return True

    def learn(self, shards: Sequence[Shard], seconds: float) -> int:
        """Times as many of these shards as the time allows; returns how many are new."""
        new = {s.digest: s for s in shards if s.digest not in self._known}
        each = len(self._percents) * (_ROUNDS + 1) * ROUND_SECONDS
        chosen = [*new.values()][: int(seconds / each)]
        if not chosen:
            return 0
        self._known |= {shard.digest for shard in chosen}
        settings = MeasureSettings(_BATCH_SIZE)
        timed = _timed(chosen, [*self._percents.values()])
        for kind, found in zip(self._percents, timed, strict=True):
            for shard, (forward_ms, backward_ms) in zip(chosen, found.tolist(), strict=True):
                seconds = (forward_ms + backward_ms) / 1e3
                timing = Timing(
                    forward_ms, backward_ms, Directions.of(_ERROR), _ROUNDS, 0, 0.0, seconds
                )
                self._found[kind].append(
                    Measurement(shard, settings, kind, "", "ok", "core", "here", 0.0, timing)
                )
        return len(chosen)

    def informed(self, oracle: EstimatedCosts) -> EstimatedCosts:
        """Returns the oracle of all kinds, corrected by all measurements."""
        parts = oracle.of_kinds()
        return MixedCosts({kind: self._corrected(kind, parts[kind]) for kind in self._percents})

    def _corrected(self, kind: str, known: EstimatedCosts) -> EstimatedCosts:
        if not self._found[kind]:
            return known
        data, model = CostDataset.of(self._found[kind]), known.model
        if len(data) >= MIN_CALIBRATION_SHARDS:
            model = calibrate(model, data, extend_range=False)
        residuals = TableResiduals(model.compute, _BATCH_SIZE).learn(data, self._tables)
        return EstimatedCosts(model, _BATCH_SIZE, residuals)


def _timed(shards: Sequence[Shard], percents: Sequence[int], builds: int = 1) -> list[Floats]:
    """Returns forward and backward ms of shards, [shards, 2], for a core with each quota.

    They are medians of so many processes, each of which builds the shards.
    """
    pieces = [[(p.table.to_json(), p.start, p.width) for p in shard.pieces] for shard in shards]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shards.json"
        path.write_text(json.dumps({"batch_size": _BATCH_SIZE, "shards": pieces}))
        program = [sys.executable, str(Path(__file__).with_name("time_shards.py"))]
        command = [*program, ",".join(map(str, percents)), str(_ROUNDS), str(path)]
        found = []
        for _ in range(builds):
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return list(np.median(found, axis=0))


def _gpu_metrics() -> list[Metric]:
    say("four GPUs of one generation and four of another, by data sheet")
    found = []
    for name, source in _GPU_SOURCES.items():
        models = [roofline_model(DATA_SHEETS[gpu]) for gpu in _GPUS]
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
        where = f"{name} on 4 x H100 and 4 x A100, by price"
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
    task: ShardingTask,
    parts: dict[str, EstimatedCosts],
    equal: str,
    timer: _Timer | None = None,
) -> tuple[ShardingPlan, ShardingPlan]:
    """Returns the plan that knows the devices, and one that takes all for one kind.

    With a timer, the first is planned in rounds of measuring, and both know what was measured.
    """
    policy, costs = load_policy("cpu"), MixedCosts(parts)

    def sharder(oracle: EstimatedCosts) -> Sharder:
        return make_sharder("autoshard", SharderContext(oracle, policy))

    knowing = sharder(costs)
    if timer is not None:
        knowing = MeasuringSharder(costs, sharder, timer, _MEASURE_SECONDS)
    plan = knowing.shard(task)
    alike = replace(task, devices=_devices([""] * len(task.devices)))
    informed = costs if timer is None else timer.informed(costs)
    return plan, sharder(informed.of_kinds()[equal]).shard(alike)
