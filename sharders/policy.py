"""`PolicySharder`: a trained policy as a sharder, alone or with all that improves its plans."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

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

_QUICK = 4  # plans of the usual games that are held against each other
_BEST = 8  # plans of more games, beside those
_SEARCHED = 3  # of them: where a search may start, beside the greedy's plan


class PolicySharder:
    """Places tables by a policy, in halves where that pays; if asked, plays more games, or searches
    from the best of them.

    Args:
        policy: what was trained.
        oracle: prices plans.
        wide: play more games, and choose by what is expected in scenarios.
        search: that as well, and improve the best plan by a local search.
        seed: of the search.
        seconds: that a search goes on until, if given. The policy's plans come first, however long
            that takes.
        clock: seconds.
    """

    def __init__(
        self,
        policy: Policy,
        oracle: EstimatedCosts,
        wide: bool = False,
        search: bool = False,
        seed: int = 0,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._oracle = oracle
        self._wide = wide or search
        # From so many games a search wins 0.05 % by kicks, and takes a quarter longer.
        self._search = LocalSearch(oracle, kicks=0, seed=seed, clock=clock) if search else None
        self._player = Player(policy.network, oracle)
        self._seconds = seconds
        self._clock = clock

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError says what is missing where none is found."""
        self._oracle.check(task)
        self._policy.check(len(task.devices))
        until = math.inf if self._seconds is None else self._clock() + self._seconds
        found = self._played(task)
        if not found:  # so tight that no game ended well
            found = [pack(task, split=self._policy.network.shape.halves)]
        if self._search is not None and self._clock() < until:
            found += self._improved(task, found, until)
        if not self._wide:  # quick: by the mean of what is not known
            plans = [ShardingPlan.of_slices(task, placed) for placed in found]
            return min(plans, key=lambda plan: planned_ms(self._oracle, task, plan))
        return TaskOutlook(self._oracle, task).best_plan(found)

    def _improved(self, task: ShardingTask, found: Sequence[Placed], until: float) -> list[Placed]:
        """What the greedy by cost and the search add to what was found."""
        assert self._search is not None
        more: list[Placed] = []
        with suppress(PlanError):  # without a plan it adds none
            more.append(FusedGreedySharder(self._oracle).shard(task).placed(task))
        left = None if until == math.inf else max(0.0, until - self._clock())
        return more + self._search.improve(task, [*more, *found[:_SEARCHED]], left)

    def _played(self, task: ShardingTask) -> list[Placed]:
        """What the policy plans, the best first: of its usual games, and of more where `wide`."""
        size = len(task.tables), len(task.devices)
        usual = self._player.ways(*size)
        ways = self._player.ways(*size, wide=True) if self._wide else usual
        played = self._player.play(task, ways)
        if not task.rules and all(game.way >= len(usual) for game in played):
            played += self._player.play(task, shielded=True)
        own = _different([game for game in played if game.way < len(usual)])[:_QUICK]
        if not self._wide:
            return own
        best = _different(played)[:_BEST]
        return best + [placed for placed in own if placed not in best]


def _different(played: Sequence[Played]) -> list[Placed]:
    """The plans of games, the best first. Of those that take as long, which are the same or as
    good, one.
    """
    ranked = sorted(played, key=lambda game: game.plan_ms)
    plans: dict[str, Placed] = {}
    for game in ranked:
        plans.setdefault(f"{game.plan_ms:.5g}", game.placed)
    return list(plans.values())
