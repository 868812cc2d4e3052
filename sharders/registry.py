"""Registry of sharders: description, requirements, use of time and constructor of each name."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Literal

# Attributes of the package, which loads the module of a sharder when the sharder is made.
from autoshard import sharders
from autoshard.sharders.context import SharderContext
from autoshard.sharders.heuristics.heuristics import HEURISTICS, GreedySharder
from autoshard.sharders.policy.files import Policy
from autoshard.workload import Sharder, UserError

Need = Literal["model", "policy", "pool", "torchrec"]
_MODEL, _POLICY = frozenset[Need]({"model"}), frozenset[Need]({"model", "policy"})


@dataclass(frozen=True)
class SharderSpec:
    """Specification of a sharder.

    Args:
        text: Description in a phrase.
        make: Creates the sharder from a context that meets its needs, and the words of its name.
        needs: Cost model, trained policy, benchmark pool or TorchRec.
        time: `own`: has no time limit. `at_most`: stops when it finds no better plan, or at the
            time limit. `all`: uses all of the time limit.
        floor: Name of a sharder whose plans are never better, by the cost model.
        ways: `chosen`: tables are copied, or sharded by rows, where that is faster, or no other
            plan fits. `required`: only where a constraint says so. `own`: as the sharders do that
            it uses; TorchRec's does not.
        words: Words that may follow the name, as in `torchrec_columns_rows`; `all` stands for all.
    """

    text: str
    make: Callable[..., Sharder]
    needs: frozenset[Need] = _MODEL
    time: Literal["own", "at_most", "all"] = "own"
    floor: str | None = None
    ways: Literal["chosen", "required", "own"] = "required"
    words: tuple[str, ...] = ()


_BALANCED = {  # what each published heuristic balances over devices
    "round_robin": "numbers of tables",
    "random": "random costs",
    "dim": "dim",
    "size": "dim x rows",
    "lookup": "dim x pooling factor",
    "size_lookup": "dim x pooling factor x log(rows)",
}


def _heuristic(name: str) -> SharderSpec:
    return SharderSpec(
        f"heuristic: balances {_BALANCED[name]}",
        lambda context: GreedySharder(HEURISTICS[name], context.seed),
        frozenset(),
    )


def _policy(context: SharderContext, search: bool = False) -> Sharder:
    assert context.policy is not None
    return sharders.PolicySharder(
        context.policy,
        context.costs,
        search,
        context.seed,
        context.seconds,
        resources=context.resources,
    )


def _above(place: str) -> Callable[..., Sharder]:
    """Returns a constructor from a package above this one, which is imported when it is called.

    Args:
        place: `package:constructor`.
    """
    return lambda *arguments: resolve_name(place)(*arguments)


SHARDERS: dict[str, SharderSpec] = {
    **{name: _heuristic(name) for name in HEURISTICS},
    "cost": SharderSpec(
        "greedy by the predicted cost of each table alone",
        lambda context: sharders.AloneGreedySharder(context.costs),
    ),
    "cost_fused": SharderSpec(
        "greedy by the predicted cost of each device with the table",
        lambda context: sharders.FusedGreedySharder(context.costs),
        floor="cost_fused",
    ),
    "cost_fused_search": SharderSpec(
        "autoshard with the untrained policy",
        lambda context: _policy(replace(context, policy=Policy.untrained()), search=True),
        time="at_most",
        floor="cost_fused",
        ways="chosen",
    ),
    "neuroshard": SharderSpec(
        "NeuroShard's beam search over column splits",
        lambda context: sharders.NeuroShardSharder(context.costs),
    ),
    "annealing": SharderSpec(
        "simulated annealing, by default for a minute: reference for faster sharders",
        lambda context: sharders.AnnealingSharder(
            context.costs,
            context.seconds or sharders.ANNEAL_SECONDS,
            seed=context.seed,
            resources=context.resources,
        ),
        time="all",
        ways="chosen",
    ),
    "policy": SharderSpec("one pass of the trained policy", _policy, _POLICY, ways="chosen"),
    "autoshard": SharderSpec(
        "local search from the plans of policy and cost_fused",
        lambda context: _policy(context, search=True),
        _POLICY,
        time="at_most",
        floor="cost_fused",
        ways="chosen",
    ),
    "autoshard_verified": SharderSpec(
        "autoshard in rounds of planning and measuring",
        lambda context: make_measuring("autoshard", context),
        frozenset({"model", "policy", "pool"}),
        time="at_most",
        ways="own",
    ),
    "torchrec": SharderSpec(
        "TorchRec's planner with whole tables, and with what else is named, as in "
        "torchrec_columns_rows or torchrec_all (on CPUs as if for GPUs)",
        _above("autoshard.integration:TorchRecSharder.of_context"),
        frozenset({"torchrec"}),
        ways="own",
        words=("columns", "rows", "nodes", "copies"),
    ),
}
_ALL = "all"
_LACKS: dict[Need, str] = {
    "model": "requires a cost model: name one with --cost-model",
    "policy": "requires a trained policy: name one with --policy",
    "pool": "requires a benchmark pool: it measures while it plans",
}


def spec_of(name: str) -> SharderSpec:
    """Returns the specification of a sharder with the words of its name as arguments of `make`.

    UserError lists all names, or all words.
    """
    if name in SHARDERS:
        return SHARDERS[name]
    with_words = (plain for plain, spec in SHARDERS.items() if spec.words)
    plain = next((each for each in with_words if name.startswith(f"{each}_")), None)
    if plain is None:
        raise UserError(f"sharder {name!r} is not one of {', '.join(SHARDERS)}")
    spec = SHARDERS[plain]
    words = name.removeprefix(f"{plain}_").split("_")
    if words == [_ALL]:
        words = list(spec.words)
    if set(words) - set(spec.words) or len(set(words)) < len(words):
        known = f"{_ALL}, or some of {', '.join(spec.words)}"
        raise UserError(f"sharder {name!r}: after {plain}_ comes {known}, each once")
    return replace(spec, make=lambda context: spec.make(context, *words))


def check_takes_seconds(name: str) -> None:
    """Raises UserError if a sharder has no time limit."""
    if spec_of(name).time == "own":
        limited = [name for name, spec in SHARDERS.items() if spec.time != "own"]
        raise UserError(
            f"--seconds is not supported by sharder {name}: use one of {', '.join(limited)}, or "
            "omit --seconds"
        )


def needs_of(names: Sequence[str]) -> frozenset[Need]:
    """Returns the union of the needs of these sharders."""
    return frozenset[Need]().union(*(spec_of(name).needs for name in names))


def usable_sharders(measure: bool) -> list[str]:
    """Returns the names of all sharders that can run here, also with all words that they take.

    Args:
        measure: Whether those that need a pool are among them.

    Warns where TorchRec is missing.
    """
    names = list[str]()
    for name, spec in SHARDERS.items():
        if "pool" in spec.needs and not measure:
            continue
        if "torchrec" in spec.needs:
            try:
                make_sharder(name)
            except UserError as missing:
                warnings.warn(f"{name} is left out: {missing}", stacklevel=2)
                continue
        names += [name, f"{name}_{_ALL}"] if spec.words else [name]
    return names


def make_sharder(name: str, context: SharderContext | None = None) -> Sharder:
    """Creates a sharder by name.

    Args:
        name: One of `SHARDERS`, with words if it takes some.
        context: Oracle, policy and measurer, as far as the sharder needs them.

    Raises:
        UserError: The name is unknown, or the context lacks what this sharder needs.
    """
    spec, context = spec_of(name), context or SharderContext()
    given = {"model": context.oracle, "policy": context.policy, "pool": context.measurer}
    for need, lack in _LACKS.items():
        if need in spec.needs and given[need] is None:
            raise UserError(f"sharder {name} {lack}")
    made = spec.make(context)
    if spec.ways != "required":
        return made
    return sharders.RequiredOptions(made, context.oracle, context.resources.host_bytes)


def make_measuring(name: str, context: SharderContext) -> Sharder:
    """Creates a sharder that alternates planning by another sharder and measuring."""
    if "pool" in spec_of(name).needs:
        return make_sharder(name, context)
    assert context.measurer is not None
    return sharders.MeasuringSharder(
        context.costs,
        lambda oracle: make_sharder(name, replace(context, oracle=oracle)),
        context.measurer,
        context.measure_seconds,
        greedy=spec_of(name).floor is not None,
    )
