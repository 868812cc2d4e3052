"""Output of a training: a line per iteration, curves in MLflow, and a test at the end."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from rich.table import Table

from autoshard.benchmark import MeasurementStore
from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import Notices
from autoshard.experiments.evaluation.planners import (
    Planners,
    best_heuristic,
    best_of_each,
    steps_of,
)
from autoshard.experiments.evaluation.ratio import Ratio, relative
from autoshard.experiments.tracking.runs import TrackedRun
from autoshard.experiments.training.loop import Training
from autoshard.experiments.training.policy_evaluation import (
    PolicyEvaluator,
    unseen_tables,
    unseen_tasks,
)
from autoshard.experiments.training.run_folder import policy_files
from autoshard.sharders import Policy, load_policy
from autoshard.sharders.explaining.summary import new_table

TEST_SEED = 1000  # not used by evaluation
_TEST_TASKS = 8

# Names in MLflow of an iteration's metrics. MLflow groups charts by the part before the slash.
_CURVES = {
    "check_over_heuristic": "check/over_best_heuristic",
    "check_without_plan": "check/without_plan",
    "check_memory_mb": "check/memory_mb",
    "check_planning_ms": "check/planning_ms",
    "step_over_bound": "episodes/step_over_bound",
    "episode_return": "episodes/return",
    "infeasible": "episodes/infeasible",
    "entropy": "ppo/entropy",
    "policy_loss": "ppo/policy_loss",
    "value_loss": "ppo/value_loss",
    "value_explained": "ppo/value_explained",
    "requested_shards": "measured/shards",
    "new_shards": "measured/learned_from",
    "cost_model_error": "measured/cost_model_error",
    "steps": "work/steps",
    "seconds": "work/seconds",
}


def curves(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns an iteration's metrics by their names in MLflow."""
    return {curve: metrics[name] for name, curve in _CURVES.items() if name in metrics}


class TrainingReport:
    """Prints the progress of a training, and logs it to a run of MLflow."""

    def __init__(self, training: Training, run: TrackedRun) -> None:
        self._training, self._run = training, run
        self._lines: list[dict[str, float]] = []
        self._notices = Notices()
        self._began = (time.time(), time.monotonic())  # measurements say the time of day

    def introduce(self) -> None:
        """Prints and logs what is trained."""
        training, config, pool = self._training, self._training.config, self._training.pool
        tables = len(training.setup.parts["train"])
        measured = f", measured on {len(pool.devices())} devices" if pool else ""
        cli.say(
            f"training on {tables} tables of {config.source}: tasks of {config.task_description}, "
            f"{config.reward} rewards{measured}"
        )
        if not config.choices and config.task_sampler().max_tables > tables:
            cli.note(f"tasks have at most {tables} tables, which is the number of training tables")
        if training.progress.iteration:
            cli.say(f"resuming after iteration {training.progress.iteration}")
        self._run.tags(
            {"hardware": training.model.provenance.hardware, "num_devices": config.num_devices}
        )

    def iteration(self, metrics: dict[str, float]) -> None:
        """Prints and logs an iteration's metrics, and prints the pool's new notices."""
        number, pool = self._training.progress.iteration, self._training.pool
        before = self._lines[-1]["steps"] if self._lines else 0.0
        self._lines.append(metrics)
        self._run.metrics(curves(metrics), step=number)
        if "new_shards" in metrics:
            cli.say(
                f"  the cost model was adapted to {metrics['new_shards']:.0f} new shards; its "
                f"median error on them was {metrics['cost_model_error']:.1%}"
            )
        line = (
            f"{number:4}/{self._training.config.max_iterations}  {metrics['steps']:9,.0f} steps  "
            f"max/bound {metrics['step_over_bound']:.4f}  infeasible {metrics['infeasible']:.0f} "
            f"of {metrics['episodes']:.0f}  {metrics['requested_shards']:.0f} shards measured  "
            f"{metrics['seconds']:.1f} s"
        )
        if before:
            line += f"  {(metrics['steps'] - before) / metrics['seconds']:,.0f} steps/s"
        if "check_over_heuristic" in metrics:
            line += (
                f"  unseen tables: {metrics['check_over_heuristic']:.4f} of the best heuristic, "
                f"{metrics['check_without_plan']:.0f} without a plan"
            )
        cli.say(line)
        if pool is not None:
            self._notices.print_new(pool)

    def test(self) -> dict[str, Any]:
        """Compares the kept policy with heuristics on test tables; returns the run's result."""
        training, folder = self._training, self._training.folder.folder
        busy = self._pool_busy()
        policy, model = load_policy(folder), training.model
        drawn = unseen_tasks(replace(training.setup, model=model), "test", TEST_SEED)
        tasks = list(islice(drawn, _TEST_TASKS))
        outcomes = PolicyEvaluator(tasks, training.config.seed).outcomes(policy, model)
        steps = steps_of(outcomes)
        best, references = best_heuristic(steps), best_of_each(steps)
        assert best is not None  # all heuristics are among them
        found = {name: relative(values, references) for name, values in steps.items()}
        ratios = {name: ratio for name, ratio in found.items() if ratio is not None}
        cli.console.print(_test_table(steps, ratios))
        self._run.metrics({f"test/{name}": ratio.value for name, ratio in ratios.items()})
        self._run.note(self._summary(ratios))
        oracle = EstimatedCosts(model, tasks[0].batch_size)
        for name in (best, "policy", "autoshard"):
            plan = outcomes[name][0].plan
            if plan is not None:
                self._run.plan(name, plan, oracle.plan_cost(plan, tasks[0]))
        if (named := training.config.register) is None:
            self._run.model(policy_files(folder), "policy")
        else:
            tags = {"hardware": model.provenance.hardware}
            version = self._run.register(policy_files(folder), named, tags, "policy")
            cli.say(f"the policy is in MLflow as {named} version {version}")
        self._run.artifact(training.folder.checkpoint(), "checkpoint")
        if self._lines:
            self._run.metrics(
                {"work/pool_busy": busy, "work/train_seconds": training.progress.seconds}
            )
        return {
            "iterations": training.progress.iteration,
            "left_out": training.remaining_iterations,
            "env_steps": self._lines[-1]["steps"] if self._lines else 0,
            "seconds": training.progress.seconds,
            "iterations_here": [
                {name: value if math.isfinite(value) else None for name, value in line.items()}
                for line in self._lines
            ],
            "pool_busy": busy,
            "best_check": training.progress.best_check,
            "test_over_best_heuristic": {
                name: None if ratio is None else ratio.value for name, ratio in found.items()
            },
            "test_of_tasks": {name: ratio.of_tasks for name, ratio in ratios.items()},
            "test_interval": {name: (ratio.low, ratio.high) for name, ratio in ratios.items()},
            "test_max_ms": steps,
            "test_measured": self._test_measured(policy, model, best),
            "best_heuristic": best,
            "policy": str(folder),
            "mlflow_run": self._run.run_id,
        }

    def _test_measured(
        self, policy: Policy, model: CostModel, heuristic: str
    ) -> dict[str, Any] | None:
        """Measures plans for up to --test-seconds; returns scores, or None without measurements."""
        training = self._training
        pool, config = training.pool, training.config
        if pool is None or not config.test_seconds:
            return None
        # Loads Ray's pool, which is not needed if all costs are estimated.
        from autoshard.experiments.evaluation.evaluator import (
            Limits,
            OutOfTimeError,
            evaluate_measured,
        )
        from autoshard.experiments.evaluation.report import score_tables, verdict
        from autoshard.experiments.evaluation.task_sets import TaskSet

        oracle = EstimatedCosts(model, config.batch_size)
        task_set = TaskSet.sampled(
            unseen_tasks(replace(training.setup, model=model), "test", TEST_SEED),
            _TEST_TASKS,
            unseen_tables(training.setup.parts, "test"),
            config.task_sampler().max_devices,
        )
        names = (heuristic, "cost_fused", "policy", "autoshard")
        planners = Planners(names, oracle, policy, config.seed)
        try:
            limits = Limits(seconds=config.test_seconds)
            found = evaluate_measured(task_set, planners, pool, limits)
        except OutOfTimeError:
            cli.note(
                f"the test was not measured: --test-seconds {config.test_seconds:g} were over "
                "before all plans of one task were measured"
            )
            return None
        scores, best = found.scores(oracle, measured=True)
        cli.console.print(*score_tables(scores, best, "measured"))
        cli.say(verdict(scores, best, "measured"))
        self._run.metrics(
            {f"test_measured/{n}": s.ratio for n, s in scores.items() if s.ratio is not None}
        )
        return {name: asdict(score) for name, score in scores.items()}

    def _summary(self, ratios: Mapping[str, Ratio]) -> str:
        """Returns Markdown for the run's page."""
        config = self._training.config
        rows = "".join(
            f"| {name} | {ratios[name].value:.3f} | {ratios[name].low:.3f} to "
            f"{ratios[name].high:.3f} |\n"
            for name in ("autoshard", "policy", "cost_fused")
            if name in ratios
        )
        return (
            f"A policy that shards {config.task_description}, of `{config.source}`.\n\n"
            "| sharder | step time over each task's best heuristic, unseen tables "
            f"| 95% CI |\n|---|---|---|\n{rows}"
        )

    def _pool_busy(self) -> float:
        """Returns the share of the devices' time inside timed operators in this process."""
        pool, (began, started) = self._training.pool, self._began
        if pool is None or not self._lines:
            return 0.0
        with MeasurementStore(pool.store) as store:
            fresh = [m for m in store.measurements() if m.measured_at >= began]
        busy = sum(m.timing.operator_seconds for m in fresh if m.timing is not None)
        return busy / ((time.monotonic() - started) * len(pool.devices()))


def _test_table(steps: Mapping[str, list[float | None]], ratios: Mapping[str, Ratio]) -> Table:
    """Returns a table with a row for each sharder, the best first."""
    shown = new_table(("sharder", "ratio", "95% CI", "least", "largest", "no plan"))
    count = len(next(iter(steps.values())))
    shown.title = f"{count} tasks of unseen tables: predicted step time over the best heuristic's"
    shown.title_justify = "left"
    for name in sorted(steps, key=lambda n: ratios[n].value if n in ratios else math.inf):
        told = ["-"] * 4
        if name in ratios:
            ratio = ratios[name]
            known = [each for each in ratio.of_tasks if each is not None]
            told = [f"{each:.3f}" for each in (ratio.value, min(known), max(known))]
            told.insert(1, f"{ratio.low:.3f} to {ratio.high:.3f}")
        shown.add_row(name, *told, str(steps[name].count(None)))
    return shown
