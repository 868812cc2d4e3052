#!/usr/bin/env python
"""Compare sharders on the same tasks by estimated, measured or trained step times."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import tyro

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.mixed_costs import costs_of_machines
from autoshard.cost_model.threads import one_thread
from autoshard.envs import RandomTaskSampler, TableCatalog
from autoshard.envs.task_families import Choice
from autoshard.experiments.console import cli
from autoshard.experiments.console.inputs import check_file, check_folder
from autoshard.experiments.console.machine import PlanningOptions, check_measured_hardware
from autoshard.experiments.evaluation.pages import draw_pictures, write_pages
from autoshard.experiments.evaluation.planners import Planners
from autoshard.experiments.evaluation.report import (
    Evaluation,
    evaluate_estimated,
    score_tables,
    verdict,
)
from autoshard.experiments.evaluation.task_sets import (
    TORCHREC_DEFAULT,
    TaskSet,
    check_task_folder,
    named_folders,
    sample_tasks,
    write_results,
)
from autoshard.experiments.tracking import runs
from autoshard.experiments.tracking.data_sources import short_name, store_source, tables_source
from autoshard.sharders import (
    MEASURE_SECONDS,
    load_policy,
    needs_of,
    open_oracle,
    spec_of,
    usable_sharders,
)
from autoshard.workload import EmbeddingTable, UserError, documents, load_tables
from autoshard.workload.bounds import check_bounds
from autoshard.workload.tables.parts import tables_by_part

_ALL = "all"  # value of --sharders


@dataclass(frozen=True)
class CompareConfig(PlanningOptions):
    """Compare sharders, and plans of other planners, on the same tasks.

    Tasks are sampled or read from a folder. They are sampled from the tables that neither cost
    models nor policies are trained on (20 %), or from all tables if these are too few.
    """

    tables: str | None = None
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    family: str | None = None
    """Family of tasks, such as giants or giants:tight, in place of --tables, --num-tables,
    --num-devices and --memory-fill; docs/policy.md lists them."""
    tasks: Path | None = None
    """Folder of tasks as --save-tasks writes them, in place of --tables. They define the number of
    tables and devices, the memory, the batch size and the objective."""
    save_tasks: Path | None = None
    """Folder into which the tasks are written for other planners: 0.json, 1.json, ..."""
    plans: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=FOLDER: plans of another planner for --tasks, in files named as those of the tasks. A
    task without such a file counts as out of memory. Can be given several times."""
    num_tasks: int = 8
    """Number of tasks to begin with. With --measure, tasks are added where that narrows the
    intervals most."""
    num_tables: int = 60
    """Tables of a task."""
    num_devices: int = 4
    """Devices of a task, up to 4,096."""
    sharders: str = "random,dim,size,lookup,size_lookup,cost,autoshard"
    """Names of sharders, separated by commas, or all that can run here. Those that measure require
    --measure. With --judge training, torchrec_default is TorchRec's planner with all types that it
    offers for the devices."""
    policies: str | None = None
    """NAME=FOLDER,...: further policies. Each makes one plan, as the sharder policy does, with the
    same cost model."""
    batch_size: int = 1024
    """Samples of a batch."""
    memory_fill: float = 0.1
    """Share of all devices' memory that the tables take: 0.1 is loose, 0.9 is tight."""
    seed: int = 0
    """Seed of the tasks, and of sharders that sample."""
    measure: bool = False
    """Measure every shard on the Ray cluster: forward and backward of its fused operator.
    All-to-alls are priced by the objective's link, because CPU ranks share cores. Default: plans
    are priced by the cost model, which some of the sharders use themselves."""
    judge: Literal["costs", "training"] = "costs"
    """Source of step times. costs: the objective's step time. training: the step time when TorchRec
    trains a small model by each plan, in rounds up to --precision or --seconds; excludes
    --measure."""
    precision: float = 0.01
    """With --measure: largest half width of the 95 % intervals of ratios to the best heuristic.
    Measurements are repeated with other index batches, and tasks added, until it is reached. With
    --judge training: that of each plan's step, until which models are built anew and trained."""
    seconds: float = 300.0
    """Time limit in seconds of --measure and --judge training, planning included. The report says
    what was left out."""
    seeds: int = 3
    """Number of index batches for repeated measurements of a shard. With 1, results hold for this
    batch alone. autoshard_verified measures with other batches."""
    verify_seconds: float = MEASURE_SECONDS
    """Time limit in seconds of autoshard_verified for measuring, per task."""
    out: Path | None = None
    """Folder for tasks, plans and pictures."""
    json: Path | None = None
    """File for the scores."""
    mlflow_uri: str | None = None
    """MLflow tracking URI. Default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""

    @property
    def names(self) -> list[str]:
        """Names of the sharders that make plans of ours."""
        return [name for name in self._every_name if name != TORCHREC_DEFAULT]

    @property
    def torchrec_default(self) -> bool:
        """Whether TorchRec's planner takes part with all types that it offers."""
        return TORCHREC_DEFAULT in self._every_name

    @property
    def _every_name(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.sharders.split(",")))

    @property
    def choice(self) -> Choice | None:
        """The family; None with tables or tasks."""
        return None if self.family is None else Choice.read(self.family, "--family")

    @property
    def action(self) -> str:
        """The source of step times."""
        if self.judge == "training":
            return "train"
        return "measure" if self.measure else "estimate"

    @property
    def run_name(self) -> str:
        """Name of the run in MLflow."""
        if self.tasks is not None or self.family is not None:
            return f"{self.action} {self.family or (self.tasks and self.tasks.name)}"
        tables = short_name(str(self.tables))
        return f"{self.action} {self.num_tables} on {self.num_devices}, {tables}"

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        if _ALL in self.names:
            raise UserError(f"--sharders {_ALL} names all sharders: leave out the others")
        measuring = [name for name in self.names if "pool" in spec_of(name).needs]
        if sum(source is not None for source in (self.tables, self.family, self.tasks)) != 1:
            raise UserError(
                "name tables to draw tasks from with --tables, or a folder with --tasks, or a "
                "family of tasks with --family, and only one of them"
            )
        assert self.choice is None or self.choice.name  # reading it raises for a wrong name
        if self.plans and self.tasks is None:
            raise UserError("--plans needs the tasks of the plans: name their folder with --tasks")
        if self.tasks is not None and self.names_objective:
            raise UserError("--tasks define what counts: leave out --objective and --link")
        counts = ("num_tasks", "num_tables", "num_devices", "batch_size", "seeds")
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), "seed": 0},
            more_than=dict.fromkeys(("precision", "seconds", "verify_seconds", "memory_fill"), 0),
            up_to={"memory_fill": 1},
        )
        self.build_objective(self.num_devices)  # raises for wrong options
        self.check_machine()
        if self.judge == "training" and self.measure:
            raise UserError("--measure excludes --judge training: leave one of them out")
        if self.torchrec_default and self.judge != "training":
            raise UserError(
                f"{TORCHREC_DEFAULT} may shard by rows, which no cost model prices: "
                "compare it with --judge training"
            )
        if measuring and not self.measure:
            raise UserError(
                f"sharder {measuring[0]} measures while it plans: add --measure, or leave it out"
            )
        check_file(self.json, "--json")
        check_folder(self.out, "--out")
        check_folder(self.save_tasks, "--save-tasks")
        check_task_folder(self.save_tasks)


@one_thread()  # networks this small gain nothing from several threads, which wait for each other
def main(config: CompareConfig) -> None:
    """Plans the tasks with every sharder, evaluates the plans, and reports the best sharder."""
    if config.names == [_ALL]:
        extra = [TORCHREC_DEFAULT] if config.torchrec_default else []
        names = [*usable_sharders(config.measure), *extra]
        config = replace(config, sharders=",".join(names))
    config.check()
    plans = named_folders("--plans", config.plans, ())
    entries = [] if config.policies is None else config.policies.split(",")
    policies = named_folders("--policies", [entry.strip() for entry in entries], plans)
    policy = load_policy(config.policy)
    others = {name: load_policy(folder) for name, folder in policies.items()}
    task_set, oracle = _task_set(config, plans)
    if config.save_tasks is not None:
        task_set = task_set.saved_to(config.save_tasks)
    used = [policy] if "policy" in needs_of(config.names) else []
    for checked in (*used, *others.values()):
        checked.check(task_set.max_devices)
    planners = Planners(config.names, oracle, policy, config.seed, config.verify_seconds, others)
    if config.judge == "training":
        from autoshard.integration import to_torchrec  # noqa: F401 - says if it is missing
    if config.measure or config.judge == "training":
        from autoshard.benchmark import MeasurementStore

        MeasurementStore(config.store).close()  # fails before the work if it cannot be used
    with runs.tracked_run("compare", config.run_name, asdict(config), config.mlflow_uri) as run:
        found, hardware = _evaluate(config, task_set, planners)
        scores, best = found.scores(oracle, config.measure, config.judge == "training")
        what, subject = _subject(config, found)
        names = [task_set.name(number) for number in range(len(found.tasks))]
        cli.console.print(*score_tables(scores, best, what, subject, names))
        line = verdict(scores, best, what, subject)
        if found.ended:
            cli.say(
                f"{found.ended} ({len(found.tasks)} tasks, {found.repeats} measurements in "
                f"{found.measuring_seconds:.0f} of {found.seconds:.0f} s)"
            )
        figures = {
            "sharders": {name: asdict(score) for name, score in scores.items()},
            "best_heuristic": best,
            "tasks": len(found.tasks),
            "task_names": names,
            "devices": task_set.max_devices,
            "tables": max(len(task.tables) for task in found.tasks),
            "measured": config.measure,
            "trained": config.judge == "training",
            "batch_size": oracle.batch_size,
            "objectives": [one.to_json() for one in {task.objective: 0 for task in found.tasks}],
            "memory_fill": None if config.tables is None else config.memory_fill,
            "seconds": found.seconds,
            "measuring_seconds": found.measuring_seconds,
            "visits": found.repeats,
            "ended": found.ended,
            "policy": str(config.policy),
            "policies": {name: str(folder) for name, folder in policies.items()},
            "cost_model": str(config.hardware if config.data_sheet else config.model_source),
            "hardware": hardware,
        }
        with ExitStack() as stack:
            folder = config.out or Path(stack.enter_context(TemporaryDirectory()))
            estimated = config.action == "estimate"
            pages = write_pages(folder / "plans", found, oracle, names) if estimated else ()
            plans_of = {name: [o.plan for o in of] for name, of in found.outcomes.items()}
            for path in (
                *write_results(folder, found.tasks, plans_of),
                *pages,
                *draw_pictures(folder / "pictures", found, scores, what, subject),
            ):
                run.artifact(path, path.parent.relative_to(folder).as_posix())
            documents.write(folder / "compare.json", figures)
            run.artifact(folder / "compare.json")
        for name, score in scores.items():
            run.metrics({f"{field}/{name}": value for field, value in score.metrics.items()})
            known = [(n, ratio) for n, ratio in enumerate(score.task_ratios) if ratio is not None]
            run.curve(f"task_ratio/{name}", [n for n, _ in known], [ratio for _, ratio in known])
        run.tags({"hardware": hardware, "num_devices": task_set.max_devices})
        source = str(config.tables or config.tasks or config.family)
        run.data(tables_source(source, task_set.tables))
        if config.measure:
            run.data(store_source(config.store))
        run.note(line)
        if config.json is not None:
            documents.write(config.json, figures)
    cli.say(line)


def _task_set(config: CompareConfig, plans: Mapping[str, Path]) -> tuple[TaskSet, EstimatedCosts]:
    """Returns the tasks and their oracle; UserError if it cannot price them.

    Files are read before the cost model, for which this machine may be probed.
    """
    if config.tasks is not None:
        task_set = TaskSet.read(config.tasks, plans)
        model = config.model_for(task_set.first.operator)
        with documents.naming(config.tasks):
            first, ranks = task_set.first, task_set.common_ranks
            priced = model.for_objective(first.objective, ranks)
            oracle = open_oracle(priced, task_set.first.batch_size, task_set.tables)
            oracle.check(task_set.first)
        price = oracle.common(task_set.first)
        for name, found in task_set.plans.items():
            with documents.naming(plans[name]):
                for plan in filter(None, found):
                    price.check(plan)
        return task_set, oracle
    tables, fill = _tables(config), (config.memory_fill, config.memory_fill)
    sampler = (
        RandomTaskSampler((config.num_tables,) * 2, (config.num_devices,) * 2, fill)
        if config.choice is None
        else config.choice.task_sampler
    )
    devices = config.num_devices if config.choice is None else None
    model = config.priced(config.model_for(), devices)
    oracle = open_oracle(model, config.batch_size, tables)
    if config.choice is not None and config.choice.family.mixed and config.action == "estimate":
        oracle = costs_of_machines(model, config.batch_size)
    objective = config.build_objective(sampler.max_devices, model)
    # Links that a family samples count unless one is given.
    tasks = (
        replace(task, objective=replace(objective, link=task.objective.link or objective.link))
        if config.link is None and objective.name != "compute"
        else replace(task, objective=objective)
        for task in sample_tasks(
            TableCatalog(oracle, [t.whole() for t in tables]), sampler, config.seed
        )
    )
    return TaskSet.sampled(tasks, config.num_tasks, tables, sampler.max_devices), oracle


def _tables(config: CompareConfig) -> list[EmbeddingTable]:
    """Returns the tables to sample tasks from: those of the test part if they suffice."""
    if config.choice is not None:
        return tables_by_part(config.choice.family.tables())["test"]
    tables = load_tables(str(config.tables))
    if config.num_tables > len(tables):
        raise UserError(
            f"--num-tables {config.num_tables} is more than the {len(tables)} tables of "
            f"{config.tables}: choose a smaller number"
        )
    unseen = tables_by_part(tables)["test"]
    if config.num_tables <= len(unseen):
        return unseen
    cli.note(
        f"{config.tables} has {len(unseen)} tables that models and policies are not trained on, "
        f"too few for tasks of {config.num_tables}: all {len(tables)} are used"
    )
    return list(tables)


def _evaluate(
    config: CompareConfig, task_set: TaskSet, planners: Planners
) -> tuple[Evaluation, str]:
    """Returns the evaluation, and the hardware of its step times."""
    if config.action == "estimate":
        found = evaluate_estimated(task_set, planners)
        return found, planners.oracle.model.provenance.hardware
    from autoshard.experiments.console.ray_cluster import measuring_pool, ray_cluster
    from autoshard.experiments.evaluation.evaluator import Limits

    limits = Limits(config.precision, config.seconds)
    if config.action == "train":
        from autoshard.experiments.evaluation.trained import evaluate_trained

        with ray_cluster():
            return evaluate_trained(
                task_set,
                planners,
                limits,
                config.store,
                config.devices,
                config.torchrec_default,
            )
    from autoshard.experiments.evaluation.evaluator import evaluate_measured

    with measuring_pool(config.store, config.devices) as pool:
        check_measured_hardware(planners.oracle.model, pool.devices()[0].hardware)
        found = evaluate_measured(task_set, planners, pool, limits, config.seeds)
        return found, pool.devices()[0].hardware


def _subject(config: CompareConfig, found: Evaluation) -> tuple[str, str]:
    """Returns the objective with the source of its times, and what is timed."""
    if config.action == "train":
        return f"objective {found.tasks[0].objective}; with TorchRec", "training step"
    source = "measured" if config.measure else "estimated, not measured"
    first, *others = {task.objective: 0 for task in found.tasks}
    objective = f"{first.name}, each task with its own link" if others else str(first)
    return f"objective {objective}; {source}", "step"


if __name__ == "__main__":
    cli.run_command(main, CompareConfig)
