"""`PolicySharder`: a trained policy as a sharder, alone or with all that improves its plans."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.step_prediction import Placed, StepPredictor
from autoshard.cost_model.training import one_thread
from autoshard.sharders.cost_greedy import FusedGreedySharder
from autoshard.sharders.local_search import LocalSearch
from autoshard.sharders.policy_files import Policy
from autoshard.sharders.rollouts import PolicyRollouts, Rollout
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.packing import pack

_QUICK = 4  # plans of the usual games that are held against each other
_BEST = 8  # plans of more games, beside those
_SEARCHED = 3  # of them: where a search may start, beside the greedy's plan


class PolicySharder:
    """Places tables by a policy, and splits them where that pays; if asked, searches from there.

    Args:
        policy: what was trained.
        oracle: prices plans.
        search: Play more games, improve the best plans by a local search, and choose by what is
            expected in scenarios.
        seed: of the search.
        seconds: that a search goes on until, if given. The policy's plans come first, however long
            that takes.
        clock: seconds.
    """

    def __init__(
        self,
        policy: Policy,
        oracle: EstimatedCosts,
        search: bool = False,
        seed: int = 0,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._oracle = oracle
        # From so many games a search wins 0.05 % by kicks, and takes a quarter longer.
        self._search = LocalSearch(oracle, kicks=0, seed=seed, clock=clock) if search else None
        self._rollouts = PolicyRollouts(policy.network, oracle)
        self._seconds = seconds
        self._clock = clock

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError says what is missing where none is found."""
        self._oracle.check(task)
        self._policy.check(len(task.devices))
        until = math.inf if self._seconds is None else self._clock() + self._seconds
        found = self._played(task)
        if not found:  # memory is so tight that no episode placed everything
            split = self._policy.network.shape.halves
            packed = pack(task, split)
            search = LocalSearch(self._oracle, kicks=0, split=split)
            found = [packed, *search.improve(task, [packed])]
        if self._search is None:  # quick: by the mean of what is not known
            plans = [ShardingPlan.of_pieces(task, placed) for placed in found]
            return min(plans, key=lambda plan: self._oracle.step_ms(plan, task))
        if self._clock() < until:
            found += self._improved(self._search, task, found, until)
        return StepPredictor(self._oracle, task).best_plan(found)

    def _improved(
        self, search: LocalSearch, task: ShardingTask, found: Sequence[Placed], until: float
    ) -> list[Placed]:
        """What the greedy by cost and the search add to what was found."""
        more: list[Placed] = []
        with suppress(PlanError):  # without a plan it adds none
            more.append(FusedGreedySharder(self._oracle).shard(task).placed(task))
        left = None if until == math.inf else max(0.0, until - self._clock())
        return more + search.improve(task, [*more, *found[:_SEARCHED]], left)

    def _played(self, task: ShardingTask) -> list[Placed]:
        """The policy's plans, the best first: of its usual games, and before a search of more."""
        size = len(task.tables), len(task.devices)
        usual, wide = self._rollouts.configs(*size), self._search is not None
        configs = self._rollouts.configs(*size, wide=True) if wide else usual
        played = self._rollouts.play(task, configs)
        own = _different([rollout for rollout in played if rollout.config < len(usual)])[:_QUICK]
        if not wide:
            return own
        best = _different(played)[:_BEST]
        return best + [placed for placed in own if placed not in best]


def _different(played: Sequence[Rollout]) -> list[Placed]:
    """The plans of games, the best first. Of those that take as long, which are the same or as
    good, one.
    """
    ranked = sorted(played, key=lambda episodes: episodes.plan_ms)
    plans: dict[str, Placed] = {}
    for episodes in ranked:
        plans.setdefault(f"{episodes.plan_ms:.5g}", episodes.placed)
    return list(plans.values())
