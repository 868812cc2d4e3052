"""`Sharding-v0`: placing embedding tables on devices as a Gymnasium environment."""

from collections.abc import Collection
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from autoshard.cost_model import load_model
from autoshard.envs.catalog import TableCatalog, TaskInstance
from autoshard.envs.observation import Floats
from autoshard.envs.options import OPTION_KINDS
from autoshard.envs.rewards import CostSource, Reward
from autoshard.envs.task_sampling import TaskSampler
from autoshard.envs.vector import ShardingVectorEnv
from autoshard.envs.viewer import as_picture, as_text
from autoshard.workload import load_tables
from autoshard.workload.tables.parts import tables_by_part


def default_catalog() -> TableCatalog:
    """Returns a catalog of synthetic tables from the training part of the shipped cost model."""
    tables = tables_by_part(load_tables("synthetic:200:1:small"))["train"]
    return TableCatalog.of_tables(load_model("cpu"), tables, 1024, split=True)


class ShardingEnv(gym.Env[Floats, np.int64]):
    """Places embedding tables on devices, by options of sharding, to minimise the step time.

    ## Description
    A task consists of tables, devices with their memory, a batch size and an objective. An episode
    places the tables of one task, in descending order of their predicted cost. Each is assigned to
    a device, or given another option: it is split by columns, and both halves then take their
    places in the order; its blocks of rows go onto all devices, or those of one node, at once; each
    device gets a copy of it, or of its most used rows; or it is kept in host memory, with a cache.
    Tables on a device run in one fused operator, so their costs do not simply add up.

    ## Action Space
    `Discrete(max_devices + 6)`, int64. Action `n < max_devices` places the current unit on device
    `n`; action `max_devices + k` gives it the option `envs.options.OPTION_KINDS[k]`: `split`,
    `row_wise`, `table_row_wise` (on the node where the step rises least), `data_parallel`,
    `hot_rows`, `host_memory`. `info["action_mask"]`, int8 of shape `(max_devices + 6,)`, is 1 for
    actions that are allowed: devices that exist and have memory for the unit, and options that the
    cost model prices, that may help, and that leave memory for the other units.

    ## Observation Space
    `Box(-1, 3.4e38, (size,), float32)`, relative to the scale of the task. The vector consists of
    named parts; `env.layout.split(observation)` returns views of them:

    | part | shape | content |
    |---|---|---|
    | `table` | `(15,)` | current unit: predicted work, cost alone, its uncertainty, memory |
    | `devices` | `(max_devices, 28)` | each device: work, costs now and with the unit, memory |
    | `exists` | `(max_devices,)` | 1 for devices of the task, 0 for padding |
    | `allowed` | `(max_devices,)` | 1 for devices that may take the unit |
    | `options` | `(6, 9)` | each option: 1 if it is allowed; what it would do to the step |
    | `rest` | `(14,)` | units that are not placed: work, cost, memory |
    | `objective` | `(5,)` | stages that count, time of the partial plan in each stage |
    | `progress` | `(4,)` | share of units placed, log numbers, additional cost by splits |

    `envs.observation` lists the features of each part.

    ## Reward
    By default `Dense(NegativeStep())`. The return is the negative step time, by the objective of
    the task, over its lower bound: -1 is ideal. Each action is rewarded by the negative rise of
    this ratio. An infeasible episode returns -2 to -4, the lower the more units are left. Step
    times come from the cost model (`EstimatedCostSource`), from measurements of the benchmark pool
    (`MeasuredCostSource`), or both (`MixedCostSource`).

    ## Starting State
    All devices are empty. The task is drawn by the task sampler, or given by
    `reset(options={"instance": TaskInstance(...)})`.

    ## Episode End
    The episode terminates when all units are placed, or when it is infeasible: no action is allowed
    for the current unit, or the action was not allowed. It is never truncated.

    ## Information
    `action_mask` after each reset and step. At the end also `plan_ms`, the step time (0 if
    infeasible), `lower_bound_ms`, its estimated lower bound, and `infeasible`.

    ## Arguments
    ```python
    env = gymnasium.make("Sharding-v0", task_sampler=RandomTaskSampler((20, 60), (2, 8)))
    observation, info = env.reset(seed=0)
    terminated = False
    while not terminated:
        action = env.action_space.sample(mask=info["action_mask"])
        observation, reward, terminated, truncated, info = env.step(action)
    ```

    - `catalog`: tables and cost model; by default synthetic tables and the shipped cost model.
    - `task_sampler`: distribution of tasks; by default 60 tables on 4 devices.
    - `reward`: a `Reward`, see above.
    - `source`: a `CostSource`; by default `EstimatedCostSource()`.
    - `max_devices`: devices in observations and actions; by default the task sampler's maximum.
    - `max_splits`: maximum number of splits; by default the maximum number of tables.
    - `kinds`: kinds of options that tables may take beside splits; by default all.
    - `render_mode`: `ansi` or `rgb_array`.

    ## References
    AutoShard (Zha et al., KDD 2022), DreamShard (Zha et al., NeurIPS 2022).

    ## Version History
    v0: initial version.
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
        kinds: Collection[str] = OPTION_KINDS,
        render_mode: str | None = None,
    ) -> None:
        catalog = catalog or default_catalog()
        self._vector = ShardingVectorEnv(
            catalog, 1, task_sampler, reward, source, max_devices, max_splits, kinds=kinds
        )
        self.layout = self._vector.layout
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """Starts an episode of a sampled task, or of `options["instance"]`."""
        super().reset(seed=seed)
        instance: TaskInstance | None = (options or {}).get("instance")
        observations, _ = self._vector.reset(
            seed=seed, options=None if instance is None else {"instances": [instance]}
        )
        return observations[0], self._info({})

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        """Places the current unit, or gives it an option."""
        observations, rewards, ended, _, infos = self._vector.step(np.array([action]))
        return observations[0], float(rewards[0]), bool(ended[0]), False, self._info(infos)

    def render(self) -> str | npt.NDArray[np.uint8] | None:  # type: ignore[override]
        """Returns bars of the devices' costs, as text or as an image; None without render mode."""
        if self.render_mode == "ansi":
            return as_text(self._vector.episodes)
        if self.render_mode == "rgb_array":
            return as_picture(self._vector.episodes)
        return None

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Returns the mask of allowed actions, [max_devices + 6], as MaskablePPO requires it."""
        return np.asarray(self._vector.episodes.action_masks[0].numpy())

    def _info(self, infos: dict[str, Any]) -> dict[str, Any]:
        found = {name: value[0] for name, value in infos.items() if not name.startswith("_")}
        return {**found, "action_mask": self.action_masks().astype(np.int8)}


def make_vector(
    num_envs: int, catalog: TableCatalog | None = None, **arguments: Any
) -> ShardingVectorEnv:
    """Returns the vector environment, for `gymnasium.make_vec`."""
    return ShardingVectorEnv(catalog or default_catalog(), num_envs, **arguments)
