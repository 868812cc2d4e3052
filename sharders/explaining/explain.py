"""Explanations of a plan: its slowest devices, the best next changes, and a baseline plan."""

import io
from collections import defaultdict
from collections.abc import Iterator

from rich.console import Console

from autoshard.cost_model import EstimatedCosts, StepPredictor, slowest_by_phase
from autoshard.sharders.explaining.summary import (
    Baseline,
    ReportPart,
    best_heuristic,
    format_columns,
    new_table,
)
from autoshard.sharders.search.steps import Step, next_steps
from autoshard.workload import EmbeddingTable, ShardingPlan, ShardingTask
from autoshard.workload.plans.moves import moves_between, renumbered
from autoshard.workload.plans.traffic import step_traffic
from autoshard.workload.ways import WAYS
from autoshard.workload.ways.option import option_of

_COSTLIEST = 3  # pieces shown of each phase's slowest device
_MIN_MS = 0.005  # cost of a piece that is shown: less reads 0.00
_STEPS = 5
_WIDTH = 110  # characters of a line with a table, as text
_MB = 1e6
_ELSEWHERE = 5  # tables shown that are on other devices


def explain_text(
    plan: ShardingPlan, task: ShardingTask, oracle: EstimatedCosts, seed: int = 0
) -> str:
    """Returns the explanation of a plan as plain text: the slowest device of each phase with its
    costliest tables, the best next changes, and the differences from the best heuristic's plan.

    Args:
        plan: The plan.
        task: Its task.
        oracle: Predicts costs.
        seed: Seed of heuristics that sample.
    """
    best = best_heuristic(task, StepPredictor(oracle, task), seed)
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, emoji=False)
    with console.capture() as text:
        for part in explanation(oracle, task, plan, best):
            console.print(part, soft_wrap=isinstance(part, str), markup=False)
    return text.get()


def explanation(
    oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan, best: Baseline | None
) -> Iterator[ReportPart]:
    """Yields all parts of the explanation: of columns and blocks of rows, as copies are on all
    devices alike.
    """
    if plan.placements:
        yield from phases(oracle, task, plan)
    if task.nodes > 1:
        yield from links(task, plan)
    yield from steps(oracle, task, plan)
    if best is not None:
        yield from differences(oracle, task, plan, best)


def phases(oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan) -> Iterator[ReportPart]:
    """Yields the slowest device of each phase, and its costliest pieces."""
    yield (
        "\nthe slowest device of each phase, and its costliest tables: the time that it would save "
        f"without each (shares need not add up to 100%); objective {task.objective}"
    )
    shown = new_table(("phase, device", "columns", "ms", "share", "mean device"), texts=2)
    dims = plan.columns(task)  # copies send none
    for phase in slowest_by_phase(oracle, plan, task):
        sent = f"{dims[phase.device]:,} of {sum(dims):,} sent" if phase.is_exchange else ""
        name = f"{phase.phase}: {task.devices[phase.device].name}"
        shown.add_row(name, sent, f"{phase.ms:.2f}", "", f"{phase.mean_ms:.2f}", style="bold")
        costliest = [part for part in phase.pieces if part.ms >= _MIN_MS][:_COSTLIEST]
        for part in costliest:
            columns = format_columns(part.piece.table, part.piece.start, part.piece.width)
            name = f"  {part.piece.table.name}"
            shown.add_row(name, columns, f"{part.ms:.2f}", f"{part.share:.1%}", "")
        if costliest and (others := len(phase.pieces) - len(costliest)):
            shown.add_row(f"  and {others} more", "", "", "", "")
    yield shown


def links(task: ShardingTask, plan: ShardingPlan) -> Iterator[ReportPart]:
    """Yields what a step sends over the links inside nodes and between them."""
    yield f"\nMB that all devices of {task.nodes} nodes send in a step"
    shown = new_table(("what", "inside nodes", "between nodes"), texts=1)
    for sent in step_traffic(plan, task):
        shown.add_row(sent.what, f"{sent.inside / _MB:,.2f}", f"{sent.between / _MB:,.2f}")
    yield shown


def steps(oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan) -> Iterator[ReportPart]:
    """Yields a line for each of the best single changes of a plan."""
    found = next_steps(oracle, task, plan, _STEPS)
    if not found:
        yield "\nnext steps: no single move, swap or split is predicted to shorten a step"
        return
    now_ms = StepPredictor(oracle, task).expected_of(plan)
    yield f"\nnext steps, each alone: step time in place of {now_ms:.2f} ms,"
    for step in found:
        gain = step.expected_ms / now_ms - 1
        yield f"  {step.expected_ms:.2f} ms ({gain:+.1%}): {format_step(step, task)}"


def format_step(step: Step, task: ShardingTask) -> str:
    """Returns what a step changes, in one line."""
    names = [device.name for device in task.devices]
    pieces = []
    for moved, *ends in step.moved:
        columns = format_columns(moved.table, moved.start, moved.width)
        pieces.append((f"{moved.table.name} ({columns} columns)", *(names[end] for end in ends)))
    (piece, source, target), *others = pieces
    if step.kind == "swap":
        return f"swap {piece} of {source} for {others[0][0]} of {target}"
    verb = "split off" if step.kind == "split" else "move"
    return f"{verb} {piece} from {source} to {target}"


def differences(
    oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan, best: Baseline
) -> Iterator[ReportPart]:
    """Yields the differences from a heuristic's plan: costs, and tables on other devices.

    Equal devices of the heuristic's plan are renumbered so that the plans differ least.
    """
    name = best.name
    whole = [table.whole() for table in task.tables]
    alone = oracle.model.compute.described(oracle.amounts(whole))[:, :2].sum(-1).tolist()
    ms = {table.name: cost for table, cost in zip(task.tables, alone, strict=True)}
    other = renumbered(best.plan, plan, task, lambda t, width: ms[t.name] * width / t.dim)
    yield f"\ncompared with the best heuristic's plan, {name} (equal devices are renumbered):"
    # A gain comes from better balance, or from tables that are cheaper together.
    ours, theirs = oracle.plan_cost(plan, task), oracle.plan_cost(other, task)
    yield (
        f"  mean device {ours.mean_ms:.2f} ms, balance {ours.balance:.3f}; with {name} "
        f"{theirs.mean_ms:.2f} ms, balance {theirs.balance:.3f}"
    )
    tables = {table.name: table for table in task.tables}
    options, there = plan.all_options(), other.all_options()
    everywhere = {name for name, option in options.items() if option.copied or option.homes}
    elsewhere: dict[str, int] = defaultdict(int)
    for move in moves_between(other, plan, task):
        if move.table not in everywhere:
            elsewhere[move.table] += move.width
    differ = (n for n in options if options[n].on_many and options[n] != there.get(n))
    elsewhere |= {name: tables[name].dim for name in differ}
    costs = {n: ms[n] * width / tables[n].dim for n, width in elsewhere.items()}
    share = sum(costs.values()) / sum(alone)
    yield f"  {len(costs)} of {len(ms)} tables, {share:.0%} of the cost, are on other devices"
    if not costs:
        return
    shown = new_table(("  table", "here", "there", "columns elsewhere", "ms"), texts=3)
    for n in sorted(costs, key=lambda n: -costs[n])[:_ELSEWHERE]:
        homes = (_devices(tables[n], of_plan, task) for of_plan in (plan, other))
        shown.add_row(f"  {n}", *homes, str(elsewhere[n]), f"{costs[n]:.2f}")
    if len(costs) > _ELSEWHERE:
        shown.add_row(f"  and {len(costs) - _ELSEWHERE} more", "", "", "", "")
    yield shown


def _devices(table: EmbeddingTable, plan: ShardingPlan, task: ShardingTask) -> str:
    """Returns `device3`, or `device0 (32), device1 (32)` where the table is split."""
    pieces, names = plan.by_table().get(table.name, ()), [device.name for device in task.devices]
    found = ", ".join(
        f"{names[p.device]} to {names[p.devices[-1]]}"
        if len(p.devices) > 1
        else names[p.device] + (f" ({p.width})" if len(pieces) > 1 else "")
        for p in pieces
    )
    option = option_of(plan.all_options(), table.name)
    for way in WAYS:
        if way.taken_by(option):
            found = way.where(option, found)
    return found
