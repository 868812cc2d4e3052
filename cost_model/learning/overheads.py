"""Fits what training takes beside operators to rehearsals of plans."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.benchmark import MeasurementStore, MeasureSettings
from autoshard.benchmark.rehearsals.kept import RehearsedPlan
from autoshard.cost_model.learning.links import fit_terms
from autoshard.cost_model.pricing.repeated_measurements import SEEDS, evaluation_seeds
from autoshard.cost_model.step.common_price import CommonPrice
from autoshard.cost_model.step.option_overheads import (
    CopyOverhead,
    RowOverhead,
    copy_loads,
    row_loads,
)
from autoshard.cost_model.step.overhead import (
    SHARED_LOADS,
    DirectionOverhead,
    StepOverhead,
    loads_of,
    shared_loads_of,
    splits_of,
)
from autoshard.workload import ShardingPlan, UserError
from autoshard.workload.arrays import Floats
from autoshard.workload.ways.copies import Copies
from autoshard.workload.ways.option import all_copies
from autoshard.workload.ways.rows import Rows

MIN_REHEARSALS = 8
TERMS = ("operators", "lookups", "outputs", "bags", "start")
_MS = 1e-6  # in a nanosecond
# An error of a step of 10 % counts like one of 20 % of a weight: plans of a task err alike.
_CLOSENESS = 2.0
_NO_COPIES = CopyOverhead(0.0, 0.0, 0.0, 0.0, 0.0)
_NO_ROWS = RowOverhead(0.0, 0.0)
_FITTED_OF_ROWS = 2  # lookups by rows grow with their outputs in rehearsals


def fit_overhead(
    rehearsed: Sequence[RehearsedPlan], operators_ms: Sequence[Floats]
) -> StepOverhead:
    """Returns the coefficients, by least squares of relative errors; none is negative.

    Args:
        rehearsed: Plans, of several tasks: what all devices do alike depends on the task.
        operators_ms: Forward and backward of the operators of each plan in the pool, [ranks, 2].

    Raises:
        UserError: There are too few plans.
    """
    _check_enough(rehearsed, "plans", "what training takes beside operators")
    held = [_loads(each) for each in rehearsed]
    loads = np.concatenate(held)
    passes = np.concatenate([each.passes_ms for each in rehearsed])
    operators = np.concatenate(operators_ms)
    occupied = loads[:, -1] > 0
    directions = []
    for number in range(2):
        terms = np.column_stack([operators[:, number], loads])[occupied]
        operator, lookup, output, bag, start = fit_terms(terms, passes[occupied, number])
        lookup_ns, output_ns, bag_ns = lookup / _MS, output / _MS, bag / _MS
        directions.append(DirectionOverhead(operator, lookup_ns, output_ns, bag_ns, start))
    # The input depends on lookups and the rest on outputs: fitted together, one would pass for the
    # other where tables of all tasks look up as much for each column.
    inputs, rests = np.array([each.passes_ms[:, 2:].max(0) for each in rehearsed]).T
    shared = np.stack([shared_loads_of(each.task, _splits(each)) for each in rehearsed])
    every = len(SHARED_LOADS)
    of_input = [SHARED_LOADS.index(load) for load in ("lookups", "split_samples", "one")]
    of_rest = [number for number in range(every) if SHARED_LOADS[number] != "lookups"]
    rates = np.zeros(every)
    rates[of_input] += fit_terms(shared[:, of_input], inputs)
    rates[of_rest] += fit_terms(shared[:, of_rest], rests)
    lookup, output, feature_ms, regrouped, split_sample, start_ms = rates.tolist()
    forward, backward = directions
    return StepOverhead(
        forward,
        backward,
        shared_lookup_ns=lookup / _MS,
        shared_output_ns=output / _MS,
        shared_feature_ms=feature_ms,
        regrouped_ns=regrouped / _MS,
        split_sample_ns=split_sample / _MS,
        shared_ms=start_ms,
    )


def fit_copies(
    overhead: StepOverhead, rehearsed: Sequence[RehearsedPlan], operators_ms: Sequence[Floats]
) -> StepOverhead:
    """Returns the overhead with what copies take: what is left of steps of plans with copies.

    Args:
        overhead: Overhead of the tables that are not copied, and what copies take on another
            machine, if that is known.
        rehearsed: Plans with copies.
        operators_ms: Forward and backward of their fused operators in the pool, [ranks, 2].

    Raises:
        UserError: There are too few plans.
    """
    _check_enough(rehearsed, "plans with copies", "what copies take")
    loads = []
    for each in rehearsed:
        copied, ranks = all_copies(each.task, each.plan.options), len(each.task.devices)
        loads.append(np.array([1.0, *copy_loads(copied, each.task.batch_size, ranks).sum(0)]))
    usual = None if overhead.copies is None else [overhead.copies.start_ms, *overhead.copies.rates]
    (start_ms, *rates), deviation = _fit_rest(overhead, rehearsed, operators_ms, loads, usual)
    lookup_ns, gathered_ns, output_ns, weight_ns = (rate / _MS for rate in rates)
    copies = CopyOverhead(start_ms, lookup_ns, gathered_ns, output_ns, weight_ns, deviation)
    return replace(overhead, copies=copies)


def fit_rows(
    overhead: StepOverhead, rehearsed: Sequence[RehearsedPlan], operators_ms: Sequence[Floats]
) -> StepOverhead:
    """Returns the overhead with what blocks of rows take, as `fit_copies` does for copies."""
    _check_enough(rehearsed, "plans with blocks of rows", "what rows take")
    loads = []
    for each in rehearsed:
        starts = any(len(placement.devices) == 1 for placement in each.plan.placements)
        saved = row_loads(each.task, each.plan.row_wise)[:_FITTED_OF_ROWS]
        loads.append(np.array([float(starts), *saved]))
    usual = None
    if overhead.rows is not None:
        usual = [overhead.rows.start_ms, *overhead.rows.rates[:_FITTED_OF_ROWS]]
    (start_ms, *rates), _ = _fit_rest(overhead, rehearsed, operators_ms, loads, usual)
    return replace(overhead, rows=RowOverhead(start_ms, *(rate / _MS for rate in rates)))


# Ways whose overhead is fitted to plans of their own, by what messages say that these have.
WAY_FITS = {" with copies": (Copies(), fit_copies), " with blocks of rows": (Rows(), fit_rows)}


def plans_like(plan: ShardingPlan) -> str | None:
    """Returns the key in `WAY_FITS` of a plan with one such way, "" without; None if with more."""
    options = plan.all_options().values()
    found = [what for what, (way, _) in WAY_FITS.items() if any(map(way.taken_by, options))]
    return None if len(found) > 1 else "".join(found)


def coefficient_lines(overhead: StepOverhead) -> Iterator[str]:
    """Yields what an overhead consists of, in lines of text."""
    for name, terms in (("forward", overhead.forward), ("backward", overhead.backward)):
        yield (
            f"{name:<9} {terms.operator:.3f} of the operator, {terms.lookup_ns:.2f} ns a lookup, "
            f"{terms.output_ns:.2f} ns an output, {terms.bag_ns:.1f} ns a bag, "
            f"{terms.start_ms:.3f} ms"
        )
    yield (
        f"common    {overhead.shared_lookup_ns:.2f} ns a lookup of a rank, "
        f"{overhead.shared_output_ns:.2f} ns an output, {overhead.shared_feature_ms:.3f} ms a "
        f"feature, {overhead.shared_ms:.3f} ms; with splits {overhead.regrouped_ns:.2f} ns an "
        f"output more, {overhead.split_sample_ns:.0f} ns a sample and slice more"
    )
    if (copies := overhead.copies) is not None:
        yield (
            f"copies    {copies.start_ms:.3f} ms, "
            f"{copies.lookup_ns:.2f} ns a lookup of a rank, {copies.gathered_ns:.3f} ns an element "
            f"of its row, {copies.output_ns:.2f} ns an output, {copies.weight_ns:.2f} ns a weight"
        )
    rows, how = overhead.of_rows, "" if overhead.rows else " (estimated, not measured)"
    yield (
        f"rows{how}      {rows.start_ms:.3f} ms to start a second operator beside columns, less "
        f"{rows.saved_sum_ns:.2f} ns an element of partial sums and {rows.saved_output_ns:.2f} ns "
        "an output of a rank"
    )


def _fit_rest(
    overhead: StepOverhead,
    rehearsed: Sequence[RehearsedPlan],
    operators_ms: Sequence[Floats],
    loads: Sequence[Floats],
    usual: Sequence[float] | Floats | None,
) -> tuple[list[float], float]:
    """Fits what an overhead does not contain of steps to loads of each plan.

    Args:
        overhead: The overhead.
        rehearsed: Plans.
        operators_ms: As for `fit_overhead`.
        loads: Loads of each plan.
        usual: Milliseconds for one of each load on another machine; None if unknown.

    Returns:
        Milliseconds for one of each load, and the relative deviation that is left.
    """
    without = replace(overhead, copies=_NO_COPIES, rows=_NO_ROWS)
    left, steps = [], []
    for each, operators in zip(rehearsed, operators_ms, strict=True):
        parts, common_ms = _price(without, each, operators)
        left.append(each.step_ms - parts.sum() - common_ms)
        steps.append(each.step_ms)
    amounts, left_ms, steps_ms = np.stack(loads), np.array(left), np.array(steps)
    if usual is None:
        found = fit_terms(amounts, left_ms, steps_ms)
    else:
        found = _fit_like(np.asarray(usual), amounts, left_ms, steps_ms)
    fitted_ms = amounts @ found
    deviation = float(np.linalg.norm(left_ms - fitted_ms) / np.linalg.norm(fitted_ms))
    return found.tolist(), deviation


def _fit_like(usual: Floats, amounts: Floats, measured_ms: Floats, whole_ms: Floats) -> Floats:
    """Returns weights of loads as `fit_terms` does, near those of another machine times a factor.

    Plans may not tell loads apart: what lookups take is hidden where copied tables are large.

    Args:
        usual: Weights on the other machine, [loads].
        amounts: Loads, [plans, loads].
        measured_ms: What they took, [plans].
        whole_ms: What errors are relative to, [plans].
    """
    (factor,) = fit_terms((amounts @ usual)[:, None], measured_ms, whole_ms)
    near = factor * usual
    positive = near > 0
    return fit_terms(
        np.concatenate([amounts, np.eye(len(near))[positive]]),
        np.concatenate([measured_ms, near[positive]]),
        np.concatenate([whole_ms, _CLOSENESS * near[positive]]),
    )


def _check_enough(rehearsed: Sequence[RehearsedPlan], which: str, what: str) -> None:
    if len(rehearsed) < MIN_REHEARSALS:
        raise UserError(
            f"{len(rehearsed)} {which} were rehearsed: {what} needs at least {MIN_REHEARSALS}"
        )


def measured_operators(
    store: MeasurementStore, rehearsed: RehearsedPlan, hardware: str, versions: str
) -> Floats | None:
    """Returns forward and backward of a plan's operators, [ranks, 2]; None if one is unknown."""
    task = rehearsed.task
    shards = rehearsed.plan.shards(task)
    found = np.zeros((len(shards), 2))
    for rank, shard in enumerate(shards):
        if shard is None:
            continue
        batches = [
            measurement.timing.ms[:2]
            for seed in evaluation_seeds(SEEDS)
            if (settings := MeasureSettings(task.batch_size, task.operator, seed))
            and (measurement := store.find(shard, settings, hardware, versions)) is not None
            and measurement.timing is not None
        ]
        if not batches:
            return None
        found[rank] = np.mean(batches, axis=0)
    return found


@dataclass(frozen=True)
class OverheadReport:
    """How well fitted coefficients explain steps, and what steps consist of.

    Args:
        ratio: Mean of rehearsed step over price.
        deviation: Its standard deviation over plans.
        shares: Share of each term in a step, mean of plans; that of copies is in the last one.
    """

    ratio: float
    deviation: float
    shares: Mapping[str, float]


def report_on(
    overhead: StepOverhead, rehearsed: Sequence[RehearsedPlan], operators_ms: Sequence[Floats]
) -> OverheadReport:
    """Prices rehearsed plans by their measured operators, and compares."""
    overhead = replace(overhead, copies=overhead.copies or _NO_COPIES)
    ratios, shares = [], []
    for each, operators in zip(rehearsed, operators_ms, strict=True):
        parts, common_ms = _price(overhead, each, operators)
        price_ms = float(parts.sum()) + common_ms
        ratios.append(each.step_ms / price_ms)
        shares.append([*(parts / price_ms), common_ms / price_ms])
    means = np.mean(shares, axis=0).tolist()
    return OverheadReport(
        float(np.mean(ratios)),
        float(np.std(ratios)),
        dict(zip((*TERMS, "alike on all devices"), means, strict=True)),
    )


def _price(
    overhead: StepOverhead, rehearsed: RehearsedPlan, operators_ms: Floats
) -> tuple[Floats, float]:
    """Returns each term's part of the slowest passes, and what all ranks do alike."""
    terms = np.concatenate([operators_ms[:, None, :], np.zeros((len(operators_ms), 4, 2))], axis=1)
    terms[:, 1:] = _loads(rehearsed)[:, :, None]  # without those of copies
    terms *= overhead.rates.T  # [ranks, terms, directions]
    slowest = terms.sum(1).argmax(0)
    parts = sum(terms[slowest[number], :, number] for number in range(2))
    return np.asarray(parts), CommonPrice(overhead, rehearsed.task).plan_ms(rehearsed.plan)


def _loads(rehearsed: RehearsedPlan) -> Floats:
    """Returns the loads of each rank, [ranks, loads]."""
    task = rehearsed.task
    shards = rehearsed.plan.shards(task)
    pieces = [() if shard is None else shard.pieces for shard in shards]
    return np.stack([loads_of(held, task.batch_size) for held in pieces])


def _splits(rehearsed: RehearsedPlan) -> int:
    return splits_of(rehearsed.plan.placed(rehearsed.task))
