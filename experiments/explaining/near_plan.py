"""A plan near the one in use: what it moves, and what that brings."""

from pathlib import Path

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.experiments.console.inputs import read_plan
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.explaining.diff import present_step
from autoshard.sharders import IncrementalSharder
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.plans.moves import moved_bytes, moves_between
from autoshard.workload.sizes import format_bytes


def plan_near(
    path: Path,
    task: ShardingTask,
    oracle: EstimatedCosts,
    max_bytes: int,
    options: ObjectiveOptions,
    seed: int,
) -> tuple[ShardingPlan, str]:
    """Returns a plan that improves the one in use, and a line about what moves.

    Args:
        path: File of the plan in use, for any number of devices.
        task: The task.
        oracle: Predicts costs.
        max_bytes: Most bytes that may move beside those that have to.
        options: The objective, for the number of devices of the plan in use.
        seed: Seed of the search.
    """
    old = read_plan(path, task, fitting=True, any_devices=True)
    sharder = IncrementalSharder(oracle, old, max_bytes, seed)
    plan = sharder.shard(task)
    moves, has_to = moves_between(old, plan, task), moves_between(old, sharder.start(task), task)
    chosen = moved_bytes(moves) - moved_bytes(has_to)
    beside, present = "", "the present one"
    if old.num_devices != len(task.devices):
        beside = f"{format_bytes(moved_bytes(has_to))} that have to move, and "
        present += f" on {old.num_devices} devices"
    than = StepPredictor(oracle, task).of(plan).over(present_step(options, oracle, old, task))
    return plan, (
        f"near {path}: {len(moves)} moves, {beside}{format_bytes(chosen)} of at most "
        f"{format_bytes(max_bytes)}; predicted step time {than.ratio:.3f} of {present} "
        f"({than.low:.3f} to {than.high:.3f})"
    )
