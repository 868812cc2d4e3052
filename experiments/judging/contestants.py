"""Who competes, and the judgement of a contest: measured on a pool, or as a cost model says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from autoshard.benchmark import BenchmarkPool, MeasureSettings, TimingOptions
from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.console.progress import following
from autoshard.experiments.judging.contest import Contest
from autoshard.experiments.judging.judge import Judge, Judgement, Limits
from autoshard.experiments.judging.knowledge import Knowledge
from autoshard.experiments.judging.outcomes import estimated, maxima_of, warm_up
from autoshard.experiments.judging.scores import Score, bounds_ms, certain, score_all
from autoshard.experiments.judging.shard_visits import (
    SEEDS,
    ShardVisits,
    judging_seeds,
    told_as,
    verifying_seeds,
)
from autoshard.sharders import (
    MEASURE_SECONDS,
    NEED_POOL,
    TAKE_THEIR_TIME,
    Means,
    Measurer,
    Policy,
    make_sharder,
)
from autoshard.workload import Sharder, ShardingTask


@dataclass(frozen=True)
class Contestants:
    """Sharders by name, and what they go by.

    Args:
        names: of the sharders.
        oracle: of the tasks' batch size.
        policy: of those that have one.
        seed: of those that draw.
        verified: plans that `autoshard_verified` measures for a task in the end.
        measure_seconds: that it may take for a task.
        others: policies by names of their own: each makes one plan, as `policy` does.
    """

    names: Sequence[str]
    oracle: EstimatedCosts
    policy: Policy
    seed: int = 0
    verified: int = 3
    measure_seconds: float = MEASURE_SECONDS
    others: Mapping[str, Policy] = field(default_factory=dict)

    def sharders(self, measurer: Measurer | None = None) -> dict[str, Sharder]:
        """By name."""
        made = {name: self._made(name, self.policy, measurer) for name in self.names}
        return made | {name: self._made("policy", one) for name, one in self.others.items()}

    def _made(self, name: str, policy: Policy, measurer: Measurer | None = None) -> Sharder:
        means = Means(
            # An oracle each: what one sharder has looked up would cost the next no time.
            EstimatedCosts(self.oracle.model, self.oracle.batch_size),
            policy,
            measurer,
            self.verified,
            self.measure_seconds,
            self.seed,
        )
        return make_sharder(name, means)

    def warmed_up(
        self, first: ShardingTask, measurer: Measurer | None = None
    ) -> dict[str, Sharder]:
        """By name, ready to be timed on tasks like the first."""
        found = self.sharders(measurer)
        late = NEED_POOL | TAKE_THEIR_TIME
        warm_up({name: sharder for name, sharder in found.items() if name not in late}, first)
        return found


def judge_measured(
    contest: Contest,
    contestants: Contestants,
    pool: BenchmarkPool,
    limits: Limits,
    seeds: int = SEEDS,
    timing: TimingOptions | None = None,
    save_tasks: Path | None = None,
) -> Judgement:
    """What plans measure on the pool.

    `seeds`: index batches a shard; those that sharders choose by are others. `timing`: how hard to
    try in a visit. `save_tasks`: where tasks are written as they are dealt.
    """
    oracle = contestants.oracle
    settings = MeasureSettings(oracle.batch_size, oracle.model.provenance.operator)
    told = told_as(oracle.model, pool)
    judging = ShardVisits(pool, settings, judging_seeds(seeds), timing, told)
    visits = ShardVisits(pool, settings, verifying_seeds(seeds), timing, told)
    knowledge = Knowledge(pool, oracle.model, settings, visits, unseen=judging_seeds(seeds))
    sharders = contestants.warmed_up(contest.first, knowledge)
    entries = contest.entries(sharders, save_tasks, lambda: knowledge.seconds)
    return Judge(entries, judging, limits, len(pool.devices())).run(contest.begin)


def judge_estimated(
    contest: Contest, contestants: Contestants, save_tasks: Path | None = None
) -> Judgement:
    """The same as the contestants' oracle says, as if its costs were certain."""
    entries = contest.entries(contestants.warmed_up(contest.first), save_tasks)
    made = []
    with following(contest.begin, "tasks planned") as step:
        for entry in islice(entries, contest.begin):
            made.append(entry)
            step()
    tasks = [entry.task for entry in made]
    outcomes = {name: [entry.outcomes[name] for entry in made] for name in made[0].outcomes}
    outcomes = estimated(outcomes, tasks, contestants.oracle)
    return Judgement(tasks, outcomes, certain(outcomes))


def scores_of(
    found: Judgement, oracle: EstimatedCosts, measured: bool, trained: bool = False
) -> tuple[dict[str, Score], str | None]:
    """The score of each sharder, and the best heuristic's name; what was measured is held against
    what the oracle promises. What was `trained` is of more than it prices.
    """
    promised = maxima_of(estimated(found.outcomes, found.tasks, oracle)) if measured else {}
    bounds = [] if trained else bounds_ms(oracle, found.tasks)
    return score_all(found.outcomes, found.steps_ms, bounds, promised)
