"""`Sharding-v0`: the game as a Gymnasium environment."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from autoshard.cost_model import load_model
from autoshard.envs.deck import Deal, Deck
from autoshard.envs.generators import Generator
from autoshard.envs.observation import Floats
from autoshard.envs.rewards import CostSource, Reward
from autoshard.envs.vector import ShardingVectorEnv
from autoshard.envs.viewer import as_picture, as_text
from autoshard.workload import load_tables
from autoshard.workload.parts import tables_by_part


def default_deck() -> Deck:
    """Synthetic tables that the shipped cost model may learn from."""
    tables = load_tables("synthetic:200:1:small")
    return Deck.of_tables(load_model("cpu"), tables_by_part(tables)["train"], batch_size=1024)


class ShardingEnv(gym.Env[Floats, np.int64]):
    """Place embedding tables on devices, one by one, so that the slowest device is fast.

    ## Description
    A task is a set of tables, devices with their memory, and a batch size. Tables come in
    descending order of what they are predicted to cost alone; each is placed whole on a device.
    What a device costs is not the sum of its tables' costs.

    ## Action Space
    `Discrete(max_devices)`: the device of the current table. `info["action_mask"]`, also the part
    `allowed` of the observation, tells which devices exist and have memory for it.

    ## Observation Space
    `Box((size,), float32)`, named parts in one vector: `env.layout.split(observation)` gives
    `table`, `devices`, `exists`, `allowed`, `rest` and `progress` (see
    `envs.observation.Layout`). Everything is relative to the task's own scale.

    ## Reward
    By default `Dense(NegativeMaximum())`: in sum minus the slowest device's cost over what it
    could be at best; a step pays how far it raised the predicted maximum. Costs come from the
    cost model (`EstimatedRewards`), the benchmark pool (`MeasuredRewards`) or both
    (`MixedRewards`).

    ## Starting State
    All devices are empty; the generator has dealt a task. `reset(options={"deal": Deal(...)})`
    plays a given one.

    ## Episode End
    When all tables are placed, or at a dead end: no device has memory for the current table, or
    it was placed where the mask forbids. A dead end costs more than any sensible plan, and the
    more the more tables are left.

    ## Information
    `action_mask`; at the end `max_ms`, `bound_ms` and `dead_end`.

    ## Arguments
    `deck` (tables and cost model; by default synthetic ones and the shipped model), `generator`,
    `reward`, `source`, `max_devices`, `render_mode` (`ansi` or `rgb_array`).

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
        deck: Deck | None = None,
        generator: Generator | None = None,
        reward: Reward | None = None,
        source: CostSource | None = None,
        max_devices: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        deck = deck or default_deck()
        self._seats = ShardingVectorEnv(deck, 1, generator, reward, source, max_devices)
        self.layout = self._seats.layout
        self.observation_space = self._seats.single_observation_space
        self.action_space = self._seats.single_action_space
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """The next task, or the one in `options["deal"]`."""
        super().reset(seed=seed)
        deal: Deal | None = (options or {}).get("deal")
        observations, _ = self._seats.reset(
            seed=seed, options=None if deal is None else {"deals": [deal]}
        )
        return observations[0], self._info({})

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        """Place the current table."""
        observations, rewards, ended, _, infos = self._seats.step(np.array([action]))
        return observations[0], float(rewards[0]), bool(ended[0]), False, self._info(infos)

    def render(self) -> str | npt.NDArray[np.uint8] | None:  # type: ignore[override]
        """Bars of the devices' costs, as text or as a picture."""
        if self.render_mode == "ansi":
            return as_text(self._seats.game)
        if self.render_mode == "rgb_array":
            return as_picture(self._seats.game)
        return None

    def _info(self, infos: dict[str, Any]) -> dict[str, Any]:
        told = {name: value[0] for name, value in infos.items() if not name.startswith("_")}
        return {**told, "action_mask": self._seats.game.allowed[0].numpy().astype(np.int8)}
