"""The posterior of plans' step times, given noisy costs of shards.

The maximum of noisy values is biased upwards: by 1.03 standard errors for four equal devices. The
devices of a plan are therefore modelled as normal around the plan's mean, separately in each stage
of compute, because forward is noisier than backward. (Their noise is taken to be independent; a
correlation of 0.4, as measured, makes errors of a step at most a tenth too small.) Their spread has
an empirical prior, fitted to all plans of a sharder, so each cost is shrunk towards the mean
according to its noise. A step time is the mean over many samples of a task's costs; within a
sample, a shard has the same cost in all plans.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autoshard.workload import Objective, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.plans.step_price import StepPrice

if TYPE_CHECKING:  # it loads Ray, which estimated plans do not need
    from autoshard.cost_model.pricing.repeated_measurements import KnownCost

ShardDigests = tuple[str, ...]  # the digests of its shards, without empty devices
Plans = Mapping[str, Sequence[ShardDigests | None]]  # plans by sharder and task; None: no plan

SAMPLES = 1000
_SPREADS = 40  # grid points for the spread of a plan's devices
_MIN_SPREAD = 0.05  # relative to the noise: practically none
_MAX_SPREAD = 2.0  # relative to the devices' mean
_ITERATIONS = 50  # iterations of expectation maximisation, which has converged by then


def digests_of(task: ShardingTask, plan: ShardingPlan) -> ShardDigests:
    """Returns the digests of a plan's shards, without empty devices.

    Where devices differ, a shard on each kind of hardware is another.
    """
    named = task.hardware or ("",) * len(task.devices)
    pairs = zip(plan.shards(task), named, strict=True)
    return tuple(digest_on(shard.digest, name) for shard, name in pairs if shard is not None)


def digest_on(digest: str, hardware: str) -> str:
    """Returns the digest of a shard on hardware that is named."""
    return f"{digest} on {hardware}" if hardware else digest


class Pricing(NamedTuple):
    """How plans of a task are priced."""

    objective: Objective  # the task's objective
    # Time of both all-to-alls by plan, equal in all samples, with what a step takes for any plan.
    exchange_ms: Mapping[ShardDigests, float]

    @staticmethod
    def of(
        task: ShardingTask,
        plans: Sequence[ShardingPlan],
        common_ms: Callable[[ShardingTask, ShardingPlan], float] = lambda task, plan: 0.0,  # noqa: ARG005
    ) -> "Pricing":
        """Returns the pricing of these plans of a task.

        `common_ms` returns what a step of a plan takes on all devices alike.
        """
        found = {}
        for plan in plans:
            columns = np.array(plan.exchanged_columns(task))
            exchange_ms = float(StepPrice.of_plan(task, plan).exchange_stage(columns).max())
            found[digests_of(task, plan)] = exchange_ms + common_ms(task, plan)
        return Pricing(task.objective, found)


class _Cost(NamedTuple):
    """The known cost of a shard in one stage."""

    mean_ms: float
    error_ms: float


class StepPosterior:
    """Posterior samples of plans' step times, given the known costs of their shards.

    Args:
        known: Cost of each shard, by digest. Plans with unknown shards count as no plan.
        plans: Plans of each sharder for each task.
        pricing: Pricing of each task.
        count: Number of samples.
        seed: Seed of the samples.

    Attributes:
        steps_ms: Step times by sharder, [samples, tasks]; NaN without a plan.
    """

    def __init__(
        self,
        known: "Mapping[str, KnownCost]",
        plans: Plans,
        pricing: Sequence[Pricing],
        count: int = SAMPLES,
        seed: int = 0,
    ) -> None:
        self._pricing, self._count = pricing, count
        self.plans = {
            name: [p if p is not None and known.keys() >= set(p) else None for p in of_tasks]
            for name, of_tasks in plans.items()
        }
        rng = np.random.default_rng(seed)
        self._stages: list[list[tuple[dict[str, int], Floats]]] = [[] for _ in pricing]  # by task
        for direction in range(3):
            costs = {
                d: _Cost(k.mean_ms[direction], k.error_ms[direction]) for d, k in known.items()
            }
            counts = [(direction < 2) == each.objective.computes_apart for each in pricing]
            spreads: list[dict[ShardDigests, float]] = [{} for _ in pricing]
            for of_tasks in self.plans.values():
                # Where all tables are copied, there is no shard.
                counted = [
                    p if yes and p else None for p, yes in zip(of_tasks, counts, strict=True)
                ]
                for task, spread in _spreads(costs, counted).items():
                    spreads[task].setdefault(counted[task] or (), spread)
            for task, of_plans in enumerate(spreads):
                if of_plans:
                    self._stages[task].append(_draws(costs, of_plans, count, rng))
        self.steps_ms = {
            name: np.stack([self._steps(task, plan) for task, plan in enumerate(of_tasks)], axis=1)
            for name, of_tasks in self.plans.items()
        }

    def _steps(self, task: int, plan: ShardDigests | None) -> Floats:
        if plan is None:
            return np.full(self._count, np.nan)
        steps = np.full(self._count, self._pricing[task].exchange_ms.get(plan, 0.0))
        if not plan:
            return steps
        for places, draws in self._stages[task]:
            steps += draws[:, [places[digest] for digest in plan]].max(axis=1)
        return steps


def _spreads(known: Mapping[str, _Cost], plans: Sequence[ShardDigests | None]) -> dict[int, float]:
    """Returns the spread of devices' costs in a sharder's plans, in ms, by task number.

    The prior is fitted to all of its plans (Kiefer and Wolfowitz, by expectation maximisation).
    Each plan adds its own likelihood.
    """
    found = {task: _values(known, plan) for task, plan in enumerate(plans) if plan is not None}
    if not found:
        return {}
    lowest = _MIN_SPREAD * min(float(errors.min()) for _, errors in found.values())
    grid = np.geomspace(lowest, _MAX_SPREAD, _SPREADS)
    likelihood = np.stack([_likelihood(*values, grid) for values in found.values()])
    prior = np.full(_SPREADS, 1 / _SPREADS)
    for _ in range(_ITERATIONS):
        posterior = likelihood * prior
        posterior /= posterior.sum(axis=1, keepdims=True)
        prior = (posterior.sum(axis=0) + 1 / _SPREADS) / (len(posterior) + 1)
    # A stage time grows with the spread, so the mean is taken of the spread, not of its square.
    expected = posterior @ grid
    return {
        task: share * float(np.mean([known[digest].mean_ms for digest in dict.fromkeys(plan)]))
        for task, share in zip(found, expected.tolist(), strict=True)
        if (plan := plans[task]) is not None
    }


def _values(known: Mapping[str, _Cost], plan: ShardDigests) -> tuple[Floats, Floats]:
    """Returns costs and errors of a plan's different shards, relative to their mean cost."""
    shards = [known[digest] for digest in dict.fromkeys(plan)]
    means = np.array([shard.mean_ms for shard in shards])
    errors = np.array([shard.error_ms for shard in shards])
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
    known: Mapping[str, _Cost],
    spreads: Mapping[ShardDigests, float],
    count: int,
    rng: np.random.Generator,
) -> tuple[dict[str, int], Floats]:
    """Returns samples of a task's shard costs, [samples, shards], and each shard's column.

    All costs and the mean of each plan are jointly normal, so a shard of several plans is shrunk
    towards all of their means.
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


def means_of(steps_ms: Mapping[str, Floats]) -> dict[str, list[float | None]]:
    """Returns the mean of the samples by sharder and task, in ms; None without a plan."""
    return {
        name: [None if math.isnan(ms) else float(ms) for ms in samples.mean(axis=0)]
        for name, samples in steps_ms.items()
    }


def as_samples(steps_ms: Sequence[float | None]) -> Floats:
    """Returns step times without noise as one sample, [1, tasks]; NaN without a plan."""
    return np.array([steps_ms], dtype=float)  # None becomes NaN
