"""Predicts the step of a plan in use."""

from dataclasses import replace

from autoshard.cost_model import EstimatedCosts, StepPrediction, StepPredictor
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.workload import ShardingPlan, ShardingTask


def present_step(
    options: ObjectiveOptions, oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask
) -> StepPrediction:
    """Predicts the step of a plan in use, on the devices that it is for.

    On another number of devices than the task has, it is priced by the link for so many; the time
    of the dense part is taken to be proportional to the samples of a device.
    """
    ranks, last = plan.num_devices, len(task.devices) - 1
    if ranks != len(task.devices):
        objective = options.for_devices(ranks).build_objective(ranks, oracle.model)
        dense_ms = objective.dense_ms * len(task.devices) / ranks
        task = replace(
            task,
            devices=tuple(task.devices[min(number, last)] for number in range(ranks)),
            rules=(),
            objective=replace(objective, dense_ms=dense_ms),
        )
        oracle = oracle.for_objective(task.objective, ranks)
    return StepPredictor(oracle, task).of(plan)
