"""Speed of environment, training and sharders, and measured plans of all sharders."""

import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from commands import EXPERIMENTS

from autoshard.cost_model import EstimatedCosts, load_model, save_model
from autoshard.cost_model.threads import one_thread
from autoshard.envs import RandomTaskSampler, ShardingVectorEnv, TableCatalog
from autoshard.envs.task_families import FAMILIES
from autoshard.experiments import compare, ppo_shard, tune_shard
from autoshard.experiments.evaluation.ratio import relative
from autoshard.experiments.evaluation.task_sets import sample_tasks
from autoshard.experiments.sweeps.config import TuneShardConfig
from autoshard.experiments.training.config import PPOShardConfig, TrainingSetup
from autoshard.experiments.training.ppo import Trainer
from autoshard.sharders import USUAL_HEURISTICS, SharderContext, load_policy, make_sharder
from autoshard.workload import (
    EmbeddingTable,
    PlanError,
    Sharder,
    ShardingTask,
    documents,
    load_tables,
)
from autoshard.workload.tables.parts import tables_by_part
from bench.metric import Metric
from bench.model import calibrated_here
from bench.workbench import cpu_pool

_TABLES, _MANY_TABLES = "synthetic:400:1:small", "synthetic:5500:1:small"
_BATCH_SIZE = 1024
_ENVS, _MANY_ENVS, _EPISODES = 128, 512, 128
_LADDER = (
    "cost", "cost_fused", "cost_fused_search", "policy", "autoshard", "autoshard_verified",
)  # fmt: skip
# Tables and devices: target seconds of policy and autoshard.
_SIZES = {
    (100, 8): (0.05, 0.25),
    (1000, 32): (0.4, 1.0),
    (5000, 128): (2.0, 5.0),
    (5000, 256): (4.0, 10.0),
}
_WORLDS = (
    "--tables synthetic:1000:1:small --num-devices 4,8,16,32,48,64,96,128 --memory-gb 32 "
    "--batch-size 8192 --link 25GB/s,30us --no-probe"
)
_TRANSFER = ((20, 2), (100, 8), (200, 16))  # tables, devices
_TORCHREC = ("torchrec", "torchrec_columns")
_TIGHT_TASKS = 24
_LADDER_SECONDS, _TRANSFER_SECONDS = 300.0, 45.0  # that are measured at most


def speed_metrics() -> list[Metric]:
    """Measures environment steps per second and planning time, before Ray starts."""
    model = load_model("cpu")
    tables = tables_by_part(load_tables(_TABLES))["train"]
    catalog = TableCatalog.of_tables(model, tables, _BATCH_SIZE, split=True)
    metrics = [
        Metric(f"environment steps per second, one core, {num_envs} episodes of {length}",
               "at least 100,000", _env_speed(catalog, num_envs, lengths))
        for length, lengths in (("60 tables", (60, 60)), ("20 to 100 tables", (20, 100)))
        for num_envs in (_ENVS, _MANY_ENVS)
    ]  # fmt: skip
    # In a separate process, to measure its memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        metrics += process.submit(_planning_metrics).result()
    seconds = _worlds_seconds()
    return [
        *metrics,
        Metric("plan_world.py, 1,000 tables on 8 numbers of devices", "at most 20 s", seconds, "s"),
    ]


def _worlds_seconds() -> float:
    """Returns the seconds of a whole `plan_world.py`."""
    program = [sys.executable, str(EXPERIMENTS / "plan_world.py"), *_WORLDS.split()]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(program, check=True, capture_output=True, cwd=folder)
    return time.monotonic() - began


def _planning_metrics() -> list[Metric]:
    """Measures planning time by task size, and peak memory."""
    unseen = tables_by_part(load_tables(FAMILIES["thousands"].source))["test"]
    catalog = TableCatalog.of_tables(load_model("cpu"), unseen, _BATCH_SIZE)
    metrics = []
    for (tables, devices), targets in _SIZES.items():
        sampler = RandomTaskSampler((tables, tables), (devices, devices), (0.3, 0.3))
        task = next(sample_tasks(catalog, sampler, seed=0))
        for name, target in zip(("policy", "autoshard"), targets, strict=True):
            seconds = _seconds(name, task, 5 if tables <= 100 else 1)
            label = f"planning time, {tables:,} tables on {devices} devices, {name}"
            metrics.append(Metric(label, f"at most {target:g} s", seconds, "s"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    label = "peak memory of planning, process with 26,000 tables"
    return [*metrics, Metric(label, "at most 2 GB", peak, "GB")]


def memory_metrics() -> list[Metric]:
    """Counts plans found with tight memory, of tasks that first fit decreasing can pack."""
    model = load_model("cpu")
    catalog = TableCatalog.of_tables(
        model, tables_by_part(load_tables(_TABLES))["test"], _BATCH_SIZE
    )
    sampler = RandomTaskSampler((60, 60), (4, 8), (0.9, 0.9), 0.3)
    tasks = list(islice(sample_tasks(catalog, sampler, seed=0), _TIGHT_TASKS))
    found = {name: _plans(name, tasks) for name in ("cost_fused", "policy", "autoshard")}
    return [
        Metric(f"plans found for {_TIGHT_TASKS} tasks at 90 % memory fill, {name}",
               "" if name == "cost_fused" else f"{_TIGHT_TASKS}", count)
        for name, count in found.items()
    ]  # fmt: skip


def plan_metrics(folder: Path) -> list[Metric]:
    """Measures plans of all sharders for tasks of 60 tables on 4 devices."""
    theirs = ("neuroshard", *_TORCHREC)
    names = (*USUAL_HEURISTICS, *_LADDER, *theirs)
    sharders = compared(
        folder, "plans", names, _LADDER_SECONDS,
        tables=_TABLES, num_tasks=8, num_tables=60, num_devices=4,
    )  # fmt: skip
    return [
        *(
            _ratio(f"step time over best heuristic, {name}",
                   "at most 0.88" if name.startswith("autoshard") else "", sharders[name])
            for name in names
        ),
        paired(sharders, "policy", "cost", "at most 0.98"),
        paired(sharders, "policy", "cost_fused", "at most 1"),
        paired(sharders, "autoshard", "cost_fused_search"),
        *(
            paired(sharders, "autoshard", name, "at most 0.78" if name in _TORCHREC else "")
            for name in theirs
        ),
        Metric("balance, autoshard", "at least 0.95", sharders["autoshard"]["balance_mean"]),
        Metric("balance, autoshard_verified", "at least 0.95",
               sharders["autoshard_verified"]["balance_mean"]),
        Metric("plans out of memory, autoshard", "0", sharders["autoshard"]["oom"]),
    ]  # fmt: skip


def transfer_metrics(folder: Path) -> list[Metric]:
    """Measures the policy's plans for other numbers of tables and devices."""
    metrics = []
    names = (*USUAL_HEURISTICS, "policy", "autoshard")
    for tables, devices in _TRANSFER:
        scores = compared(
            folder, f"{tables}x{devices}", names, _TRANSFER_SECONDS,
            tables=_MANY_TABLES, num_tasks=3, num_tables=tables, num_devices=devices,
        )  # fmt: skip
        metrics += [
            _ratio(f"{tables} tables on {devices} devices: step time over best heuristic, {name}",
                   "at most 1", scores[name])
            for name in ("policy", "autoshard")
        ]  # fmt: skip
    return metrics


def _ratio(name: str, target: str, score: Mapping[str, Any]) -> Metric:
    """Returns a sharder's ratio to the best heuristic (1 for that heuristic itself)."""
    low, high = score["ratio_low"], score["ratio_high"]
    known = low is not None and low < high
    return Metric(name, target, score["ratio"], interval=(low, high) if known else None)


def paired(
    scores: Mapping[str, Any], ours: str, theirs: str, target: str = "", family: str = ""
) -> Metric:
    """Returns the ratio of two sharders' step times with its interval over tasks."""
    name = f"{family}{': ' if family else ''}step time, {ours} over {theirs}"
    ratio = relative(scores[ours]["step_ms"], scores[theirs]["step_ms"])
    if ratio is None:
        return Metric(name, target, None)
    known = ratio.count > 1
    return Metric(name, target, ratio.value, interval=(ratio.low, ratio.high) if known else None)


def training_metrics(folder: Path) -> list[Metric]:
    """Measures PPO steps per second, and utilization of the pool with measured rewards."""
    tables = tables_by_part(load_tables(_TABLES))["train"]
    speed = _ppo_speed(tables, folder)
    ppo_shard.main(
        PPOShardConfig(
            tables=_TABLES,
            num_tables="30",
            reward="measured",
            num_envs=24,
            iterations=3,
            check_every=3,
            check_tasks=4,
            test_seconds=0,
            out=folder / "measured",
            json=folder / "measured.json",
            mlflow_uri=f"sqlite:///{folder / 'mlflow.db'}",
        )
    )
    busy = documents.read(folder / "measured.json")["pool_busy"]
    return [
        Metric("PPO steps per second, estimated rewards", "at least 8,000", speed),
        Metric("pool utilization while training with measured rewards", "at least 0.60", busy),
    ]


def sweep_metrics(folder: Path) -> list[Metric]:
    """Runs a sweep of twelve trials with ASHA and Optuna, including Ray's start and final test."""
    summary = folder / "sweep.json"
    tune_shard.main(
        TuneShardConfig(
            num_samples=12,
            max_iterations=30,
            tables="synthetic:400:1:small",
            storage=str(folder / "sweep"),
            json=summary,
            mlflow_uri=f"sqlite:///{folder}/sweep-mlflow.db",
        )
    )
    name = "wall time of a sweep over training time per concurrent trial"
    return [Metric(name, "at most 1.3", documents.read(summary)["overhead"])]


@one_thread()
def _env_speed(catalog: TableCatalog, num_envs: int, lengths: tuple[int, int]) -> float:
    env = ShardingVectorEnv(catalog, num_envs, RandomTaskSampler(lengths))
    env.reset(seed=0)
    speeds = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(61):
            episodes = env.episodes
            # Greedy without splits: episodes with equal numbers of tables end together.
            devices = torch.where(episodes.safe, episodes.joined_ms, torch.inf).argmin(1)
            env.step(devices.numpy())
        speeds.append(61 * num_envs / (time.perf_counter() - started))
    return statistics.median(speeds)


def _ppo_speed(tables: Sequence[EmbeddingTable], store: Path) -> float:
    config = PPOShardConfig(
        learner="group_baseline",
        reward="estimated",
        num_envs=_EPISODES,
        memory_fill="0.1-0.8",
        memory_unevenness=0.0,
    )
    trainer = Trainer(TrainingSetup(config, {"train": tables}, load_model("cpu"), store), seed=0)
    steps = trainer.iterate()["steps"]
    speeds = []
    for _ in range(7):
        before, started = steps, time.perf_counter()
        steps = trainer.iterate()["steps"]
        speeds.append((steps - before) / (time.perf_counter() - started))
    trainer.stop()
    return statistics.median(speeds)


def _sharder(name: str) -> Sharder:
    return make_sharder(
        name, SharderContext(EstimatedCosts(load_model("cpu"), _BATCH_SIZE), load_policy("cpu"))
    )


def _seconds(name: str, task: ShardingTask, times: int) -> float:
    """Returns the median planning time with table features already computed."""
    sharder = _sharder(name)
    sharder.shard(task)
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        sharder.shard(task)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _plans(name: str, tasks: list[ShardingTask]) -> int:
    sharder, found = _sharder(name), 0
    for task in tasks:
        with suppress(PlanError):
            sharder.shard(task).check(task)
            found += 1
    return found


def compared(
    folder: Path, name: str, sharders: Sequence[str], seconds: float, **tasks: Any
) -> Mapping[str, Any]:
    """Compares sharders by measurement on held-out tables; returns their scores by name.

    All use the shipped cost model, calibrated to this machine.

    Args:
        folder: For the store and the calibrated model.
        name: Name of the JSON file.
        sharders: Names of sharders.
        seconds: Time limit of measuring.
        tasks: Options of `compare.py` that define the tasks.
    """
    model, store = folder / "model", folder / "compared.db"
    if not model.is_dir():
        with cpu_pool(store) as pool:
            save_model(calibrated_here(pool), model)
    answer = folder / f"{name}.json"
    compare.main(
        compare.CompareConfig(
            sharders=",".join(sharders),
            cost_model=model,
            measure=True,
            seconds=seconds,
            store=store,
            json=answer,
            mlflow_uri=f"sqlite:///{folder / 'mlflow.db'}",
            **tasks,
        )
    )
    scores: Mapping[str, Any] = documents.read(answer)["sharders"]
    return scores
