"""All sharders by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoshard.cost_model import EstimatedCosts
from autoshard.sharders.annealing import ANNEAL_SECONDS, AnnealingSharder
from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.sharders.heuristics import HEURISTICS, GreedySharder
from autoshard.sharders.measuring import MEASURE_SECONDS, Measurer, MeasuringSharder
from autoshard.sharders.neuroshard import NeuroShardSharder
from autoshard.sharders.policy import PolicySharder
from autoshard.sharders.policy_files import Policy
from autoshard.sharders.torchrec_planner import TorchRecSharder
from autoshard.workload import Sharder, UserError


@dataclass(frozen=True)
class Means:
    """What sharders need, as far as it is there. `seed`: of everything that they draw. `seconds`:
    that those who search may take; by default as long as it takes them.
    """

    oracle: EstimatedCosts | None = None
    policy: Policy | None = None
    measurer: Measurer | None = None
    measure_seconds: float = MEASURE_SECONDS
    seed: int = 0
    seconds: float | None = None

    def priced(self, name: str) -> EstimatedCosts:
        """The oracle; UserError without."""
        if self.oracle is None:
            raise UserError(f"sharder {name} goes by a cost model: none is named")
        return self.oracle

    def trained(self, name: str) -> Policy:
        """The policy; UserError without."""
        if self.policy is None:
            raise UserError(f"sharder {name} needs a trained policy: name one with --policy")
        return self.policy

    def measuring(self, name: str) -> Measurer:
        """What measures; UserError without."""
        if self.measurer is None:
            raise UserError(f"sharder {name} measures while it plans: no pool is there to do so")
        return self.measurer


def _policy(name: str, means: Means, **options: object) -> PolicySharder:
    policy, oracle = means.trained(name), means.priced(name)
    return PolicySharder(policy, oracle, seed=means.seed, seconds=means.seconds, **options)  # type: ignore[arg-type]


_MAKERS: dict[str, Callable[[str, Means], Sharder]] = {
    "cost": lambda name, means: AloneGreedySharder(means.priced(name)),
    "cost_fused": lambda name, means: FusedGreedySharder(means.priced(name)),
    "cost_fused_search": lambda name, means: _policy(
        name, replace(means, policy=Policy.untrained()), search=True
    ),
    "neuroshard": lambda name, means: NeuroShardSharder(means.priced(name)),
    "annealing": lambda name, means: AnnealingSharder(
        means.priced(name), means.seconds or ANNEAL_SECONDS, seed=means.seed
    ),
    "policy": _policy,
    "autoshard": lambda name, means: _policy(name, means, search=True),
    "autoshard_verified": lambda name, means: make_measuring(name, means),
    "torchrec": lambda _name, _means: TorchRecSharder(column_wise=False),
    "torchrec_columns": lambda _name, _means: TorchRecSharder(column_wise=True),
}
SHARDERS = (*HEURISTICS, *_MAKERS)
_DROPPED = {"policy_best": "use policy, or autoshard, which searches from the same plans"}
NEED_TORCHREC = frozenset({"torchrec", "torchrec_columns"})  # they are its planner
BY_NO_MODEL = frozenset({*HEURISTICS, *NEED_TORCHREC})  # they ask no cost model
TAKE_SECONDS = frozenset({"autoshard", "cost_fused_search", "annealing"})  # as many as they get
NEED_POOL = frozenset({"autoshard_verified"})  # they measure
TAKE_THEIR_TIME = frozenset({"annealing"})  # seconds as they are given, however small the task
_NEVER_WORSE = frozenset({"autoshard", "cost_fused_search", "cost_fused"})  # than cost_fused
NEED_POLICY = frozenset({"policy", "autoshard", "autoshard_verified"})


def make_sharder(name: str, means: Means | None = None) -> Sharder:
    """The sharder of that name; UserError lists the names there are, or says what it lacks."""
    means = means or Means()
    if name in HEURISTICS:
        return GreedySharder(HEURISTICS[name], means.seed)
    if name in _DROPPED:
        raise UserError(f"sharder {name} no longer exists: {_DROPPED[name]}")
    if name not in _MAKERS:
        raise UserError(f"sharder {name!r} is not one of {', '.join(SHARDERS)}")
    return _MAKERS[name](name, means)


def make_measuring(name: str, means: Means) -> Sharder:
    """The sharder of that name in rounds of planning, measuring and learning."""
    inner = "autoshard" if name in NEED_POOL else name
    return MeasuringSharder(
        means.priced(name),
        lambda oracle: make_sharder(inner, replace(means, oracle=oracle)),
        means.measuring(name),
        means.measure_seconds,
        greedy=inner in _NEVER_WORSE,
    )
