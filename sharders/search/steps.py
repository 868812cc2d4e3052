"""Single steps that improve a plan: moves, swaps and splits on the slowest devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.search.plan_search import Choices, PlanSearch
from autoshard.sharders.search.search_state import Change
from autoshard.workload import Piece, PlanError, ShardingPlan, ShardingTask
from autoshard.workload.plans.moves import moves_between
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.plans.step_price import norm_power

Kind = Literal["move", "swap", "split"]
Moved = tuple[tuple[Piece, int, int], ...]  # columns, from where, and where to

_MAX_CANDIDATES = 1000  # candidates turned into plans, the most promising first
_PRICED = 4  # times `count` plans are priced over scenarios
_MIN_GAIN = 1e-3  # relative: smaller ones are not worth a step


@dataclass(frozen=True)
class Step:
    """One change of a plan.

    Args:
        kind: Kind of change.
        moved: Pieces that move, each with its old and its new device.
        plan: The plan after the change.
        expected_ms: Its expected step time in ms.
    """

    kind: Kind
    moved: Moved
    plan: ShardingPlan
    expected_ms: float


@one_thread()
def next_steps(
    oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan, count: int = 5
) -> list[Step]:
    """Returns at most `count` steps to better valid plans, the best first.

    A unit of a device that is the slowest of a stage moves, is swapped, or is split so that one
    half moves. There is at most one step of each kind for each unit. Copies and rows stay.

    Raises:
        PlanError: The plan is not valid.
    """
    plan.check(task)
    if len(task.devices) == 1 or not plan.placements or not Sharded.can_be(plan):
        return []
    predictor = StepPredictor(oracle, task)
    power = norm_power(oracle.residuals.prior.rest)
    search = PlanSearch(oracle.expectation(), task, power, Sharded.of(plan, task))
    slowest, found = search.slowest, dict[tuple[Kind, int], Step]()
    for kind, change in islice(_candidates(search), _MAX_CANDIDATES):
        item = change.leave[0]
        if (kind, item) in found:  # the best target is enough
            continue
        after = plan.with_columns(ShardingPlan.in_place(task, search.placed(change)))
        try:
            after.check(task)
        except PlanError:  # two pieces that become one may violate a constraint
            continue
        expected = predictor.expected_of(after)
        found[kind, item] = Step(kind, _moved(plan, after, task, slowest), after, expected)
        if len(found) == _PRICED * count:
            break
    enough = predictor.expected_of(plan) * (1 - _MIN_GAIN)
    better = [step for step in found.values() if step.expected_ms < enough]
    return sorted(better, key=lambda step: step.expected_ms)[:count]


def _candidates(search: PlanSearch) -> Iterator[tuple[Kind, Change]]:
    """Yields steps by their objective in the mean scenario, the best first."""
    kinds: dict[Kind, Choices] = {
        "move": search.moves(), "swap": search.swaps(), "split": search.splits()
    }  # fmt: skip
    ranked = [
        (float(choices.after_ms[number]), kind, number)
        for kind, choices in kinds.items()
        for number in np.flatnonzero(choices.after_ms < np.inf).tolist()
    ]
    for _, kind, number in sorted(ranked):
        yield kind, kinds[kind].change(number)


def _moved(
    old: ShardingPlan, new: ShardingPlan, task: ShardingTask, slowest: Sequence[int]
) -> Moved:
    """Returns the pieces that move, those of the slowest devices first."""
    tables = {table.name: table for table in task.tables}
    moves = sorted(moves_between(old, new, task), key=lambda move: move.source not in slowest)
    return tuple((Piece(tables[m.table], m.start, m.width), m.source, m.target) for m in moves)
