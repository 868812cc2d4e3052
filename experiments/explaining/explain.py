"""Why a plan takes as long as it does, what would help next, and how a heuristic's differs."""

from collections import defaultdict
from collections.abc import Iterator

from autoshard.benchmark import PlanCost
from autoshard.cost_model import EstimatedCosts, StepPredictor, slowest_by_phase
from autoshard.experiments.explaining.plan_report import Baseline, Part, format_columns, report
from autoshard.sharders import Step, next_steps
from autoshard.workload import EmbeddingTable, ShardingPlan, ShardingTask
from autoshard.workload.moves import moves_between, renumbered

_DEAREST = 3  # slices that are named of each phase's slowest device
_MIN_MS = 0.005  # of a slice that is named: less reads 0.00
_STEPS = 5
_ELSEWHERE = 5  # tables that are named as lying elsewhere


def explanation(
    oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan, best: Baseline | None
) -> Iterator[Part]:
    """All of it, part by part as it is found."""
    yield from phases(oracle, task, plan)
    yield from steps(oracle, task, plan)
    if best is not None:
        yield from differences(oracle, task, plan, best)


def phases(oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan) -> Iterator[Part]:
    """The slowest device of each phase, and its dearest slices."""
    yield (
        "\nthe slowest device of each phase, and its dearest tables: what it would take less "
        f"without each (such shares need not add up to 100%); what counts is {task.objective}"
    )
    shown = report(("phase, device", "columns", "ms", "share", "mean device"), texts=2)
    dims = plan.columns(task)
    for phase in slowest_by_phase(oracle, plan, task):
        sent = f"{dims[phase.device]:,} of {sum(dims):,} sent" if phase.is_exchange else ""
        name = f"{phase.phase}: {task.devices[phase.device].name}"
        shown.add_row(name, sent, f"{phase.ms:.2f}", "", f"{phase.mean_ms:.2f}", style="bold")
        dearest = [each for each in phase.pieces if each.ms >= _MIN_MS]
        for each in dearest[:_DEAREST]:
            piece = each.piece
            told = format_columns(piece.table, piece.start, piece.width)
            shown.add_row(f"  {piece.table.name}", told, f"{each.ms:.2f}", f"{each.share:.1%}", "")
        if dearest and (left := len(phase.pieces) - len(dearest[:_DEAREST])):
            shown.add_row(f"  and {left} more", "", "", "", "")
    yield shown


def steps(oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan) -> Iterator[Part]:
    """The best next steps from a plan, a line each."""
    found = next_steps(oracle, task, plan, _STEPS)
    if not found:
        yield (
            "\nnext steps: no single move, swap or split makes a step shorter, by the cost model"
        )
        return
    now_ms = StepPredictor(oracle, task).expected_ms(plan.placed(task))
    yield f"\nnext steps, each alone: a step takes, in place of {now_ms:.2f} ms,"
    for step in found:
        gain = step.expected_ms / now_ms - 1
        yield f"  {step.expected_ms:.2f} ms ({gain:+.1%}): {_told(step, task)}"


def _told(step: Step, task: ShardingTask) -> str:
    """In words: who goes where."""
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
) -> Iterator[Part]:
    """How a plan differs from a heuristic's: in costs, and which tables lie elsewhere.

    Like devices are taken for each other where that leaves less to differ.
    """
    name = best.name
    whole = [table.whole() for table in task.tables]
    alone = oracle.model.compute.described(oracle.amounts(whole))[:, :2].sum(-1).tolist()
    ms = {table.name: cost for table, cost in zip(task.tables, alone, strict=True)}
    other = renumbered(best.plan, plan, task, lambda t, width: ms[t.name] * width / t.dim)
    yield f"\nbeside the best heuristic's plan, {name} (like devices are taken for each other):"
    yield _evenness(oracle.plan_cost(plan, task), oracle.plan_cost(other, task), name)
    tables = {table.name: table for table in task.tables}
    elsewhere: dict[str, int] = defaultdict(int)
    for move in moves_between(other, plan, task):
        elsewhere[move.table] += move.width
    dear = {n: ms[n] * width / tables[n].dim for n, width in elsewhere.items()}
    share = sum(dear.values()) / sum(alone)
    yield f"  {len(dear)} of {len(ms)} tables, {share:.0%} of the cost, lie elsewhere"
    if not dear:
        return
    shown = report(("  table", "here", "there", "columns elsewhere", "ms"), texts=3)
    for each in sorted(dear, key=lambda n: -dear[n])[:_ELSEWHERE]:
        here, there = (_homes(some, tables[each], task) for some in (plan, other))
        shown.add_row(f"  {each}", here, there, str(elsewhere[each]), f"{dear[each]:.2f}")
    if len(dear) > _ELSEWHERE:
        shown.add_row(f"  and {len(dear) - _ELSEWHERE} more", "", "", "", "")
    yield shown


def _homes(plan: ShardingPlan, table: EmbeddingTable, task: ShardingTask) -> str:
    """`device3`, or `device0 (32), device1 (32)` where it is split."""
    mine = [p for p in plan.placements if p.table == table.name]
    if len(mine) == 1:
        return task.devices[mine[0].device].name
    return ", ".join(f"{task.devices[p.device].name} ({p.width})" for p in mine)


def _evenness(ours: PlanCost, theirs: PlanCost, name: str) -> str:
    """Whether the gain is from evener devices or from tables that run well together."""
    return (
        f"  devices spend {ours.mean_ms:.2f} ms in the mean, {ours.balance:.3f} of the step; by "
        f"{name} {theirs.mean_ms:.2f} ms, {theirs.balance:.3f} of it"
    )
