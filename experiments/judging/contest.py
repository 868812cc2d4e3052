"""What is compared: tasks that are drawn or read from a folder, plans of ours and of others."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from autoshard.experiments.judging.judge import Entry
from autoshard.experiments.judging.outcomes import Outcome, plan_task
from autoshard.sharders import SHARDERS
from autoshard.workload import (
    EmbeddingTable,
    Sharder,
    ShardingPlan,
    ShardingTask,
    UserError,
    documents,
)

_TASKS, _PLANS = "tasks", "plans"  # folders of results


@dataclass(frozen=True)
class Contest:
    """Tasks in order, without end if they are drawn, and what others have made of them.

    Args:
        first: of the tasks.
        tasks: all of them, of one batch size, operator and objective.
        begin: how many of them to begin with.
        tables: that they hold, or may.
        most_devices: of the largest.
        plans: of other planners: of each task a plan, or None.
    """

    first: ShardingTask
    tasks: Iterator[ShardingTask]
    begin: int
    tables: Sequence[EmbeddingTable]
    most_devices: int
    plans: Mapping[str, Sequence[ShardingPlan | None]] = field(default_factory=dict)

    @staticmethod
    def drawn(
        tasks: Iterator[ShardingTask], begin: int, tables: Sequence[EmbeddingTable], devices: int
    ) -> "Contest":
        """Of tasks that are dealt."""
        first = next(tasks)
        return Contest(first, chain([first], tasks), begin, tables, devices)

    @staticmethod
    def read(folder: Path, others: Mapping[str, Path]) -> "Contest":
        """Of a folder of tasks, and folders of plans for them."""
        tasks = load_tasks(folder)
        plans = {name: load_plans(where, tasks) for name, where in others.items()}
        tables = {t.whole().digest: t for task in tasks.values() for t in task.tables}
        return Contest(
            next(iter(tasks.values())),
            iter(tasks.values()),
            len(tasks),
            list(tables.values()),
            max(len(task.devices) for task in tasks.values()),
            {name: [some.get(file) for file in tasks] for name, some in plans.items()},
        )

    def entries(
        self,
        sharders: Mapping[str, Sharder],
        save: Path | None = None,
        measuring: Callable[[], float] = lambda: 0.0,
    ) -> Iterator[Entry]:
        """Tasks with the plans of all, made when they are asked for; tasks are saved as they come.

        `measuring` tells how many seconds sharders have spent measuring so far.
        """
        for number, task in enumerate(self.tasks):
            if save is not None:
                save_task(save, number, task)
            theirs = {name: Outcome(some[number]) for name, some in self.plans.items()}
            yield Entry(task, plan_task(sharders, task, measuring) | theirs)


def load_tasks(folder: Path) -> dict[str, ShardingTask]:
    """The tasks of a folder by the names of their files, in order: 2.json before 10.json.

    UserError names the file that is not a task, or not for the batch, operator and objective of the
    others.
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
        for what in ("batch_size", "operator"):
            if getattr(task, what) != getattr(first, what):
                raise UserError(
                    f"{folder / file}: its {what.replace('_', ' ')} is not that of {first_file}: "
                    "compare tasks of one batch size and operator at a time"
                )
        if task.objective.name != first.objective.name:
            raise UserError(
                f"{folder / file}: its objective is {task.objective.name}, that of {first_file} "
                f"is {first.objective.name}: compare tasks of one objective at a time"
            )
    return tasks


def check_task_folder(folder: Path | None) -> None:
    """UserError if tasks are to be saved among others."""
    if folder is not None and any(folder.glob("*.json")):
        raise UserError(f"{folder}: holds tasks already: name another folder for --save-tasks")


def save_task(folder: Path, number: int, task: ShardingTask) -> Path:
    """Write a task as `load_tasks` reads it; returns the file."""
    file = folder / f"{number}.json"
    task.save(file)
    return file


def named_folders(option: str, given: Sequence[str], taken: Collection[str]) -> dict[str, Path]:
    """The folders of an option of NAME=FOLDER; UserError if one is no such thing, or its name one
    that a sharder or something else has.
    """
    found: dict[str, Path] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder or not name.isprintable() or "/" in name:
            raise UserError(f"{option} must be NAME=FOLDER, got {one!r}")
        if name in SHARDERS or name in taken or name in found:
            raise UserError(f"{option} {one}: {name!r} is taken: choose another name")
        found[name] = Path(folder)
    return found


def load_plans(folder: Path, tasks: Mapping[str, ShardingTask]) -> dict[str, ShardingPlan]:
    """The plans of a folder, which are called as their tasks; some may be missing.

    UserError names the file that is not a plan, or does not fit its task.
    """
    found = {}
    for name, task in tasks.items():
        if (folder / name).is_file():
            found[name] = ShardingPlan.load(folder / name)
            with documents.naming(folder / name):
                found[name].check(task)
    if not found:
        raise UserError(
            f"{folder}: holds a plan for none of the tasks: plans are called as the files of tasks "
            f"are, such as {next(iter(tasks))}"
        )
    return found


def write_results(
    folder: Path, tasks: Sequence[ShardingTask], plans: Mapping[str, Sequence[ShardingPlan | None]]
) -> Iterator[Path]:
    """Write tasks and plans as this module reads them; the files."""
    for number, task in enumerate(tasks):
        yield save_task(folder / _TASKS, number, task)
    for name, some in plans.items():
        for number, plan in enumerate(some):
            if plan is not None:
                file = folder / _PLANS / name / f"{number}.json"
                plan.save(file)
                yield file
