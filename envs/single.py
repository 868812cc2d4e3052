"""`Sharding-v0`: the game as a Gymnasium environment."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from autoshard.cost_model import load_model
from autoshard.envs.catalog import TableCatalog, TaskInstance
from autoshard.envs.observation import Floats
from autoshard.envs.rewards import CostSource, Reward
from autoshard.envs.task_sampling import TaskSampler
from autoshard.envs.vector import ShardingVectorEnv
from autoshard.envs.viewer import as_picture, as_text
from autoshard.workload import load_tables
from autoshard.workload.parts import tables_by_part


def default_catalog() -> TableCatalog:
    """Synthetic tables that the shipped cost model may learn from."""
    tables = load_tables("synthetic:200:1:small")
    return TableCatalog.of_tables(
        load_model("cpu"), tables_by_part(tables)["train"], 1024, split=True
    )


class ShardingEnv(gym.Env[Floats, np.int64]):
    """Place embedding tables on devices, one by one or in halves, so that a step is fast.

    ## Description
    A task is a set of tables, devices with their memory, a batch size, and what a plan is to have
    little of. Tables come in descending order of what they are predicted to cost alone; each is
    placed on a device, or halved by its columns: then both halves come back into the order. What a
    device costs is not the sum of its tables' costs.

    ## Action Space
    `Discrete(max_devices + 1)`: the device of the current unit, or, as the last one, to halve it.
    `info["action_mask"]` tells which devices exist and have memory for it, and whether it may be
    halved; so do the parts `allowed` and `halving` of the observation.

    ## Observation Space
    `Box((size,), float32)`, named parts in one vector: `env.layout.split(observation)` gives
    `table`, `devices`, `exists`, `allowed`, `halving`, `rest`, `objective` and `progress` (see
    `envs.observation.Layout`). Everything is relative to the task's own scale.

    ## Reward
    By default `Dense(NegativeStep())`: in sum minus what a step takes over what it could at best
    (the deal's `objective`); an action pays how far it raised that. Costs come from the
    cost model (`EstimatedRewards`), the benchmark pool (`MeasuredRewards`) or both
    (`MixedRewards`).

    ## Starting State
    All devices are empty; the task sampler has drawn a task. `reset(options={"instance":
    TaskInstance(...)})` starts a given one.

    ## Episode End
    When all units are placed, or at a dead end: no device has memory for the current one, which
    cannot be halved, or it was placed where the mask forbids. A dead end costs more than any
    sensible plan, and the more the more units are left.

    ## Information
    `action_mask`; at the end `plan_ms`, `bound_ms` and `dead_end`.

    ## Arguments
    `deck` (tables and cost model; by default synthetic ones and the shipped model), `generator`,
    `reward`, `source`, `max_devices`, `halvings`, `render_mode` (`ansi` or `rgb_array`).

    ## References
    AutoShard (KDD 2022), DreamShard (NeurIPS 2022).

    ## Version History
    v0: first.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["ansi", "rgb_array"],
        "render_fps": 4,
    }

    def __init__(
        self,
        catalog: TableCatalog | None = None,
        task_sampler: TaskSampler | None = None,
        reward: Reward | None = None,
        source: CostSource | None = None,
        max_devices: int | None = None,
        max_splits: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        catalog = catalog or default_catalog()
        self._vector = ShardingVectorEnv(
            catalog, 1, task_sampler, reward, source, max_devices, max_splits
        )
        self.layout = self._vector.layout
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """The next task, or the one in `options["instance"]`."""
        super().reset(seed=seed)
        instance: TaskInstance | None = (options or {}).get("instance")
        observations, _ = self._vector.reset(
            seed=seed, options=None if instance is None else {"instances": [instance]}
        )
        return observations[0], self._info({})

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        """Place or halve the current unit."""
        observations, rewards, ended, _, infos = self._vector.step(np.array([action]))
        return observations[0], float(rewards[0]), bool(ended[0]), False, self._info(infos)

    def render(self) -> str | npt.NDArray[np.uint8] | None:  # type: ignore[override]
        """Bars of the devices' costs, as text or as a picture."""
        if self.render_mode == "ansi":
            return as_text(self._vector.episodes)
        if self.render_mode == "rgb_array":
            return as_picture(self._vector.episodes)
        return None

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Returns which actions are allowed: [max_devices + 1].

        MaskablePPO of sb3-contrib asks environments for it by this name.
        """
        episodes = self._vector.episodes
        return np.asarray(torch.cat([episodes.allowed[0], episodes.splittable[:1]]).numpy())

    def _info(self, infos: dict[str, Any]) -> dict[str, Any]:
        told = {name: value[0] for name, value in infos.items() if not name.startswith("_")}
        return {**told, "action_mask": self.action_masks().astype(np.int8)}


def make_vector(
    num_envs: int, catalog: TableCatalog | None = None, **arguments: Any
) -> ShardingVectorEnv:
    """Makes the vector environment with the arguments of the single one, as Gymnasium calls it."""
    return ShardingVectorEnv(catalog or default_catalog(), num_envs, **arguments)
