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
from autoshard.envs.deck import Deal, Deck
from autoshard.envs.game import ShardingGame
from autoshard.envs.generators import Generator, RandomDeals
from autoshard.envs.observation import Floats, Layout
from autoshard.envs.rewards import CostSource, Dense, EstimatedRewards, Reward

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
        deck: Deck,
        num_envs: int,
        generator: Generator | None = None,
        reward: Reward | None = None,
        source: CostSource | None = None,
        max_devices: int | None = None,
        halvings: int | None = None,
        rivals: int = 1,
    ) -> None:
        self.generator = generator or RandomDeals()
        self.reward = reward or Dense()
        self.source = source or EstimatedRewards()
        self.num_envs = num_envs
        devices = max_devices or self.generator.most_devices
        self.layout = Layout(devices)
        tables = self.generator.most_tables
        halvings = tables if halvings is None else halvings
        self.game = ShardingGame(deck, num_envs, tables, devices, halvings)
        box = gym.spaces.Box(-1.0, _MOST, (self.layout.size,), np.float32)
        self.single_observation_space, self.single_action_space = (
            box,
            gym.spaces.Discrete(devices + 1),
        )
        self.observation_space = gym.vector.utils.batch_space(box, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._rivals = rivals
        self._ended = torch.zeros(num_envs, dtype=torch.bool)
        self._waits = torch.zeros(num_envs, dtype=torch.bool)
        self._paid = torch.zeros(num_envs)
        self._played = torch.zeros(num_envs, dtype=torch.int64)
        self._tasks = np.zeros(num_envs, np.int64)
        self._tally = {"games": 0, "dead_ends": 0, "halvings": 0, "relative_max": 0.0}
        self._asked = 0
        self._ahead: list[Deal] = []  # drawn, and not dealt yet

    @one_thread()
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Info | None = None
    ) -> tuple[Floats, Info]:
        """New games on all seats; `options={"deals": [...]}` says which."""
        first = seed if seed is None or isinstance(seed, int) else seed[0]
        if first is not None or self._np_random is None:
            super().reset(seed=first)
            self._ahead.clear()
        seats = list(range(self.num_envs))
        self.game.deal(seats, self._dealt(seats, (options or {}).get("deals")))
        self._ended[:] = False
        return self._observe(), {}

    @one_thread()
    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[Floats, Floats, npt.NDArray[np.bool_], npt.NDArray[np.bool_], Info]:
        """Place or halve a piece on every seat whose game goes on."""
        game, playing = self.game, ~(self._ended | self._waits)
        before = self._worst()
        joining = self._ended.nonzero()[:, 0].tolist()
        deals = self._dealt(joining) if joining else ()
        game.place(torch.as_tensor(actions, dtype=torch.int64), playing, joining, deals)
        rewards = torch.where(playing, self.reward.along(before, self._worst()), 0.0)
        self._paid += rewards
        self._played += playing
        over = game.over & playing
        info: Info = {}
        if over.any():
            rewards[over] += self._settle(over, info) - self._paid[over]
        if self._rivals > 1:
            self._waits |= over
            over = self._waits.all().repeat(self.num_envs)
        self._ended = over
        ended = over.numpy().copy()
        if self._rivals > 1 and over.any():
            info |= {"task": self._tasks.copy(), "actions": self._played.numpy().copy()}
            info |= {"_task": ended, "_actions": ended}
        return self._observe(), rewards.numpy(), ended, np.zeros_like(ended), info

    def learn(self, model: CostModel) -> None:
        """Believe another cost model from now on."""
        self.game.learn(EstimatedCosts(model, self.game.deck.batch_size))

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

    def _dealt(self, seats: list[int], deals: Sequence[Deal] | None = None) -> Sequence[Deal]:
        """Who is to sit there next, by default whatever the generator deals."""
        drawn = -(-len(seats) // self._rivals)
        tasks = self.np_random.integers(2**62, size=drawn)
        if deals is None:
            each = self._drawn(drawn)
            deals = [deal for deal in each for _ in range(self._rivals)][: len(seats)]
        self._tasks[seats] = np.repeat(tasks, self._rivals)[: len(seats)]
        self._paid[seats] = 0
        self._played[seats] = 0
        self._waits[seats] = False
        return deals

    def _drawn(self, count: int) -> list[Deal]:
        """So many tasks of the generator."""
        deck, rng = self.game.deck, self.np_random
        if count >= min(_AHEAD, self.num_envs // self._rivals):  # all seats, or enough
            return self.generator.many(deck, rng, count)
        if len(self._ahead) < count:
            self._ahead += self.generator.many(deck, rng, _AHEAD)
        drawn, self._ahead = self._ahead[:count], self._ahead[count:]
        return drawn

    def _worst(self) -> torch.Tensor:
        return self.game.plan_ms / self.game.bound_ms

    def _settle(self, over: torch.Tensor, info: Info) -> torch.Tensor:
        """What the games that are over are worth: [over]."""
        game = self.game
        worth = self.reward.dead_end(game.left_share()[over])
        complete = (over & ~game.stuck).nonzero()[:, 0]
        plan_ms = torch.zeros(self.num_envs)
        if len(complete):
            costs = self.source(game, complete.tolist())
            plan_ms[complete] = costs.plan_ms
            told = (costs, game.exists[complete], game.bound_ms[complete])
            worth[~game.stuck[over]] = self.reward.complete(*told)
        relative = plan_ms / game.bound_ms
        self._tally["games"] += int(over.sum())
        self._tally["dead_ends"] += int((over & game.stuck).sum())
        self._tally["halvings"] += int((game.slices - 1)[over].sum())
        self._tally["relative_max"] += float(relative[complete].sum())
        info.update(
            plan_ms=plan_ms.numpy(),
            bound_ms=game.bound_ms.numpy().copy(),
            dead_end=(over & game.stuck).numpy(),
            _plan_ms=over.numpy().copy(),
            _bound_ms=over.numpy().copy(),
            _dead_end=over.numpy().copy(),
        )
        return worth

    def _observe(self) -> Floats:
        return np.asarray(self.layout.observe(self.game).numpy())
