"""The policy's figures: its speed, and what the plans of all sharders measure."""

import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoshard.cost_model import EstimatedCosts, load_model, save_model
from autoshard.cost_model.training import one_thread
from autoshard.envs import Deck, RandomDeals, ShardingVectorEnv
from autoshard.envs.task_families import FAMILIES
from autoshard.experiments import compare, ppo_shard
from autoshard.experiments.evaluation.posterior import Ratio
from autoshard.experiments.training.checks import draw_tasks
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.experiments.training.ppo import Trainer
from autoshard.sharders import USUAL_HEURISTICS, Means, load_policy, make_sharder
from autoshard.workload import EmbeddingTable, PlanError, ShardingTask, load_tables
from autoshard.workload.parts import tables_by_part
from bench.figure import Figure
from bench.model import calibrated_here
from bench.workbench import cpu_pool

_TABLES, _MANY_TABLES = "synthetic:400:1:small", "synthetic:5500:1:small"
_BATCH_SIZE = 1024
_SEATS, _MANY_SEATS, _GAMES = 128, 512, 128
_LADDER = (
    "cost", "cost_fused", "cost_fused_search", "policy", "autoshard", "autoshard_verified",
)  # fmt: skip
# Tables and devices: seconds that policy and autoshard are to take.
_SIZES = {
    (100, 8): (0.05, 0.25),
    (1000, 32): (0.4, 1.0),
    (5000, 128): (2.0, 5.0),
    (5000, 256): (4.0, 10.0),
}
_TRANSFER = ((20, 2), (100, 8), (200, 16))  # tables, devices
_TORCHREC = ("torchrec", "torchrec_columns")
_TIGHT_TASKS = 24
_LADDER_SECONDS, _TRANSFER_SECONDS = 300.0, 45.0  # that are measured at most


def speed_figures() -> list[Figure]:
    """Steps a second of the game; seconds to shard. Ray must not be starting meanwhile."""
    model = load_model("cpu")
    tables = tables_by_part(load_tables(_TABLES))["train"]
    deck = Deck.of_tables(model, tables, _BATCH_SIZE, split=True)
    figures = [
        Figure(f"steps of the game a second, one core, {seats} games of {told} side by side",
               "at least 100,000", _game_speed(deck, seats, lengths))
        for told, lengths in (("60 tables", (60, 60)), ("20 to 100 tables", (20, 100)))
        for seats in (_SEATS, _MANY_SEATS)
    ]  # fmt: skip
    # In a process of its own, for the memory that it takes.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        figures += process.submit(_planning_figures).result()
    return figures


def _planning_figures() -> list[Figure]:
    """Seconds to shard, by size, and the most memory that it took."""
    unseen = tables_by_part(load_tables(FAMILIES["thousands"].source))["test"]
    deck = Deck.of_tables(load_model("cpu"), unseen, _BATCH_SIZE)
    figures = []
    for (tables, devices), goals in _SIZES.items():
        task = _task(deck, tables, devices)
        for name, goal in zip(("policy", "autoshard"), goals, strict=True):
            seconds = _seconds(name, task, 5 if tables <= 100 else 1)
            told = f"{tables:,} tables on {devices} devices, {name}"
            figures.append(Figure(told, f"at most {goal:g} s", seconds, "s"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    told = "peak memory of these, of a process that has 26,000 tables"
    return [*figures, Figure(told, "at most 2 GB", peak, "GB")]


def memory_figures() -> list[Figure]:
    """Plans found where memory is tight, of tasks that first fit decreasing can pack."""
    model = load_model("cpu")
    deck = Deck.of_tables(model, tables_by_part(load_tables(_TABLES))["test"], _BATCH_SIZE)
    deals = RandomDeals((60, 60), (4, 8), (0.9, 0.9), 0.3)
    tasks = draw_tasks(deck, deals, _TIGHT_TASKS, seed=0)
    found = {name: _plans(name, tasks) for name in ("cost_fused", "policy", "autoshard")}
    return [
        Figure(f"plans for {_TIGHT_TASKS} tasks that take 90 % of all memory, {name}",
               "" if name == "cost_fused" else f"{_TIGHT_TASKS}", count)
        for name, count in found.items()
    ]  # fmt: skip


def plan_figures(folder: Path) -> list[Figure]:
    """What plans of all sharders measure, for tasks of 60 tables and 4 devices."""
    theirs = ("neuroshard", *(_TORCHREC if find_spec("torchrec") else ()))
    names = (*USUAL_HEURISTICS, *_LADDER, *theirs)
    sharders = compared(
        folder, "plans", names, _LADDER_SECONDS,
        tables=_TABLES, num_tasks=8, num_tables=60, num_devices=4,
    )  # fmt: skip
    return [
        *(
            _ratio(f"step over the best heuristic's, {name}",
                   "at most 0.88" if name.startswith("autoshard") else "", sharders[name])
            for name in names
        ),
        paired("step, policy over cost", "at most 0.98", sharders["policy"],
               sharders["cost"]),
        paired("step, policy over cost_fused", "at most 1", sharders["policy"],
               sharders["cost_fused"]),
        paired("step, autoshard over cost_fused_search", "", sharders["autoshard"],
               sharders["cost_fused_search"]),
        *(
            paired(f"step, autoshard over {name}", "at most 0.78" if name in _TORCHREC else "",
                    sharders["autoshard"], sharders[name])
            for name in theirs
        ),
        Figure("balance, autoshard", "at least 0.95", sharders["autoshard"]["balance_mean"]),
        Figure("balance, autoshard_verified", "at least 0.95",
               sharders["autoshard_verified"]["balance_mean"]),
        Figure("plans out of memory, autoshard", "0", sharders["autoshard"]["oom"]),
    ]  # fmt: skip


def transfer_figures(folder: Path) -> list[Figure]:
    """What the policy's plans measure for other counts of tables and devices."""
    figures = []
    names = (*USUAL_HEURISTICS, "policy", "autoshard")
    for tables, devices in _TRANSFER:
        told = compared(
            folder, f"{tables}x{devices}", names, _TRANSFER_SECONDS,
            tables=_MANY_TABLES, num_tasks=3, num_tables=tables, num_devices=devices,
        )  # fmt: skip
        figures += [
            _ratio(f"{tables} tables on {devices} devices over the best heuristic's, {name}",
                   "at most 1", told[name])
            for name in ("policy", "autoshard")
        ]  # fmt: skip
    return figures


def _ratio(name: str, goal: str, score: Mapping[str, Any]) -> Figure:
    """A sharder's ratio to the best heuristic, which is exactly 1 for itself."""
    low, high = score["ratio_low"], score["ratio_high"]
    known = low is not None and low < high
    return Figure(name, goal, score["ratio"], interval=(low, high) if known else None)


def paired(name: str, goal: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Figure:
    """The ratio of two sharders' means, its interval by what it differs by between tasks."""
    ratio = Ratio.of(*(np.array([score["step_ms"]], float) for score in (ours, theirs)))
    if ratio is None:
        return Figure(name, goal, None)
    known = ratio.count > 1
    return Figure(name, goal, ratio.value, interval=(ratio.low, ratio.high) if known else None)


def training_figures(folder: Path) -> list[Figure]:
    """Steps a second of PPO, and how busy it keeps the pool with measured rewards."""
    tables = tables_by_part(load_tables(_TABLES))["train"]
    speed = _ppo_speed(tables, folder)
    ppo_shard.main(
        PPOShardConfig(
            tables=_TABLES,
            num_tables="30",
            reward="measured",
            games=24,
            iterations=3,
            check_every=3,
            check_tasks=4,
            test_seconds=0,
            out=folder / "measured",
            json=folder / "measured.json",
            mlflow_uri=f"sqlite:///{folder / 'mlflow.db'}",
        )
    )
    busy = json.loads((folder / "measured.json").read_text())["pool_busy"]
    return [
        Figure("steps of PPO a second, estimated rewards", "at least 8,000", speed),
        Figure("pool busy while training with measured rewards", "at least 0.60", busy),
    ]


@one_thread()
def _game_speed(deck: Deck, seats: int, lengths: tuple[int, int]) -> float:
    env = ShardingVectorEnv(deck, seats, RandomDeals(lengths))
    env.reset(seed=0)
    speeds = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(61):
            game = env.game
            # By devices alone, and nothing halved: games of as many tables end together.
            devices = torch.where(game.safe, game.joined_ms, torch.inf).argmin(1)
            env.step(devices.numpy())
        speeds.append(61 * seats / (time.perf_counter() - started))
    return statistics.median(speeds)


def _ppo_speed(tables: Sequence[EmbeddingTable], store: Path) -> float:
    config = PPOShardConfig(
        learner="group_baseline",
        reward="estimated",
        games=_GAMES,
        memory_fill="0.1-0.8",
        memory_unevenness=0.0,
    )
    trainer = Trainer(config, load_model("cpu"), tables, store, seed=0)
    steps = trainer.iterate()["steps"]
    speeds = []
    for _ in range(7):
        before, started = steps, time.perf_counter()
        steps = trainer.iterate()["steps"]
        speeds.append((steps - before) / (time.perf_counter() - started))
    trainer.stop()
    return statistics.median(speeds)


def _task(deck: Deck, tables: int, devices: int) -> ShardingTask:
    deals = RandomDeals((tables, tables), (devices, devices), (0.3, 0.3))
    return draw_tasks(deck, deals, 1, seed=0)[0]


def _seconds(name: str, task: ShardingTask, times: int) -> float:
    """To shard, features of the tables known: they are read once, whatever is made of them."""
    oracle = EstimatedCosts(load_model("cpu"), _BATCH_SIZE)
    sharder = make_sharder(name, Means(oracle, load_policy("cpu")))
    sharder.shard(task)
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        sharder.shard(task)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _plans(name: str, tasks: list[ShardingTask]) -> int:
    sharder = make_sharder(
        name, Means(EstimatedCosts(load_model("cpu"), _BATCH_SIZE), load_policy("cpu"))
    )
    found = 0
    for task in tasks:
        try:
            sharder.shard(task).check(task)
        except PlanError:
            continue
        found += 1
    return found


def compared(
    folder: Path, name: str, sharders: Sequence[str], seconds: float, **tasks: Any
) -> Mapping[str, Any]:
    """The scores of the sharders on such tasks, of tables that nothing has learned from.

    They go by the shipped cost model, calibrated to this machine as a user would.

    Args:
        folder: for what is measured, and the model.
        name: of what is written there.
        sharders: by their names.
        seconds: that are measured at most.
        tasks: what `compare.py` is told of them.
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
    scores: Mapping[str, Any] = json.loads(answer.read_text())["sharders"]
    return scores
