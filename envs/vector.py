"""`ShardingVectorEnv`: `BatchedPlacementEnv` as a Gymnasium vector environment."""

from collections.abc import Collection, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.envs.batched_env import BatchedPlacementEnv
from autoshard.envs.catalog import TableCatalog, TaskInstance
from autoshard.envs.observation import Floats, Layout
from autoshard.envs.options import OPTION_KINDS
from autoshard.envs.rewards import CostSource, Dense, EstimatedCostSource, Reward
from autoshard.envs.task_sampling import RandomTaskSampler, TaskSampler

Info = dict[str, Any]
_MAX_OBSERVATION = float(np.finfo(np.float32).max)  # ratios are finite but have no other limit
_PREFETCH = 64  # tasks sampled at once where episodes end one by one: 4 times as fast


class ShardingVectorEnv(VectorEnv[Floats, npt.NDArray[np.int64], Any]):
    """Parallel episodes of `Sharding-v0` (see `ShardingEnv`), which step as one batch.

    After an episode ends, the next step starts a new one (`AutoresetMode.NEXT_STEP`): its action is
    ignored and its reward is 0. Costs of all episodes that end in a step are requested in one call,
    so that all devices of a pool measure at once.

    Args:
        catalog: Units of all tasks.
        num_envs: Number of parallel episodes.
        task_sampler: Draws the tasks.
        reward: Reward of episodes.
        source: Source of the costs of completed episodes.
        max_devices: Number of devices in observations and actions; by default the sampler's.
        max_splits: Maximum number of splits in an episode; by default the maximum number of tables.
            With 0 the action remains and is never allowed.
        kinds: Kinds of options that tables may take beside splits, where the cost model prices
            them. Actions of other kinds remain and are never allowed.
        group_size: Number of consecutive environments that get the same task. With more than one,
            all episodes end together: an environment that is done ignores actions until all are.
            Infos at the end then have `task`, a random number that identifies it, and `actions`,
            the number of actions that counted.
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
        kinds: Collection[str] = OPTION_KINDS,
    ) -> None:
        self.task_sampler = task_sampler or RandomTaskSampler()
        self.reward = reward or Dense()
        self.source = source or EstimatedCostSource()
        self.num_envs = num_envs
        devices = max_devices or self.task_sampler.max_devices
        self.layout = Layout(devices)
        tables = self.task_sampler.max_tables
        max_splits = tables if max_splits is None else max_splits
        self.episodes = BatchedPlacementEnv(catalog, num_envs, tables, devices, max_splits, kinds)
        box = gym.spaces.Box(-1.0, _MAX_OBSERVATION, (self.layout.size,), np.float32)
        actions: gym.spaces.Discrete[np.int64] = gym.spaces.Discrete(self.episodes.num_actions)
        self.single_observation_space, self.single_action_space = box, actions
        self.observation_space = gym.vector.utils.batch_space(box, num_envs)
        self.action_space = gym.vector.utils.batch_space(actions, num_envs)
        self._group_size = group_size
        self._ended = torch.zeros(num_envs, dtype=torch.bool)
        self._idle = torch.zeros(num_envs, dtype=torch.bool)  # done before others of the batch
        self._return = torch.zeros(num_envs)
        self._over_bound = torch.zeros(num_envs)  # step time of each partial plan, relative
        self._actions = torch.zeros(num_envs, dtype=torch.int64)
        self._tasks = np.zeros(num_envs, np.int64)
        self._tally = {"episodes": 0, "infeasible": 0, "step_over_bound": 0.0}
        self._requested = 0
        self._prefetched: list[TaskInstance] = []

    @one_thread()
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Info | None = None
    ) -> tuple[Floats, Info]:
        """Starts new episodes, with the tasks in `options["instances"]` where that is given."""
        first = seed if seed is None or isinstance(seed, int) else seed[0]
        if first is not None or self._np_random is None:
            super().reset(seed=first)
            self._prefetched.clear()
        env_ids = list(range(self.num_envs))
        self.episodes.start(env_ids, self._next_tasks(env_ids, (options or {}).get("instances")))
        self._ended[:] = False
        self._over_bound = self.episodes.plan_ms / self.episodes.lower_bound_ms
        return self._observe(), {}

    @one_thread()
    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[Floats, Floats, npt.NDArray[np.bool_], npt.NDArray[np.bool_], Info]:
        """Places the current unit of each episode that has not ended, or gives it an option."""
        episodes, active = self.episodes, ~(self._ended | self._idle)
        before = self._over_bound
        starting = self._ended.nonzero()[:, 0].tolist()
        instances = self._next_tasks(starting) if starting else ()
        episodes.place(torch.as_tensor(actions, dtype=torch.int64), active, starting, instances)
        after = self._over_bound = episodes.plan_ms / episodes.lower_bound_ms
        rewards = torch.where(active, self.reward.shaping(before, after), 0.0)
        self._return += rewards
        self._actions += active
        over = episodes.over & active
        info: Info = {}
        if over.any():
            rewards[over] += self._returns(over, info) - self._return[over]
        if self._group_size > 1:
            self._idle |= over
            over = self._idle.all().repeat(self.num_envs)
        self._ended = over
        ended = over.numpy().copy()
        if self._group_size > 1 and over.any():
            info |= {"task": self._tasks.copy(), "actions": self._actions.numpy().copy()}
            info |= {"_task": ended, "_actions": ended}
        return self._observe(), rewards.numpy(), ended, np.zeros_like(ended), info

    def set_cost_model(self, model: CostModel) -> None:
        """Replaces the cost model, also for what is placed already."""
        self.episodes.set_oracle(EstimatedCosts(model, self.episodes.catalog.batch_size))
        self._over_bound = self.episodes.plan_ms / self.episodes.lower_bound_ms

    def tally(self) -> dict[str, float]:
        """Returns statistics of the episodes that ended since the last call.

        `episodes` and `infeasible` count all episodes and infeasible ones. `step_over_bound` is the
        mean step time of the others over its lower bound. `requested_shards` counts shards that
        were requested from a pool.
        """
        tally = dict(self._tally)
        tally["step_over_bound"] /= max(1, tally["episodes"] - tally["infeasible"])
        self._tally = dict.fromkeys(self._tally, 0)
        tally["requested_shards"] = self.source.num_requested - self._requested
        self._requested = self.source.num_requested
        return tally

    def _next_tasks(
        self, env_ids: list[int], instances: Sequence[TaskInstance] | None = None
    ) -> Sequence[TaskInstance]:
        """Resets the state of these environments; returns their tasks, by default sampled ones."""
        count = -(-len(env_ids) // self._group_size)
        tasks = self.np_random.integers(2**62, size=count)
        if instances is None:
            sampled = self._sample(count)
            instances = [sampled[n // self._group_size] for n in range(len(env_ids))]
        self._tasks[env_ids] = np.repeat(tasks, self._group_size)[: len(env_ids)]
        self._return[env_ids] = 0
        self._actions[env_ids] = 0
        self._idle[env_ids] = False
        return instances

    def _sample(self, count: int) -> list[TaskInstance]:
        catalog, rng = self.episodes.catalog, self.np_random
        if count >= min(_PREFETCH, self.num_envs // self._group_size):
            return self.task_sampler.sample(catalog, rng, count)
        if len(self._prefetched) < count:
            self._prefetched += self.task_sampler.sample(catalog, rng, _PREFETCH)
        sampled, self._prefetched = self._prefetched[:count], self._prefetched[count:]
        return sampled

    def _returns(self, over: torch.Tensor, info: Info) -> torch.Tensor:
        """Computes the returns of episodes that are over, [over]; updates tally and info."""
        episodes, failed = self.episodes, over & self.episodes.infeasible
        returns = self.reward.infeasible(episodes.rest_share[over])
        complete = (over & ~failed).nonzero()[:, 0]
        plan_ms = torch.zeros(self.num_envs)
        if len(complete):
            costs = self.source(episodes, complete.tolist())
            plan_ms[complete] = costs.plan_ms
            exists, lower_bound_ms = episodes.exists[complete], episodes.lower_bound_ms[complete]
            returns[~failed[over]] = self.reward.complete(costs, exists, lower_bound_ms)
        relative = plan_ms / episodes.lower_bound_ms
        self._tally["episodes"] += int(over.sum())
        self._tally["infeasible"] += int(failed.sum())
        self._tally["step_over_bound"] += float(relative[complete].sum())
        found = {
            "plan_ms": plan_ms,
            "lower_bound_ms": episodes.lower_bound_ms,
            "infeasible": failed,
        }
        for name, values in found.items():
            info |= {name: values.numpy().copy(), f"_{name}": over.numpy().copy()}
        return returns

    def _observe(self) -> Floats:
        return np.asarray(self.layout.observe(self.episodes).numpy())
