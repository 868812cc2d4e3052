"""Local search by the cost model: moves, swaps and splits until none helps."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.prediction import StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.heuristics.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.sharders.search.plan_search import PlanSearch
from autoshard.sharders.search.simulated_annealing import Annealing
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.packing.table_options import TableOptions
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.plans.step_price import norm_power
from autoshard.workload.ways.option import ShardingOption, columns_task, tables_of_parts

# Power of the norm over devices in the mean scenario. Unlike the maximum, it also falls where
# devices that are not the slowest become even, which helps later moves.
_SOFT = 12.0
_KICKS = 16  # restarts in a round of those that time is left for
# Few pieces cost little time, and steps of one piece often leave them uneven.
_FEW, _KICKS_OF_FEW = 32, 8
_PROPOSALS = 20_000  # of annealing in the first round
_SHARP = 96.0  # power after that
_SCENARIOS = 16  # number of scenarios in the last descent
_SETS = 3  # sets of options from which there are steps downwards
_WORTH = 1.1  # relative to the start of the best one
_EVEN = 1.01  # step relative to that of even devices: norms closer to the maximum gain nothing


@dataclass(frozen=True)
class LocalSearch:
    """Iterated local search: first in the mean scenario, then over several scenarios.

    A long search exploits errors of the cost model, so there are few kicks, alternately random
    moves and a split. The scenarios then penalise plans that depend on uncertain costs.

    Args:
        oracle: Predicts costs.
        kicks: Number of restarts from a perturbation of the best plan.
        split: Whether tables may be split by columns.
        seed: Seed of kicks and scenarios.
        near: A plan in use and the bytes that may move away from it; by default none.
        clock: Returns the time in seconds.
    """

    oracle: EstimatedCosts
    kicks: int = 8
    split: bool = True
    seed: int = 0
    near: tuple[ShardingPlan, int] | None = None
    clock: Callable[[], float] = time.monotonic

    @one_thread()
    def improve(self, task: ShardingTask, starts: Sequence[Sharded]) -> list[Sharded]:
        """Improves the best of several plans, each table with its option.

        Args:
            task: Task to plan.
            starts: Valid plans.

        Returns:
            The best plan in the mean scenario, and the best plan over scenarios.
        """
        run = TaskSearch(self, task)
        return run.results(run.descents(starts)[0])


class TaskSearch:
    """The search for the plan of one task.

    Args:
        search: How to search.
        task: The task.
        until: When to stop, by the search's clock; by default it stops by itself.
        options: Options that tables may take; by default they keep theirs.
    """

    def __init__(
        self,
        search: LocalSearch,
        task: ShardingTask,
        until: float | None = None,
        options: TableOptions | None = None,
    ) -> None:
        self._search, self._task = search, task
        self._options = options if options is not None and options.any_choice else None
        self._until = math.inf if until is None else until
        self._masks, self._mean = RuleMasks(task), search.oracle.expectation()

    def descents(self, starts: Sequence[Sharded]) -> list[PlanSearch]:
        """Returns plans that steps downwards lead to from the best start by each of the most
        promising sets of options, the best first; none without starts.
        """
        of_sets: dict[frozenset[tuple[str, ShardingOption]], PlanSearch] = {}
        for start in starts:
            begun, options = self._from(start), frozenset(start.options.items())
            known = of_sets.get(options)
            if known is None or begun.objective() < known.objective():
                of_sets[options] = begun
        # Norms are further from the maximum the more even devices are, so they cannot tell sets.
        promising = sorted(of_sets.values(), key=step_of)[:_SETS]
        limit_ms = _WORTH * min((each.step_ms for each in promising[:1]), default=0.0)
        promising = [each for each in promising if each.step_ms <= limit_ms]
        return sorted(map(self._descended, promising), key=step_of)

    def results(self, best: PlanSearch) -> list[Sharded]:
        """Returns plans that a search from this one leads to: those that are best in the mean
        scenario, and the best over scenarios.
        """
        if self._options is not None:
            best.flip_options(self._options, self._search.split, self._time_is_up)
        rng, kicked = np.random.default_rng(self._search.seed), best
        few = len(best.sharded().placed) <= _FEW
        for number in range(max(self._search.kicks, _KICKS_OF_FEW if few else 0)):
            kicked = self._kicked(kicked, number, rng)
        # The norm that judges kicks is no maximum, so the plan before them may be the faster one.
        both = [best] if kicked is best else [best, kicked]
        return [plan for each in both for plan in self._candidates(each)]

    def further(self, best: PlanSearch) -> Iterator[Sharded]:
        """Yields more plans until the time is up; none without a time limit, or for one device.

        Rounds of kicks alternate with annealing, each of which takes twice as long as the last.
        """
        rng, tried = np.random.default_rng(self._search.seed + 1), count()
        if self._until == math.inf or len(self._task.devices) == 1:
            return
        for number in count():
            for _ in range(_KICKS):
                better = self._kicked(best, next(tried), rng)
                if better is not best:
                    best = better
                    yield from self._candidates(best)
            if self._time_is_up():
                return
            other = self._from(self._annealed(best.sharded(), number))
            yield other.sharded()
            other = self._descended(other)
            if other.objective() < best.objective():
                best = other
                yield from self._candidates(best)

    def _annealed(self, start: Sharded, number: int) -> Sharded:
        """Returns what annealing of columns leads to in a round."""
        search, columns = self._search, columns_task(self._task, start.options)
        if not columns.tables:
            return start
        seconds = self._until - search.clock()
        annealing = Annealing(
            search.oracle, seconds, _PROPOSALS * 2**number, search.seed + number, search.clock
        )
        placed = annealing.improve(columns, start.columns_placed(self._task))
        return Sharded.of_columns(self._task, placed, start.options)

    def _candidates(self, best: PlanSearch) -> list[Sharded]:
        """Returns plans that are the best in the mean scenario, and the best over scenarios."""
        return [*self._sharpened(best), self._over_scenarios(best)]

    def _time_is_up(self) -> bool:
        return self._search.clock() > self._until

    def _from(self, start: Sharded) -> PlanSearch:
        return PlanSearch(self._mean, self._task, _SOFT, start, self._search.near, self._masks)

    def _kicked(self, best: PlanSearch, number: int, rng: np.random.Generator) -> PlanSearch:
        """Returns the better one of a plan and what steps downwards from a kick lead to."""
        if self._time_is_up():
            return best
        other = self._from(best.sharded())
        # Every other kick splits a piece of the slowest device, which may help later moves.
        splits = self._search.split and number % 2
        if not (splits and other.split_costliest(number // 2)):
            other.kick(rng)
        other = self._descended(other)
        return min(best, other, key=PlanSearch.objective)

    def _sharpened(self, best: PlanSearch) -> list[Sharded]:
        """Returns the plan, and what steps downwards lead to by a norm closer to the maximum."""
        if best.step_ms < _EVEN * best.even_ms:
            return [best.sharded()]
        search = self._from(best.sharded())
        search.sharpen(_SHARP)
        search.descend(self._search.split, self._time_is_up)
        return [best.sharded(), search.sharded()]

    def _over_scenarios(self, best: PlanSearch) -> Sharded:
        """Returns what steps downwards lead to by the mean over scenarios."""
        oracle, task, start = self._search.oracle, self._task, best.sharded()
        scenarios = oracle.scenarios(task.tables, _SCENARIOS, self._search.seed)
        scenarios = scenarios.with_parts(tables_of_parts(task, start.options))
        power, near = norm_power(oracle.residuals.prior.rest), self._search.near
        last = PlanSearch(scenarios, task, power, start, near, self._masks)
        last.descend(self._search.split, self._time_is_up)
        return last.sharded()

    def _descended(self, search: PlanSearch) -> PlanSearch:
        """Returns the best plan that steps downwards lead to.

        Where the first split of a plan costs more than others, tables stay whole at first, and
        what comes of splits must be better than that.
        """
        if not self._search.split or search.first_split_ms == 0:
            search.descend(self._search.split, self._time_is_up, self._options)
            return search
        search.descend(False, self._time_is_up, self._options)
        splitting = self._from(search.sharded())
        splitting.descend(True, self._time_is_up, self._options)
        return min(search, splitting, key=PlanSearch.objective)


def step_of(search: PlanSearch) -> float:
    """Returns the step time of a plan."""
    return search.step_ms


class LocalSearchSharder:
    """Local search from the better plan of `cost` and `cost_fused`."""

    def __init__(self, oracle: EstimatedCosts, split: bool = True) -> None:
        self._starts: tuple[Sharder, ...] = (AloneGreedySharder(oracle), FusedGreedySharder(oracle))
        self._oracle = oracle
        self._search = LocalSearch(oracle, split=split)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if no device has memory for a table."""
        plans: list[ShardingPlan] = []
        for start in self._starts:
            try:
                plans.append(start.shard(task))
            except PlanError:
                if start is self._starts[-1] and not plans:
                    raise
        starts = [Sharded(plan.placed(task)) for plan in plans]
        plans += [found.plan(task) for found in self._search.improve(task, starts)]
        return min(plans, key=StepPredictor(self._oracle, task).expected_of)
