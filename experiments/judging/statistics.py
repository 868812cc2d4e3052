"""What noisy costs of shards tell of plans: what steps take, ratios of them, and how sure.

The maximum of noisy values reads high: of four equal devices by 1.03 standard errors. Here devices
of a plan are taken to lie around a mean of their own, with a spread that is what their costs show
beyond noise; the plans of one sharder tell together which spreads are likely. Each cost is drawn
towards that mean as far as its noise, against that spread, advises, and what a step takes is the
mean over many scenarios: draws of all costs of a task, each shard one, whatever plans hold it. What
is forward of a cost is known better than the cost: noise of a visit hits both directions alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from autoshard.benchmark.statistics import pooled_variance
from autoshard.workload import Objective
from autoshard.workload.step_price import stages_of_phases

Floats = npt.NDArray[np.float64]
Plan = tuple[str, ...]  # the digest of each device's shard; devices without tables left out
Plans = Mapping[str, Sequence[Plan | None]]  # of each sharder for each task; None: it has none

SCENARIOS = 1000
_SPREADS = 40  # between devices, that are told apart
_LEAST_SPREAD = 0.05  # of the noise: as good as none
_MOST_SPREAD = 2.0  # of the mean of the devices
_ROUNDS = 50  # until it is known which spreads are likely: more change nothing
_LEVEL = 0.95
_BATCHES_PRIOR = 4.0  # costs that the first guess counts for


@dataclass(frozen=True)
class Known:
    """What measuring says of a shard: milliseconds, their standard error, and the share of them
    that is forward.
    """

    mean_ms: float
    error_ms: float
    forward: float = 0.5


class Pricing(NamedTuple):
    """How plans of a task are priced: by its objective, and by what the all-to-alls of each plan
    take together, which is the same in all scenarios.
    """

    objective: Objective
    exchange_ms: Mapping[Plan, float]


@dataclass(frozen=True)
class Batches:
    """A shard with several index batches: of each the mean, its relative error, and its visits. And
    the share of the mean that is forward.
    """

    means_ms: Floats
    errors: Floats
    visits: Floats
    forward: float = 0.5

    def known(self, spread: float) -> Known:
        """The mean over all batches that could be drawn, whose costs differ by that share."""
        mean = float(self.means_ms.mean())
        return Known(mean, mean * self._error(self.errors, spread), self.forward)

    def gain(self, spread: float, most: int) -> float:
        """By how much one more visit would lower the variance of the mean, in square milliseconds.

        It goes to a batch of its own as long as there are fewer than `most`.
        """
        if len(self.visits) < most:
            # What a first visit of a batch is known to: as the visits so far have been.
            single = math.sqrt(float(np.mean(self.errors**2 * self.visits)))
            after = np.append(self.errors, single)
        else:
            least = int(self.visits.argmin())
            after = self.errors.copy()
            after[least] *= math.sqrt(self.visits[least] / (self.visits[least] + 1))
        now, then = self._error(self.errors, spread), self._error(after, spread)
        return float(self.means_ms.mean()) ** 2 * max(0.0, now**2 - then**2)

    @staticmethod
    def _error(errors: Floats, spread: float) -> float:
        count = len(errors)
        return math.sqrt(spread**2 * count + float((errors**2).sum())) / count


def spread_of_batches(shards: Sequence[Batches]) -> float:
    """The deviation of a shard's cost between index batches, relative and net of noise.

    One for all shards: a few batches of each tell little alone. Until enough have several batches
    it is taken to be as large as the noise of one.
    """
    noise = float(np.mean([np.mean(shard.errors**2) for shard in shards]))
    groups = [(shard.means_ms / shard.means_ms.mean()).tolist() for shard in shards]
    return math.sqrt(max(0.0, pooled_variance(groups, 2 * noise, _BATCHES_PRIOR) - noise))


class Scenarios:
    """What steps may take by plans, given what is known of their shards.

    Args:
        known: of each shard, by digest; plans that hold others are taken for none.
        plans: of each sharder for each task.
        pricing: of each task.
        count: of scenarios.
    """

    def __init__(
        self,
        known: Mapping[str, Known],
        plans: Plans,
        pricing: Sequence[Pricing],
        count: int = SCENARIOS,
        seed: int = 0,
    ) -> None:
        self._known, self._pricing = known, pricing
        self.plans = {
            name: [p if p is not None and all(d in known for d in p) else None for p in some]
            for name, some in plans.items()
        }
        spreads: list[dict[Plan, float]] = [{} for _ in next(iter(self.plans.values()), ())]
        for some in self.plans.values():
            for task, spread in _spreads(known, some).items():
                spreads[task].setdefault(some[task] or (), spread)
        rng = np.random.default_rng(seed)
        self._draws = [_draws(known, task, count, rng) for task in spreads]
        self.steps_ms = {
            name: np.stack([self._steps(task, plan) for task, plan in enumerate(some)], axis=1)
            for name, some in self.plans.items()
        }

    def slopes(self, name: str, task: int) -> dict[str, float]:
        """By how many ms a step is longer for each ms that a shard is, by digest; empty without a
        plan. Of each wait, the share of the shard that is in it, where it holds the wait up.
        """
        plan = self.plans[name][task]
        if plan is None:
            return {}
        leaders = self._waits(task, plan, self._columns(task, plan)).argmax(axis=1)
        shares = self._waits(task, plan, np.ones(len(plan)))
        found = dict.fromkeys(plan, 0.0)
        for number, digest in enumerate(plan):
            found[digest] += float((leaders == number).mean(axis=0) @ shares[number])
        return found

    def _steps(self, task: int, plan: Plan | None) -> Floats:
        if plan is None:
            return np.full(self._count(), np.nan)
        waits = self._waits(task, plan, self._columns(task, plan)).max(axis=1)
        return np.asarray(waits.sum(axis=1) + self._pricing[task].exchange_ms.get(plan, 0.0))

    def _waits(self, task: int, plan: Plan, costs: Floats) -> Floats:
        """Of shards that cost so much [..., devices], what they compute before each wait."""
        objective = self._pricing[task].objective
        forward = costs * np.array([self._known[digest].forward for digest in plan])
        phases = np.stack([forward, costs - forward], axis=-1)
        return stages_of_phases(Objective(objective.name), phases)

    def _columns(self, task: int, plan: Plan) -> Floats:
        places, draws = self._draws[task]
        return draws[:, [places[digest] for digest in plan]]

    def _count(self) -> int:
        return max((len(draws) for _, draws in self._draws), default=1)


def _spreads(known: Mapping[str, Known], plans: Sequence[Plan | None]) -> dict[int, float]:
    """Milliseconds by which the devices of a sharder's plans differ, by the number of the task.

    Which spreads are likely is learned from all of its plans, by the rule of Kiefer and Wolfowitz;
    each plan then adds what it shows itself.
    """
    found = {task: _values(known, plan) for task, plan in enumerate(plans) if plan is not None}
    if not found:
        return {}
    least = _LEAST_SPREAD * min(float(errors.min()) for _, errors in found.values())
    grid = np.geomspace(least, _MOST_SPREAD, _SPREADS)
    likelihood = np.stack([_likelihood(*values, grid) for values in found.values()])
    prior = np.full(_SPREADS, 1 / _SPREADS)
    for _ in range(_ROUNDS):
        posterior = likelihood * prior
        posterior /= posterior.sum(axis=1, keepdims=True)
        prior = (posterior.sum(axis=0) + 1 / _SPREADS) / (len(posterior) + 1)
    # A wait grows with the spread itself: its mean, not that of its square.
    expected = posterior @ grid
    return {
        task: share * float(np.mean([known[digest].mean_ms for digest in dict.fromkeys(plan)]))
        for task, share in zip(found, expected.tolist(), strict=True)
        if (plan := plans[task]) is not None
    }


def _values(known: Mapping[str, Known], plan: Plan) -> tuple[Floats, Floats]:
    """Costs of the different shards of a plan and their errors, as shares of the mean cost."""
    some = [known[digest] for digest in dict.fromkeys(plan)]
    means = np.array([shard.mean_ms for shard in some])
    errors = np.array([shard.error_ms for shard in some])
    return means / means.mean(), errors / means.mean()


def _likelihood(means: Floats, errors: Floats, grid: Floats) -> Floats:
    """Of each spread of the grid, whatever the mean of the devices is; the largest is 1."""
    variances = errors[:, None] ** 2 + grid**2
    total = (1 / variances).sum(axis=0)
    centre = (means[:, None] / variances).sum(axis=0) / total
    misfit = ((means[:, None] - centre) ** 2 / variances).sum(axis=0)
    log = -0.5 * (np.log(variances).sum(axis=0) + np.log(total) + misfit)
    return np.asarray(np.exp(log - log.max()))


def _draws(
    known: Mapping[str, Known], spreads: Mapping[Plan, float], count: int, rng: np.random.Generator
) -> tuple[dict[str, int], Floats]:
    """Costs of a task's shards, [scenarios, shards], and each shard's column.

    One normal distribution of all costs and of the mean of each plan, so that a shard of several
    plans is drawn towards all of their means.
    """
    digests = list(dict.fromkeys(digest for plan in spreads for digest in plan))
    places = {digest: number for number, digest in enumerate(digests)}
    different = {frozenset(plan): spread for plan, spread in spreads.items()}
    size = len(digests)
    precision = np.zeros((size + len(different),) * 2)
    pull = np.zeros(len(precision))
    for place, digest in enumerate(digests):
        weight = 1 / known[digest].error_ms ** 2
        precision[place, place] += weight
        pull[place] += weight * known[digest].mean_ms
    for centre, (plan, spread) in enumerate(different.items(), start=size):
        members = [places[digest] for digest in plan]
        weight = 1 / spread**2
        precision[members, members] += weight
        precision[centre, centre] += weight * len(members)
        precision[members, centre] -= weight
        precision[centre, members] -= weight
    factor = np.linalg.cholesky(precision)
    mean = np.linalg.solve(precision, pull)
    noise = np.linalg.solve(factor.T, rng.standard_normal((len(precision), count)))
    return places, np.asarray((mean[:, None] + noise).T[:, :size])


@dataclass(frozen=True)
class Ratio:
    """One sharder's mean step over another's, on the tasks that both have plans for.

    The variance of the ratio has two parts: of measuring, and of the choice of tasks. What tasks
    differ by in sum is seen from task to task; what measuring alone explains of it is not theirs.

    Args:
        value: of the means.
        measuring: its variance by noise of measuring.
        tasks: its variance by which tasks were drawn.
        count: of tasks.
    """

    value: float
    measuring: float
    tasks: float
    count: int

    @staticmethod
    def of(ours_ms: Floats, theirs_ms: Floats) -> "Ratio | None":
        """Of steps, [scenarios, tasks] with NaN without a plan; None without tasks."""
        both = ~(np.isnan(ours_ms[0]) | np.isnan(theirs_ms[0]))
        count = int(both.sum())
        if not count:
            return None
        ours, theirs = ours_ms[:, both], theirs_ms[:, both]
        measuring = float(np.var(ours.sum(axis=1) / theirs.sum(axis=1)))
        means, bar = ours.mean(axis=0), theirs.mean(axis=0)
        value = float(means.sum() / bar.sum())
        if count == 1:
            return Ratio(value, measuring, math.inf, 1)
        deviations = (means - value * bar) / bar.mean()
        total = float((deviations**2).sum()) / (count * (count - 1))
        return Ratio(value, measuring, max(0.0, total - measuring), count)

    @property
    def error(self) -> float:
        """Its standard error; infinite with one task, which says nothing of others."""
        return math.sqrt(self.measuring + self.tasks)

    @property
    def half_width(self) -> float:
        """Of the 95 % interval, by Student's distribution: few tasks say little of their spread."""
        return self.error * _quantile(self.count) if self.error else 0.0

    @property
    def measured_width(self) -> float:
        """Half the width that the interval would have if all tasks there are were these."""
        return math.sqrt(self.measuring) * _quantile(self.count) if self.measuring else 0.0

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return self.value - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        return self.value + self.half_width

    @property
    def below_one(self) -> float:
        """The probability that it is below 1: that ours are the better plans."""
        if self.count == 1:
            return 0.5
        if not self.error:
            return 0.5 * (1 + float(np.sign(1 - self.value)))
        return float(special.stdtr(self.count - 1, (1 - self.value) / self.error))

    def gain_of_a_task(self) -> float:
        """Share of the interval's square that one more task takes away."""
        if self.count == 1 or not self.error:
            return float(self.count == 1)
        narrower = _quantile(self.count + 1) ** 2 * self.count / (self.count + 1)
        return 1 - narrower / _quantile(self.count) ** 2

    def gain_of_measuring(self, variance: float) -> float:
        """Share of the interval's square that goes where measuring's variance falls by so much."""
        known = 0 < self.error < math.inf
        return min(variance, self.measuring) / self.error**2 if known else 0.0


def _quantile(count: int) -> float:
    """Half the width of the 95 % interval in standard errors, by so many tasks."""
    return float(special.stdtrit(count - 1, 0.5 + _LEVEL / 2)) if count > 1 else math.inf
