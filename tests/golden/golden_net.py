"""The golden record: plans and episodes of commit 748108b that later commits must reproduce.

`tasks.json` holds 24 tasks. `record.json` holds the plan of each deterministic sharder for each of
them with its step time, and five episodes or batches of episodes. `record.py` writes the record
anew; `test_golden.py` compares. Names of the project that may change are used in this file alone,
in the functions under "Adapters".
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.pricing.prediction import StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.envs import (
    Balance,
    MixedTaskSampler,
    RandomTaskSampler,
    ShardingVectorEnv,
    TableCatalog,
    TaskInstance,
)
from autoshard.sharders import (
    HEURISTICS,
    AnnealingSharder,
    SharderContext,
    load_policy,
    make_sharder,
)
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.plans.placements import Placement

FOLDER = Path(__file__).parent
TASKS: dict[str, Any] = json.loads((FOLDER / "tasks.json").read_text())
SHARDERS = (
    *HEURISTICS, "cost", "cost_fused", "neuroshard", "policy", "cost_fused_search", "autoshard",
    "annealing",
)  # fmt: skip
PROPOSALS = 2000  # number of annealing's proposals, so that its plans do not depend on seconds
NEUROSHARD = 320  # tables times devices: with more of them it takes seconds
CODES = "0123456789abcdef"  # devices, in a plan that is written as text
_SPLIT = re.compile(r"\(([^)]*)\)|(.)")


# --- Adapters -------------------------------------------------------------------------------------


@cache
def _oracle(batch_size: int) -> EstimatedCosts:
    return EstimatedCosts(load_model("cpu"), batch_size)


@cache
def task_of(name: str) -> ShardingTask:
    """Returns the golden task of that name."""
    return ShardingTask.from_json(TASKS[name])


def sharders_of(task: ShardingTask) -> list[str]:
    """Returns the sharders whose plans of a task are recorded."""
    quick = len(task.tables) * len(task.devices) <= NEUROSHARD
    return [name for name in SHARDERS if quick or name != "neuroshard"]


def plan_of(sharder: str, task: ShardingTask) -> ShardingPlan | None:
    """Returns the plan that the named sharder makes, which is valid; None where it finds none."""
    oracle = _oracle(task.batch_size)
    if sharder == "annealing":
        made: Any = AnnealingSharder(oracle, seconds=math.inf, proposals=PROPOSALS)
    else:
        made = make_sharder(sharder, SharderContext(oracle, load_policy("cpu")))
    try:
        plan: ShardingPlan = made.shard(task)
    except PlanError:
        return None
    plan.check(task)
    return plan


def step_ms(plan: ShardingPlan, task: ShardingTask) -> float:
    """Returns the step time of a plan by the shipped cost model, in milliseconds."""
    return _oracle(task.batch_size).plan_cost(plan, task).step_ms


def expected_ms(plan: ShardingPlan, task: ShardingTask) -> float:
    """Returns the step time that the search minimises: the expectation over scenarios."""
    return StepPredictor(_oracle(task.batch_size), task).expected_ms(plan.placed(task))


def widths_of(plan: ShardingPlan, task: ShardingTask) -> list[dict[int, int]]:
    """Returns, for each table of the task, the columns that each device holds of it."""
    found: dict[str, dict[int, int]] = {table.name: {} for table in task.tables}
    for each in sorted(plan.placements, key=lambda each: (each.table, each.device)):
        held = found[each.table]
        held[each.device] = held.get(each.device, 0) + each.width
    return list(found.values())


def plan_with(widths: list[dict[int, int]], task: ShardingTask) -> ShardingPlan:
    """Returns the plan that gives devices so many columns of each table."""
    placements = []
    for table, held in zip(task.tables, widths, strict=True):
        start = 0
        for device, width in held.items():
            placements.append(Placement(table.name, start, width or table.dim, device))
            start += width
    return ShardingPlan(tuple(placements), len(task.devices))


@dataclass(frozen=True)
class Scene:
    """How episodes are played.

    Args:
        tasks: of the first episode of each environment; where empty, all tasks are drawn.
        envs: how many play side by side; 0: one, through Gymnasium's interface for single ones.
        steps: that are played.
        splits: how often a random player splits, or takes another option, where it may; None:
            the shipped policy plays.
        rounds: environments that are given the same task and end together.
        seed: of the environment and of a random player.
    """

    tasks: tuple[str, ...]
    envs: int
    steps: int
    splits: float | None
    rounds: int = 1
    seed: int = 0


SCENES = {
    "single_random": Scene(("every_rule",), 0, 60, 0.2, seed=1),
    "single_policy": Scene(("giants_must_be_split",), 0, 30, None),
    "batch_random": Scene(
        ("every_rule", "rules_tight", "slow_link", "features", "uneven_tight_reserved", "compute"),
        6, 70, 0.15, seed=2,
    ),
    "batch_policy": Scene((), 8, 60, None, seed=3),
    "rounds": Scene((), 6, 50, 0.1, rounds=3, seed=4),
}  # fmt: skip


class Game:
    """Episodes of a scene, single or batched.

    Attributes:
        devices: number of actions that are devices.
        seen: observations, [envs, size].
        masks: actions that are allowed; the last ones are options. [envs, actions].
    """

    def __init__(self, scene: Scene) -> None:
        tasks = [task_of(name) for name in scene.tasks]
        more = task_of("small_loose"), task_of("giants"), task_of("slow_link")
        units, instances = [], []
        for task in (*tasks, *more):
            masks = RuleMasks(task)
            numbers = len(units) + np.arange(len(masks.units))
            rules = masks if task.rules else None
            instances.append(TaskInstance(numbers, task.usable_bytes, rules, task.objective))
            units += masks.units
        catalog = TableCatalog(_oracle(1024), units, split=True)
        drawn = MixedTaskSampler((
            RandomTaskSampler((5, 40), (2, 8), (0.5, 0.99), unevenness=0.6, split=True),
            RandomTaskSampler((5, 40), (2, 8), (0.1, 0.5), exchange_share=(0.2, 0.6)),
        ))  # fmt: skip
        self._single = scene.envs == 0
        options: dict[str, Any] = {}
        if self._single:
            self._env: Any = gym.make("Sharding-v0", catalog=catalog, task_sampler=drawn).unwrapped
            options = {"instance": instances[0]}
        else:
            reward = Balance() if scene.rounds > 1 else None
            self._env = ShardingVectorEnv(
                catalog, scene.envs, drawn, reward, group_size=scene.rounds, max_splits=20
            )
            if tasks:
                options = {"instances": instances[: len(tasks)]}
        self.devices = self._env.layout.max_devices
        self._observed(self._env.reset(seed=scene.seed, options=options)[0])

    def _observed(self, seen: Any) -> None:
        self.seen = np.atleast_2d(np.asarray(seen))
        parts = self._env.layout.split(self.seen)
        self.masks = np.concatenate([parts["allowed"], parts["options"][..., 0]], axis=1) > 0

    def step(self, actions: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Returns rewards and which episodes ended: [envs]. A single environment then starts anew,
        as batched ones do on their own.
        """
        seen, rewards, ended, _, _ = self._env.step(actions[0] if self._single else actions)
        if self._single and ended:
            seen, _ = self._env.reset()
        self._observed(seen)
        return np.atleast_1d(np.asarray(rewards, float)).copy(), np.atleast_1d(ended).copy()

    def logits(self) -> Floats:
        """Returns how the shipped policy scores each action: [envs, actions]."""
        parts = self._env.layout.split(torch.from_numpy(self.seen))
        with torch.inference_mode():
            logits, _ = _network()(parts)
        return np.asarray(logits.double().numpy())


@cache
def _network() -> Any:
    return load_policy("cpu").network


# --- Plans as text --------------------------------------------------------------------------------


def text_of(widths: list[dict[int, int]]) -> str:
    """Returns a plan as text: the device of each table, or `(device:width ...)` of a split one."""
    return "".join(
        CODES[next(iter(held))]
        if len(held) == 1
        else f"({' '.join(f'{CODES[device]}:{width}' for device, width in held.items())})"
        for held in widths
    )


def widths_in(text: str) -> list[dict[int, int]]:
    """Returns what `text_of` wrote; 0 columns stand for all of a whole table."""
    found = []
    for split, device in _SPLIT.findall(text):
        pairs = [pair.split(":") for pair in split.split()] or [[device, "0"]]
        found.append({CODES.index(code): int(width) for code, width in pairs})
    return found


# --- Episodes -------------------------------------------------------------------------------------

Choose = Callable[[Game], Ints]


def player(scene: Scene) -> Choose:
    """Returns who chooses actions while the record is written."""
    if scene.splits is None:
        return lambda game: game.logits().argmax(1)
    share = scene.splits
    rngs = [np.random.default_rng([scene.seed, number]) for number in range(max(1, scene.envs))]

    def at_random(game: Game) -> Ints:
        chosen = []
        for mask, rng in zip(game.masks, rngs, strict=True):
            devices = np.flatnonzero(mask[: game.devices])
            options = game.devices + np.flatnonzero(mask[game.devices :])
            takes = rng.random() < share
            some = options if len(options) and (takes or not len(devices)) else devices
            chosen.append(int(rng.choice(some)) if len(some) else 0)
        return np.array(chosen)

    return at_random


def checksums(seen: npt.NDArray[np.float32]) -> Floats:
    """Returns a number for each observation that changes with any of its parts: [envs]."""
    parts = np.arcsinh(seen.astype(float))
    weights = np.cos(np.arange(parts.shape[1]))
    return np.asarray(parts @ weights / math.sqrt(len(weights)))


@one_thread()
def played(scene: Scene, choose: Choose) -> Iterator[dict[str, Any]]:
    """Yields each step of a scene: what was seen, and what an action led to."""
    game = Game(scene)
    for _ in range(scene.steps):
        seen, masks, actions = checksums(game.seen), game.masks, choose(game)
        logits = game.logits() if scene.splits is None else None
        rewards, ended = game.step(actions)
        yield {
            "seen": seen, "masks": masks, "actions": actions, "rewards": rewards, "ended": ended,
            "logits": logits,
        }  # fmt: skip
