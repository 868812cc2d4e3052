"""The native vector face of the game: all seats step together in one pass."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.training import one_thread
from autoshard.envs.batched_env import BatchedPlacementEnv
from autoshard.envs.catalog import TableCatalog, TaskInstance
from autoshard.envs.observation import Floats, Layout
from autoshard.envs.rewards import CostSource, Dense, EstimatedRewards, Reward
from autoshard.envs.task_sampling import RandomTaskSampler, TaskSampler

Info = dict[str, Any]
_MOST = float(np.finfo(np.float32).max)  # shares and ratios have no limit, and are finite
_AHEAD = 64  # tasks drawn together where games end one by one: each then takes a quarter as long


class ShardingVectorEnv(VectorEnv[Floats, npt.NDArray[np.int64], Any]):
    """Many games of `Sharding-v0` (see `ShardingEnv`), played side by side.

    A seat whose game ended starts its next one with the step after (`AutoresetMode.NEXT_STEP`);
    that step's action on the seat is ignored, its reward is 0. The games that end in one step have
    their costs fetched in one call, so that all devices of a pool work at once.

    Args:
        deck: the tables.
        num_envs: seats.
        generator: deals the tasks.
        reward: what a game is worth.
        source: what the devices of a finished game cost.
        max_devices: width of observation and action; by default that of the generator.
        halvings: that a game may make; by default as many as it has tables at most, 0 for games of
            whole tables, where the action is there and never allowed.
        rivals: so many seats side by side are dealt the same task. With more than one, games are
            played in rounds: whoever is through waits for the others, what it does then is ignored,
            and all end together. Infos of the end tell `task` and `actions`: which one it was, and
            how many actions counted.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        catalog: TableCatalog,
        num_envs: int,
        task_sampler: TaskSampler | None = None,
        reward: Reward | None = None,
        source: CostSource | None = None,
        max_devices: int | None = None,
        max_splits: int | None = None,
        group_size: int = 1,
    ) -> None:
        self.task_sampler = task_sampler or RandomTaskSampler()
        self.reward = reward or Dense()
        self.source = source or EstimatedRewards()
        self.num_envs = num_envs
        devices = max_devices or self.task_sampler.max_devices
        self.layout = Layout(devices)
        tables = self.task_sampler.max_tables
        max_splits = tables if max_splits is None else max_splits
        self.episodes = BatchedPlacementEnv(catalog, num_envs, tables, devices, max_splits)
        box = gym.spaces.Box(-1.0, _MOST, (self.layout.size,), np.float32)
        self.single_observation_space, self.single_action_space = (
            box,
            gym.spaces.Discrete(devices + 1),
        )
        self.observation_space = gym.vector.utils.batch_space(box, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._group_size = group_size
        self._ended = torch.zeros(num_envs, dtype=torch.bool)
        self._idle = torch.zeros(num_envs, dtype=torch.bool)
        self._paid = torch.zeros(num_envs)
        self._played = torch.zeros(num_envs, dtype=torch.int64)
        self._tasks = np.zeros(num_envs, np.int64)
        self._tally = {"games": 0, "dead_ends": 0, "halvings": 0, "relative_max": 0.0}
        self._asked = 0
        self._ahead: list[TaskInstance] = []  # drawn, and not dealt yet

    @one_thread()
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Info | None = None
    ) -> tuple[Floats, Info]:
        """New games on all seats; `options={"instances": [...]}` says which."""
        first = seed if seed is None or isinstance(seed, int) else seed[0]
        if first is not None or self._np_random is None:
            super().reset(seed=first)
            self._ahead.clear()
        env_ids = list(range(self.num_envs))
        self.episodes.start(env_ids, self._next_tasks(env_ids, (options or {}).get("instances")))
        self._ended[:] = False
        return self._observe(), {}

    @one_thread()
    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[Floats, Floats, npt.NDArray[np.bool_], npt.NDArray[np.bool_], Info]:
        """Place or halve a unit on every seat whose game goes on."""
        episodes, playing = self.episodes, ~(self._ended | self._idle)
        before = self._worst()
        joining = self._ended.nonzero()[:, 0].tolist()
        instances = self._next_tasks(joining) if joining else ()
        episodes.place(torch.as_tensor(actions, dtype=torch.int64), playing, joining, instances)
        rewards = torch.where(playing, self.reward.along(before, self._worst()), 0.0)
        self._paid += rewards
        self._played += playing
        over = episodes.over & playing
        info: Info = {}
        if over.any():
            rewards[over] += self._settle(over, info) - self._paid[over]
        if self._group_size > 1:
            self._idle |= over
            over = self._idle.all().repeat(self.num_envs)
        self._ended = over
        ended = over.numpy().copy()
        if self._group_size > 1 and over.any():
            info |= {"task": self._tasks.copy(), "actions": self._played.numpy().copy()}
            info |= {"_task": ended, "_actions": ended}
        return self._observe(), rewards.numpy(), ended, np.zeros_like(ended), info

    def learn(self, model: CostModel) -> None:
        """Believe another cost model from now on."""
        self.episodes.learn(EstimatedCosts(model, self.episodes.catalog.batch_size))

    def tally(self) -> dict[str, float]:
        """Games ended, dead ends and halvings in them, and what a step of the others takes over the
        bound, in the mean.

        Since this was asked last. `asked`: shards that the source asked a pool for.
        """
        told = dict(self._tally)
        finished = max(1, self._tally["games"] - self._tally["dead_ends"])
        told["relative_max"] /= finished
        self._tally = dict.fromkeys(self._tally, 0)
        asked, self._asked = self.source.measured - self._asked, self.source.measured
        return {**told, "asked": asked}

    def _next_tasks(
        self, env_ids: list[int], instances: Sequence[TaskInstance] | None = None
    ) -> Sequence[TaskInstance]:
        """Who is to sit there next, by default whatever the generator deals."""
        drawn = -(-len(env_ids) // self._group_size)
        tasks = self.np_random.integers(2**62, size=drawn)
        if instances is None:
            each = self._drawn(drawn)
            instances = [instance for instance in each for _ in range(self._group_size)][
                : len(env_ids)
            ]
        self._tasks[env_ids] = np.repeat(tasks, self._group_size)[: len(env_ids)]
        self._paid[env_ids] = 0
        self._played[env_ids] = 0
        self._idle[env_ids] = False
        return instances

    def _drawn(self, count: int) -> list[TaskInstance]:
        """So many tasks of the generator."""
        catalog, rng = self.episodes.catalog, self.np_random
        if count >= min(_AHEAD, self.num_envs // self._group_size):  # all seats, or enough
            return self.task_sampler.sample(catalog, rng, count)
        if len(self._ahead) < count:
            self._ahead += self.task_sampler.sample(catalog, rng, _AHEAD)
        drawn, self._ahead = self._ahead[:count], self._ahead[count:]
        return drawn

    def _worst(self) -> torch.Tensor:
        return self.episodes.plan_ms / self.episodes.lower_bound_ms

    def _settle(self, over: torch.Tensor, info: Info) -> torch.Tensor:
        """What the games that are over are worth: [over]."""
        episodes = self.episodes
        worth = self.reward.infeasible(episodes.left_share()[over])
        complete = (over & ~episodes.infeasible).nonzero()[:, 0]
        plan_ms = torch.zeros(self.num_envs)
        if len(complete):
            costs = self.source(episodes, complete.tolist())
            plan_ms[complete] = costs.plan_ms
            told = (costs, episodes.exists[complete], episodes.lower_bound_ms[complete])
            worth[~episodes.infeasible[over]] = self.reward.complete(*told)
        relative = plan_ms / episodes.lower_bound_ms
        self._tally["games"] += int(over.sum())
        self._tally["dead_ends"] += int((over & episodes.infeasible).sum())
        self._tally["halvings"] += int((episodes.parts - 1)[over].sum())
        self._tally["relative_max"] += float(relative[complete].sum())
        info.update(
            plan_ms=plan_ms.numpy(),
            lower_bound_ms=episodes.lower_bound_ms.numpy().copy(),
            infeasible=(over & episodes.infeasible).numpy(),
            _plan_ms=over.numpy().copy(),
            _lower_bound_ms=over.numpy().copy(),
            _infeasible=over.numpy().copy(),
        )
        return worth

    def _observe(self) -> Floats:
        return np.asarray(self.layout.observe(self.episodes).numpy())
