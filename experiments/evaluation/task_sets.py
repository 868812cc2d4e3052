"""Tasks of a comparison, sampled or read from a folder, and plans of other planners for them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np

from autoshard.envs import TableCatalog, TaskSampler
from autoshard.sharders import SHARDERS
from autoshard.workload import EmbeddingTable, ShardingPlan, ShardingTask, UserError, documents

TORCHREC_DEFAULT = "torchrec_default"  # TorchRec's planner with all types that it offers
_TASKS, _PLANS = "tasks", "plans"  # folders of results


@dataclass(frozen=True)
class TaskSet:
    """Tasks in order, and the plans of other planners for them."""

    first: ShardingTask  # the first task
    # all tasks, of one batch size, operator and objective; endless if sampled
    tasks: Iterator[ShardingTask]
    begin: int  # number of tasks to begin with
    tables: Sequence[EmbeddingTable]  # tables of the tasks, or those that they are sampled from
    max_devices: int  # devices of the largest task
    common_ranks: int = 1  # devices of all tasks, if these and their links are alike; else 1
    # plans of other planners by name, one or None per task
    plans: Mapping[str, Sequence[ShardingPlan | None]] = field(default_factory=dict)
    names: Sequence[str] = ()  # names of the tasks' files; empty if sampled

    def name(self, number: int) -> str:
        """Returns the name of a task: that of its file, or its number."""
        return self.names[number] if self.names else str(number)

    @staticmethod
    def sampled(
        tasks: Iterator[ShardingTask], begin: int, tables: Sequence[EmbeddingTable], devices: int
    ) -> "TaskSet":
        """Returns a set of sampled tasks."""
        first = next(tasks)
        return TaskSet(first, chain([first], tasks), begin, tables, devices)

    @staticmethod
    def read(folder: Path, others: Mapping[str, Path]) -> "TaskSet":
        """Returns the tasks of a folder, with plans for them from other folders."""
        tasks = load_tasks(folder)
        plans = {name: load_plans(plan_folder, tasks) for name, plan_folder in others.items()}
        tables = {t.whole().digest: t for task in tasks.values() for t in task.tables}
        ranks = {(len(task.devices), task.objective.link) for task in tasks.values()}
        return TaskSet(
            next(iter(tasks.values())),
            iter(tasks.values()),
            len(tasks),
            list(tables.values()),
            max(len(task.devices) for task in tasks.values()),
            min(ranks)[0] if len(ranks) == 1 else 1,
            {name: [found.get(file) for file in tasks] for name, found in plans.items()},
            [file.removesuffix(".json") for file in tasks],
        )

    def saved_to(self, folder: Path) -> "TaskSet":
        """Returns the set with tasks that are written to a folder as they are taken."""

        def saved() -> Iterator[ShardingTask]:
            for number, task in enumerate(self.tasks):
                save_task(folder, number, task)
                yield task

        return replace(self, tasks=saved())


def sample_tasks(
    catalog: TableCatalog, task_sampler: TaskSampler, seed: int
) -> Iterator[ShardingTask]:
    """Yields endless tasks that the sampler draws from the catalog's tables."""
    rng = np.random.default_rng(seed)
    while True:
        yield catalog.task(task_sampler.sample(catalog, rng, 1)[0])


def load_tasks(folder: Path) -> dict[str, ShardingTask]:
    """Returns the tasks of a folder by file name, 2.json before 10.json.

    Raises:
        UserError: A file is no task, or its batch size, operator or objective differs from that of
            the first.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder of tasks, as --save-tasks writes them")
    files = sorted(folder.glob("*.json"), key=lambda file: (len(file.stem), file.stem))
    tasks = {file.name: ShardingTask.load(file) for file in files}
    if not tasks:
        raise UserError(
            f"{folder}: holds no tasks: --save-tasks writes them as 0.json, 1.json, ..."
        )
    first_file, first = next(iter(tasks.items()))
    for file, task in tasks.items():
        for what in ("batch_size", "operator", "objective.name"):
            value, expected = attrgetter(what)(task), attrgetter(what)(first)
            if value != expected:
                name = what.removesuffix(".name").replace("_", " ")
                raise UserError(
                    f"{folder / file}: its {name} is {value}, that of {first_file} is {expected}: "
                    f"compare tasks with one {name} at a time"
                )
    return tasks


def load_plans(folder: Path, tasks: Mapping[str, ShardingTask]) -> dict[str, ShardingPlan]:
    """Returns the plans of a folder by file name, which is that of the task.

    Raises:
        UserError: A file is no plan, a plan is not valid for its task, or there is no plan.
    """
    found = {}
    for name, task in tasks.items():
        if (folder / name).is_file():
            found[name] = ShardingPlan.load(folder / name)
            with documents.naming(folder / name):
                found[name].check(task)
    if not found:
        raise UserError(
            f"{folder}: holds a plan for none of the tasks: name its files as those of the tasks, "
            f"such as {next(iter(tasks))}"
        )
    return found


def check_task_folder(folder: Path | None) -> None:
    """Raises UserError if the folder for tasks is not empty of tasks."""
    if folder is not None and any(folder.glob("*.json")):
        raise UserError(f"{folder}: holds tasks already: name another folder for --save-tasks")


def named_folders(option: str, given: Sequence[str], taken: Collection[str]) -> dict[str, Path]:
    """Returns the folders of an option NAME=FOLDER by name.

    Raises:
        UserError: A value is not of that form, or its name is that of a sharder or in `taken`.
    """
    found: dict[str, Path] = {}
    for value in given:
        name, _, folder = value.partition("=")
        if not name or not folder or not name.isprintable() or "/" in name:
            raise UserError(f"{option} must be NAME=FOLDER, got {value!r}")
        if name.partition(":")[0] in SHARDERS or name in {*taken, *found}:
            raise UserError(f"{option} {value}: {name!r} is taken: choose another name")
        found[name] = Path(folder)
    return found


def save_task(folder: Path, number: int, task: ShardingTask) -> Path:
    """Writes a task as `load_tasks` reads it; returns the file."""
    file = folder / f"{number}.json"
    task.save(file)
    return file


def write_results(
    folder: Path, tasks: Sequence[ShardingTask], plans: Mapping[str, Sequence[ShardingPlan | None]]
) -> Iterator[Path]:
    """Writes tasks and plans as this module reads them; yields the files."""
    for number, task in enumerate(tasks):
        yield save_task(folder / _TASKS, number, task)
    for name, of_tasks in plans.items():
        for number, plan in enumerate(of_tasks):
            if plan is not None:
                file = folder / _PLANS / name / f"{number}.json"
                plan.save(file)
                yield file
