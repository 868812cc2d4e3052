"""What one more step would bring to a plan: a move, a swap or a split where a wait is held up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.cost_model.training import one_thread
from autoshard.sharders.plan_search import Change, Choices, PlanSearch
from autoshard.workload import Piece, PlanError, ShardingPlan, ShardingTask
from autoshard.workload.moves import moves_between
from autoshard.workload.step_price import norm_power

Kind = Literal["move", "swap", "split"]
Moved = tuple[tuple[Piece, int, int], ...]  # columns, from where, and where to

_LOOKED_AT = 1000  # candidates that are made plans of, the most promising first
_LIKELY = 4  # times as many as are asked for are priced in scenarios
_MIN_GAIN = 1e-3  # relative: smaller ones are not worth a step


@dataclass(frozen=True)
class Step:
    """One change of a plan, and what a step of training is expected to take after it.

    `moved`: columns, the device that they leave, and the one they go to.
    """

    kind: Kind
    moved: Moved
    plan: ShardingPlan
    expected_ms: float


@one_thread()
def next_steps(
    oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan, count: int = 5
) -> list[Step]:
    """At most `count` valid plans that are one step from this one and better, the best first.

    What is placed at once of a device that holds up a wait goes elsewhere, is swapped for
    another's, or is halved and one half goes: of each the best step of a kind. None where the plan
    is as good as such steps make it, by the cost model. PlanError if it is not valid.
    """
    plan.check(task)
    if len(task.devices) == 1:
        return []
    predictor = StepPredictor(oracle, task)
    power = norm_power(oracle.residuals.prior.rest)
    search = PlanSearch(oracle.expectation(), task, power, plan.placed(task))
    slowest, found = search.slowest, dict[tuple[Kind, int], Step]()
    for kind, change in islice(_candidates(search), _LOOKED_AT):
        item = change.leave[0]
        if (kind, item) in found:  # to elsewhere: the best place is enough
            continue
        after = ShardingPlan.in_place(task, search.placed(change))
        try:
            after.check(task)
        except PlanError:  # two slices that became one may break what each alone keeps
            continue
        expected = predictor.expected_ms(after.placed(task))
        found[kind, item] = Step(kind, _moved(plan, after, task, slowest), after, expected)
        if len(found) == _LIKELY * count:
            break
    enough = predictor.expected_ms(plan.placed(task)) * (1 - _MIN_GAIN)
    better = [step for step in found.values() if step.expected_ms < enough]
    return sorted(better, key=lambda step: step.expected_ms)[:count]


def _candidates(search: PlanSearch) -> Iterator[tuple[Kind, Change]]:
    """Steps that should help, by the mean of what is not known, the most promising first."""
    kinds: dict[Kind, Choices] = {
        "move": search.moves(), "swap": search.swaps(), "split": search.splits()
    }  # fmt: skip
    each = [
        (float(choices.after_ms[number]), kind, number)
        for kind, choices in kinds.items()
        for number in np.flatnonzero(choices.after_ms < np.inf).tolist()
    ]
    for _, kind, number in sorted(each):
        yield kind, kinds[kind].change(number)


def _moved(
    old: ShardingPlan, new: ShardingPlan, task: ShardingTask, slowest: Sequence[int]
) -> Moved:
    """What moves, that of devices that hold up a wait first."""
    tables = {table.name: table for table in task.tables}
    moves = sorted(moves_between(old, new, task), key=lambda move: move.source not in slowest)
    return tuple((Piece(tables[m.table], m.start, m.width), m.source, m.target) for m in moves)
