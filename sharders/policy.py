"""`PolicySharder`: plans by a trained policy, alone or followed by local search."""

import math
import time
from collections.abc import Callable, Sequence

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.step_prediction import Placed, StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.local_search import LocalSearch
from autoshard.sharders.option_sets import OptionSets, Start
from autoshard.sharders.policy_files import Policy
from autoshard.sharders.rollouts import PolicyRollouts, Rollout
from autoshard.sharders.table_options import TableOptions
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.options import Sharded
from autoshard.workload.packing import pack

_CANDIDATES = 4  # plans of the usual rollouts that are compared
_WIDE_CANDIDATES = 8  # plans of further rollouts, beside those
_STARTS = 3  # plans of these from which a search may start, beside the greedy plan
# After so many rollouts, restarts of the search gain 0.05 % and take a quarter of the time more.
# The policy was trained on equal devices: where they differ, restarts gain 1 to 4 %.
_MIXED_KICKS = 24


class PolicySharder:
    """Places and splits tables by a policy, optionally followed by local search.

    Args:
        policy: Trained policy.
        oracle: Predicts costs of plans.
        search: Whether to run more rollouts, improve the best plans by local search, and choose by
            the expected step time over scenarios.
        seed: Seed of the search.
        seconds: Time of planning; by default the search stops by itself. The policy's rollouts
            are not interrupted.
        clock: Returns the time in seconds.
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
        self._search = LocalSearch(oracle, kicks=0, seed=seed, clock=clock) if search else None
        self._mixed_search = LocalSearch(oracle, kicks=_MIXED_KICKS, seed=seed, clock=clock)
        self._rollouts = PolicyRollouts(policy.network, oracle)
        self._seconds = seconds
        self._clock = clock

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError, which says what is missing, if none is found."""
        self._oracle.check(task)
        self._policy.check(len(task.devices))
        until = math.inf if self._seconds is None else self._clock() + self._seconds
        sets = OptionSets(self._oracle, task)
        options, starts, found = sets.options, sets.starts(), list[Sharded]()
        for start in starts[:1] + [s for s in starts[1:] if s.options == options.required]:
            own = [*start.greedy, *self._rollout_plans(start, options)]
            found += own
            if own and self._search is not None and self._clock() < until:
                found += self._improved(task, own, options, until)
        if not found:  # memory is so tight that neither greedy plans nor rollouts are feasible
            found = self._tight(task, options)
        plans = [sharded.plan(task) for sharded in found]
        if self._search is None:  # by the mean scenario, which is fast
            return min(plans, key=lambda plan: self._oracle.step_ms(plan, task))
        return min(plans, key=StepPredictor(self._oracle, task).expected_of)

    def _tight(self, task: ShardingTask, options: TableOptions) -> list[Sharded]:
        """Returns plans where no greedy plan fits; PlanError if there is none."""
        split, lack = self._policy.network.shape.halves, None
        for some in (options.required, *options.within_memory()):
            try:
                rest = options.columns_task(some)
                plans = self._rollout_plans(Start(some, rest, (), math.inf), options)
                plans = plans or [options.of_columns(pack(rest, split), some)]
            except PlanError as error:
                lack = lack or error
                continue
            search = LocalSearch(self._oracle, kicks=0, split=split)
            return [*plans, *search.improve(task, plans[: _STARTS + 1], options=options)]
        assert lack is not None
        raise lack

    def _improved(
        self, task: ShardingTask, found: Sequence[Sharded], options: TableOptions, until: float
    ) -> list[Sharded]:
        """Returns the plans of the local search."""
        search = self._mixed_search if task.hardware else self._search
        assert search is not None
        seconds = None if until == math.inf else max(0.0, until - self._clock())
        return search.improve(task, found[: _STARTS + 1], seconds, options)

    def _rollout_plans(self, start: Start, options: TableOptions) -> list[Sharded]:
        """Returns the policy's plans, the best first; more of them before a search."""
        task = start.task
        if not task.tables:
            return []
        size = len(task.tables), len(task.devices)
        usual, wide = self._rollouts.configs(*size), self._search is not None
        configs = self._rollouts.configs(*size, wide=True) if wide else usual
        rollouts = self._rollouts.run(task, configs, coarse=wide)
        own = _distinct([rollout for rollout in rollouts if rollout.config < len(usual)])[
            :_CANDIDATES
        ]
        best = own
        if wide:
            best = _distinct(rollouts)[:_WIDE_CANDIDATES]
            best += [placed for placed in own if placed not in best]
        return [options.of_columns(placed, start.options) for placed in best]


def _distinct(rollouts: Sequence[Rollout]) -> list[Placed]:
    """Returns the plans of rollouts, the best first, and only one for each step time."""
    plans: dict[str, Placed] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.plan_ms):
        plans.setdefault(f"{rollout.plan_ms:.5g}", rollout.placed)
    return list(plans.values())
