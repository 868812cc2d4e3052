"""`PolicySharder`: plans by a trained policy, alone or followed by local search."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.prediction import Placed, StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.policy.files import Policy
from autoshard.sharders.policy.groups import PIECES
from autoshard.sharders.policy.rollouts import PolicyRollouts, Rollout
from autoshard.sharders.search.local_search import LocalSearch, TaskSearch, step_of
from autoshard.sharders.search.option_sets import OptionSets, Start
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.packing.pack import check_total, pack
from autoshard.workload.packing.table_options import NO_RESOURCES, OptionResources, TableOptions
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.ways.option import Options

_CANDIDATES, _WIDE_CANDIDATES = 4, 8  # plans of rollouts, and of wide ones, that are compared
_STARTS = 3  # plans of a set of options from which a search may start
_MANY_TABLES = 2 * PIECES
_NEAR = 1.01  # step over the best: such plans may be better by expectation, or end better
_SAME = 0.002  # relative difference of expectations by which plans are as good
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
        resources: Ids of hot rows, hashed ids and host memory, as far as options may use them.
    """

    def __init__(
        self,
        policy: Policy,
        oracle: EstimatedCosts,
        search: bool = False,
        seed: int = 0,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        resources: OptionResources = NO_RESOURCES,
    ) -> None:
        self._policy = policy
        self._oracle = oracle
        self._search = LocalSearch(oracle, kicks=0, seed=seed, clock=clock) if search else None
        self._rollouts = PolicyRollouts(policy.network, oracle)
        self._seconds = seconds
        self._clock = clock
        self._resources = resources

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError, which says what is missing, if none is found."""
        self._oracle.check(task)
        self._policy.check(len(task.devices))
        until = None if self._seconds is None else self._clock() + self._seconds
        sets = OptionSets(self._oracle, task, self._resources)
        starts = sets.starts()
        if self._search is None:
            return self._of_policy(starts, sets)
        # Memory may be so tight that there is no greedy plan.
        greedy = _greedy_of(starts) or self._tight(sets.options)
        search = replace(self._search, kicks=_MIXED_KICKS) if task.hardware else self._search
        run = TaskSearch(search, task, until, sets.options)
        begun = run.descents(greedy) if len(greedy) > 1 else []
        near = [each for each in begun if each.step_ms <= _NEAR * begun[0].step_ms]
        chosen = [each.sharded().options for each in near] or [greedy[0].options]
        found = [plan for plan in greedy if plan.options in chosen]
        begun, first = begun[:1], [] if begun else found
        for of_policy in self._plans_by_sets(starts, chosen[0], sets):
            # Each by itself: a start that is worse than another's may end better.
            begun += run.descents(first + of_policy[:_STARTS])
            found, first = found + of_policy, []
        fastest = min(begun, key=step_of)
        near = [each for each in begun if each.step_ms <= _NEAR * fastest.step_ms]
        expected_of = cache(StepPredictor(self._oracle, task).expected_of)
        best = min(near, key=lambda each: expected_of(each.sharded().plan(task)))
        found += [each.sharded() for each in near]
        # Either may end as the better plan; mostly they are one.
        for each in dict.fromkeys((fastest, best)):
            found += run.results(each)
        choice = _Choice(self._oracle, task, sets.options.allowed(found), expected_of)
        for later in run.further(best):
            with suppress(PlanError):
                choice.offer(*sets.options.allowed([later]))
        return choice.plan

    def _of_policy(self, starts: Sequence[Start], sets: OptionSets) -> ShardingPlan:
        """Returns the best plan of the policy by the mean scenario, which is fast."""
        found = [plan for start in starts[:1] for plan in self._rollout_plans(start, sets)]
        found += self._plans_with_options(sets.options)
        if not found or len(starts) > 1:  # greedy plans are known
            found += _greedy_of(starts)
        return min(
            sets.options.allowed(found or self._tight(sets.options)),
            key=lambda plan: self._oracle.step_ms(plan, sets.task),
        )

    def _plans_by_sets(
        self, starts: Sequence[Start], chosen: Options, sets: OptionSets
    ) -> Iterator[list[Sharded]]:
        """Yields the policy's plans by the set that a descent led to, by that of the best greedy
        plan, if there are few tables, and those in which the policy gives options.
        """
        worth = [chosen]
        if _gives_options(sets.options):
            worth += [start.options for start in starts[:1]]
        for start in starts:
            if start.options in worth:
                yield self._rollout_plans(start, sets)
        yield self._plans_with_options(sets.options)

    def _tight(self, options: TableOptions) -> list[Sharded]:
        """Returns plans where no greedy plan fits; PlanError if there is none."""
        split, lack = self._policy.network.shape.splits, None
        for some in (options.required, *options.within_memory()):
            try:
                rest = options.columns_task(some)
                check_total(rest, [table.whole() for table in rest.tables], split)
                found = self._rollouts_of(rest, self._search is not None) or [pack(rest, split)]
                return [Sharded.of_columns(options.task, placed, some) for placed in found]
            except PlanError as error:
                lack = lack or error
        assert lack is not None
        raise lack

    def _rollout_plans(self, start: Start, sets: OptionSets) -> list[Sharded]:
        """Returns the policy's plans, the best first; more of them before a search."""
        # Where the policy also gives options, further rollouts without gain 0.01 % (98 tasks).
        wide = self._search is not None and not _gives_options(sets.options)
        found = self._rollouts_of(start.task, wide)
        return [Sharded.of_columns(sets.task, placed, start.options) for placed in found]

    def _plans_with_options(self, options: TableOptions) -> list[Sharded]:
        """Returns plans in which the policy gives tables their options; none where tables have no
        choice, or where there are so many that others plan in groups and bundles.
        """
        if not _gives_options(options):
            return []
        with suppress(PlanError):
            task = options.columns_task(options.required)
            if not task.tables:
                return []
            configs = self._rollouts.option_configs(len(task.devices))
            found = self._rollouts.run(task, configs, options=(options, options.required))
            best = _distinct(found)[:_CANDIDATES]
            return [Sharded.of_columns(options.task, each.placed, each.options) for each in best]
        return []

    def _rollouts_of(self, task: ShardingTask, wide: bool) -> list[Placed]:
        if not task.tables:
            return []
        configs = self._rollouts.configs(len(task.tables), len(task.devices), wide)
        rollouts = self._rollouts.run(task, configs, coarse=self._search is not None)
        best = _distinct(rollouts)[: _WIDE_CANDIDATES if wide else _CANDIDATES]
        return [rollout.placed for rollout in best]


class _Choice:
    """The best plan so far.

    Expectations are means over a sample of scenarios: where they differ by less than those of
    another sample would, the price in the mean scenario decides.

    Args:
        oracle: Predicts costs.
        task: Task of the plans.
        plans: Plans to begin with.
        expected_of: Returns the expected step of a plan over scenarios, in ms.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        task: ShardingTask,
        plans: Sequence[ShardingPlan],
        expected_of: Callable[[ShardingPlan], float],
    ) -> None:
        self._oracle, self._task, self._expected_of = oracle, task, expected_of
        expected = {plan: self._expected_of(plan) for plan in dict.fromkeys(plans)}
        limit_ms = (1 + _SAME) * min(expected.values())
        alike = [plan for plan, expected_ms in expected.items() if expected_ms <= limit_ms]
        self.plan = alike[0] if len(alike) == 1 else min(alike, key=self._step_ms)
        self._expected_ms = expected[self.plan]

    def offer(self, plan: ShardingPlan) -> None:
        """Takes a plan that is better by both, so that more time never gives a worse one."""
        expected_ms = self._expected_of(plan)
        if expected_ms <= self._expected_ms and self._step_ms(plan) < self._step_ms(self.plan):
            self.plan, self._expected_ms = plan, expected_ms

    def _step_ms(self, plan: ShardingPlan) -> float:
        return self._oracle.step_ms(plan, self._task)


def _gives_options(options: TableOptions) -> bool:
    """Returns whether the policy gives tables their options."""
    return options.any_choice and len(options.task.tables) < _MANY_TABLES


def _greedy_of(starts: Sequence[Start]) -> list[Sharded]:
    return [plan for start in starts for plan in start.greedy]


def _distinct(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns the rollouts, the best first, and only one for each step time."""
    found = dict[str, Rollout]()
    for rollout in sorted(rollouts, key=lambda rollout: rollout.plan_ms):
        found.setdefault(f"{rollout.plan_ms:.5g}", rollout)
    return list(found.values())
