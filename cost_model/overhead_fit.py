"""Fits what training takes beside operators to rehearsals of plans."""

from collections.abc import Sequence

import numpy as np

from autoshard.benchmark.rehearsal.kept import RehearsedPlan
from autoshard.cost_model.link_fit import fit_terms
from autoshard.cost_model.step_overhead import DirectionOverhead, StepOverhead, loads_of
from autoshard.workload import UserError
from autoshard.workload.arrays import Floats

MIN_REHEARSALS = 8
_MS = 1e-6  # in a nanosecond


def fit_overhead(
    rehearsed: Sequence[RehearsedPlan], operators_ms: Sequence[Floats]
) -> StepOverhead:
    """Returns the coefficients, by least squares of relative errors; none is negative.

    Args:
        rehearsed: Plans, of several tasks: what is the same for all plans of a task depends on
            the task.
        operators_ms: Forward and backward of the operators of each plan in the pool, [ranks, 2].

    Raises:
        UserError: There are too few plans.
    """
    if len(rehearsed) < MIN_REHEARSALS:
        raise UserError(
            f"{len(rehearsed)} plans were rehearsed: what training takes beside operators needs "
            f"at least {MIN_REHEARSALS}"
        )
    held = [_loads(each) for each in rehearsed]
    loads = np.concatenate(held)
    passes = np.concatenate([each.passes_ms for each in rehearsed])
    operators = np.concatenate(operators_ms)
    occupied = loads[:, -1] > 0
    directions = []
    for number in range(2):
        terms = np.column_stack([operators[:, number], loads])[occupied]
        operator, lookup, output, piece, start = fit_terms(terms, passes[occupied, number])
        directions.append(DirectionOverhead(operator, lookup / _MS, output / _MS, piece, start))
    shared = np.array([each.passes_ms[:, 2].max() for each in rehearsed])
    whole = np.stack([_shared_loads(each) for each in rehearsed])
    output, lookup, piece, start = fit_terms(whole, shared)
    forward, backward = directions
    return StepOverhead(forward, backward, output / _MS, lookup / _MS, piece, start)


def _loads(rehearsed: RehearsedPlan) -> Floats:
    """Returns the loads of each rank, [ranks, loads]."""
    task = rehearsed.task
    shards = rehearsed.plan.shards(task)
    pieces = [() if shard is None else shard.pieces for shard in shards]
    return np.stack([loads_of(held, task.batch_size) for held in pieces])


def _shared_loads(rehearsed: RehearsedPlan) -> Floats:
    task = rehearsed.task
    whole = [table.whole() for table in task.tables]
    lookups, outputs, tables, one = loads_of(whole, task.batch_size)
    ranks = len(task.devices)
    return np.array([outputs / ranks, lookups / ranks, tables, one])
