"""The posterior of plans' step times, given noisy costs of shards, and ratios of sharders.

The maximum of noisy values reads high: of four equal devices by 1.03 standard errors. The devices
of a plan are therefore modelled as normal around a mean of their own. Their spread has an empirical
prior, learned from all plans of a sharder, so that each cost is shrunk towards the mean as far as
its noise advises. A step is the mean over many samples of all costs of a task; a shard has one cost
in a sample, whichever plans hold it. A bootstrap over tasks does neither, and its intervals are too
narrow for the few tasks of a comparison.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from autoshard.workload import Objective, ShardingPlan, ShardingTask
from autoshard.workload.step_price import StepPrice, stages_of_phases

if TYPE_CHECKING:  # it measures, and plans that are priced need nothing of that
    from autoshard.cost_model.repeated_measurements import KnownCost

Floats = npt.NDArray[np.float64]
Plan = tuple[str, ...]  # the digest of each device's shard; devices without tables left out
Plans = Mapping[str, Sequence[Plan | None]]  # of each sharder for each task; None: no plan

SAMPLES = 1000
_SPREADS = 40  # grid points for the spread of a plan's devices
_MIN_SPREAD = 0.05  # as a share of the noise: as good as none
_MAX_SPREAD = 2.0  # as a share of the devices' mean
_ITERATIONS = 50  # of expectation maximisation: more change nothing
_LEVEL = 0.95


def digests_of(task: ShardingTask, plan: ShardingPlan) -> Plan:
    """Returns the digest of the shard of each device that holds any table."""
    return tuple(shard.digest for shard in plan.shards(task) if shard is not None)


class Pricing(NamedTuple):
    """How plans of a task are priced.

    Args:
        objective: The task's objective.
        exchange_ms: Time of all all-to-alls by plan, which is the same in all samples.
    """

    objective: Objective
    exchange_ms: Mapping[Plan, float]

    @staticmethod
    def of(task: ShardingTask, plans: Sequence[ShardingPlan]) -> "Pricing":
        """Returns how these plans of the task are priced."""
        price, found = StepPrice.of_task(task), {}
        for plan in plans:
            columns = np.array(plan.columns(task), dtype=float)
            found[digests_of(task, plan)] = float(price.exchange_stage(columns).max())
        return Pricing(task.objective, found)


class StepPosterior:
    """Samples of what steps take by plans, given what is known of their shards.

    Args:
        known: Cost of each shard, by digest; plans with other shards count as no plan.
        plans: Plans of each sharder for each task.
        pricing: Pricing of each task.
        count: Number of samples.
        seed: Seed of the samples.

    Attributes:
        steps_ms: Steps by each sharder's plans, [samples, tasks]; NaN without a plan.
    """

    def __init__(
        self,
        known: "Mapping[str, KnownCost]",
        plans: Plans,
        pricing: Sequence[Pricing],
        count: int = SAMPLES,
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

    def _steps(self, task: int, plan: Plan | None) -> Floats:
        if plan is None:
            return np.full(max((len(draws) for _, draws in self._draws), default=1), np.nan)
        stages = self._stages(task, plan, self._columns(task, plan)).max(axis=1)
        return np.asarray(stages.sum(axis=1) + self._pricing[task].exchange_ms.get(plan, 0.0))

    def _stages(self, task: int, plan: Plan, costs: Floats) -> Floats:
        """Returns the compute of shards with these costs in each stage, [..., devices, stages]."""
        objective = self._pricing[task].objective
        forward = costs * np.array([self._known[digest].forward for digest in plan])
        phases = np.stack([forward, costs - forward], axis=-1)
        return stages_of_phases(Objective(objective.name), phases)

    def _columns(self, task: int, plan: Plan) -> Floats:
        places, draws = self._draws[task]
        return draws[:, [places[digest] for digest in plan]]


def _spreads(known: "Mapping[str, KnownCost]", plans: Sequence[Plan | None]) -> dict[int, float]:
    """Returns by how many ms the devices of a sharder's plans differ, by the number of the task.

    All of its plans together give the prior (Kiefer and Wolfowitz, by expectation maximisation);
    each plan adds its own likelihood.
    """
    found = {task: _values(known, plan) for task, plan in enumerate(plans) if plan is not None}
    if not found:
        return {}
    least = _MIN_SPREAD * min(float(errors.min()) for _, errors in found.values())
    grid = np.geomspace(least, _MAX_SPREAD, _SPREADS)
    likelihood = np.stack([_likelihood(*values, grid) for values in found.values()])
    prior = np.full(_SPREADS, 1 / _SPREADS)
    for _ in range(_ITERATIONS):
        posterior = likelihood * prior
        posterior /= posterior.sum(axis=1, keepdims=True)
        prior = (posterior.sum(axis=0) + 1 / _SPREADS) / (len(posterior) + 1)
    # A stage grows with the spread itself, so the mean is that of the spread, not of its square.
    expected = posterior @ grid
    return {
        task: share * float(np.mean([known[digest].mean_ms for digest in dict.fromkeys(plan)]))
        for task, share in zip(found, expected.tolist(), strict=True)
        if (plan := plans[task]) is not None
    }


def _values(known: "Mapping[str, KnownCost]", plan: Plan) -> tuple[Floats, Floats]:
    """Returns costs and errors of a plan's different shards, as shares of their mean cost."""
    some = [known[digest] for digest in dict.fromkeys(plan)]
    means = np.array([shard.mean_ms for shard in some])
    errors = np.array([shard.error_ms for shard in some])
    return means / means.mean(), errors / means.mean()


def _likelihood(means: Floats, errors: Floats, grid: Floats) -> Floats:
    """Returns the likelihood of each spread of the grid for an unknown mean; the largest is 1."""
    variances = errors[:, None] ** 2 + grid**2
    total = (1 / variances).sum(axis=0)
    centre = (means[:, None] / variances).sum(axis=0) / total
    misfit = ((means[:, None] - centre) ** 2 / variances).sum(axis=0)
    log = -0.5 * (np.log(variances).sum(axis=0) + np.log(total) + misfit)
    return np.asarray(np.exp(log - log.max()))


def _draws(
    known: "Mapping[str, KnownCost]",
    spreads: Mapping[Plan, float],
    count: int,
    rng: np.random.Generator,
) -> tuple[dict[str, int], Floats]:
    """Returns samples of a task's shard costs, [samples, shards], and each shard's column.

    All costs and the mean of each plan have one normal distribution, so that a shard of several
    plans is shrunk towards all of their means.
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

    Its variance has two parts: measuring, and the choice of tasks. The second is what tasks differ
    by beyond what measuring explains.

    Args:
        value: Ratio of the means.
        measuring: Variance by the noise of measuring.
        tasks: Variance by which tasks were drawn.
        count: Number of tasks.
    """

    value: float
    measuring: float
    tasks: float
    count: int

    @staticmethod
    def of(ours_ms: Floats, theirs_ms: Floats) -> "Ratio | None":
        """Returns the ratio of steps [samples, tasks], NaN without a plan; None without tasks."""
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
        """Standard error; infinite with one task, which says nothing of others."""
        return math.sqrt(self.measuring + self.tasks)

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval, by Student's distribution."""
        return self.error * _quantile(self.count) if self.error else 0.0

    @property
    def measured_width(self) -> float:
        """Half the width that the interval would have if there were no other tasks than these."""
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
        """Probability that the ratio is below 1: that ours is faster."""
        if self.count == 1:
            return 0.5
        if not self.error:
            return 0.5 * (1 + float(np.sign(1 - self.value)))
        return float(special.stdtr(self.count - 1, (1 - self.value) / self.error))


def means_of(steps_ms: Mapping[str, Floats]) -> dict[str, list[float | None]]:
    """Returns the mean of the samples of each sharder and task, in ms; None without a plan."""
    return {
        name: [None if math.isnan(ms) else float(ms) for ms in some.mean(axis=0)]
        for name, some in steps_ms.items()
    }


def as_samples(steps_ms: Sequence[float | None]) -> Floats:
    """Returns steps that are certain as one sample, [1, tasks]: NaN without a plan."""
    return np.array([steps_ms], dtype=float)  # None becomes NaN


def relative(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Ratio | None:
    """Returns the ratio of steps that are certain; None without a task that both have plans for."""
    return Ratio.of(as_samples(ours), as_samples(theirs))


def mean_ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Returns the mean of the ratios of single tasks, in which long and short steps count alike;
    None without a task that both have plans for.
    """
    ratios = (as_samples(ours) / as_samples(theirs))[0]
    known = ratios[~np.isnan(ratios)]
    return float(known.mean()) if len(known) else None


def _quantile(count: int) -> float:
    """Returns half the width of the 95 % interval in standard errors, for so many tasks."""
    return float(special.stdtrit(count - 1, 0.5 + _LEVEL / 2)) if count > 1 else math.inf
