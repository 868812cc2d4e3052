"""`PolicySharder`: a trained policy as a sharder, alone or with all that improves its plans."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.judging_plans import planned_ms
from autoshard.cost_model.outlook import Placed, TaskOutlook
from autoshard.cost_model.training import one_thread
from autoshard.sharders.cost_greedy import FusedGreedySharder
from autoshard.sharders.local_search import LocalSearch
from autoshard.sharders.player import Played, Player
from autoshard.sharders.policy_files import Policy
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.packing import pack

_BUDGET = 24_000  # tables times devices times games that are drawn: what takes about 50 ms
_BEST = 8  # plans drawn that are held against each other in scenarios
_SEARCHED = 3  # of them: the start of the search


class PolicySharder:
    """Places tables by a policy, in halves where that pays; if asked, draws more plans or searches.

    A search makes nothing better of plans that are drawn than of those that the policy thinks best.

    Args:
        policy: what was trained.
        oracle: prices plans.
        samples: plans to be drawn from the policy beside the greedy one, fewer if the task is
            large; the one that is expected to be the fastest counts.
        search: improve the best plan by a local search.
        seed: of what is drawn.
        seconds: for all of it, if given. The policy's own plan comes first, however long it takes;
            what is left is the search's, which makes more of a second than drawing plans does.
        clock: seconds.
    """

    def __init__(
        self,
        policy: Policy,
        oracle: EstimatedCosts,
        samples: int = 0,
        search: bool = False,
        seed: int = 0,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._oracle = oracle
        self._samples = samples
        self._search = LocalSearch(oracle, seed=seed) if search else None
        self._player = Player(policy.network, oracle)
        self._seed = seed
        self._seconds = seconds
        self._clock = clock

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError says what is missing where none is found."""
        self._oracle.check(task)
        self._policy.check(len(task.devices))
        until = None if self._seconds is None else self._clock() + self._seconds
        played = sorted(self._draw(task), key=lambda game: game.plan_ms)
        best = [*played[:_BEST], *(game for game in played[_BEST:] if not game.drawn)]
        found: list[Placed] = [game.placed for game in best]
        if not found:  # so tight that no game ended well
            found = [pack(task, split=self._policy.network.shape.halves)]
        left = None if until is None else until - self._clock()
        if self._search is not None and (left is None or left > 0):
            found += self._improved(task, found, left)
        if not self._samples and self._search is None:  # quick: by the mean of what is not known
            plans = [ShardingPlan.of_slices(task, placed) for placed in found]
            return min(plans, key=lambda plan: planned_ms(self._oracle, task, plan))
        return TaskOutlook(self._oracle, task).best_plan(found)

    def _improved(
        self, task: ShardingTask, found: Sequence[Placed], seconds: float | None
    ) -> list[Placed]:
        """What the greedy by cost and the search add to what was found."""
        assert self._search is not None
        more: list[Placed] = []
        with suppress(PlanError):  # without a plan it adds none
            more.append(FusedGreedySharder(self._oracle).shard(task).placed(task))
        return more + self._search.improve(task, [*more, *found[:_SEARCHED]], seconds)

    def _draw(self, task: ShardingTask) -> list[Played]:
        """As the policy thinks best, in all its styles, then others drawn from it."""
        rng = torch.Generator().manual_seed(self._seed)
        affordable = max(1, _BUDGET // (len(task.tables) * len(task.devices)))
        drawn = 0 if self._seconds is not None else min(self._samples, affordable)
        styles = self._player.styles(len(task.devices))
        played = self._player.play(task, styles, drawn, rng=rng)
        if all(game.drawn for game in played) and not task.rules:
            played = [*self._player.play(task, shielded=True), *played]
        return played
