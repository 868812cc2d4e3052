#!/usr/bin/env python
"""Compare sharders: the same tasks for all of them, their plans measured one beside the other."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import tyro

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.hardware import cpu_fingerprint
from autoshard.cost_model import CostModel, EstimatedCosts, load_model
from autoshard.cost_model.training import one_thread
from autoshard.envs import Deck, Generator, RandomDeals
from autoshard.envs.task_families import Choice
from autoshard.experiments import tracking
from autoshard.experiments.console import cli
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.console.outputs import check_file, check_folder
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.judging.contest import (
    Contest,
    check_task_folder,
    named_folders,
    write_results,
)
from autoshard.experiments.judging.contestants import (
    Contestants,
    judge_estimated,
    judge_measured,
    scores_of,
)
from autoshard.experiments.judging.judge import Judgement, Limits
from autoshard.experiments.judging.score_report import (
    PRICED,
    TRAINED,
    Subject,
    best_sharder,
    score_picture,
    score_table,
    verdict,
)
from autoshard.experiments.judging.scores import Score
from autoshard.experiments.judging.shard_visits import SEEDS, plan_pool
from autoshard.experiments.judging.trained import judge_trained
from autoshard.experiments.tracking.data_sources import short_name, tables_source
from autoshard.experiments.training.checks import deal_tasks
from autoshard.experiments.training.loading import (
    all_sharders,
    check_sharders,
    model_beside,
    oracle_for,
)
from autoshard.sharders import MEASURE_SECONDS, NEED_POLICY, NEED_POOL, load_policy
from autoshard.workload import EmbeddingTable, Objective, UserError, documents, load_tables
from autoshard.workload.bounds import check_bounds
from autoshard.workload.parts import tables_by_part

_ALL = "all"  # of --sharders


@dataclass(frozen=True)
class CompareConfig(ObjectiveOptions):
    """Compare sharders, and plans from elsewhere, on the same tasks: measured, or estimated.

    Tasks are drawn from tables of a file that neither cost models nor policies ever learn from
    (20 % of them), or from all if these are too few; or they are read from a folder.
    """

    tables: str | None = None
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    family: str | None = None
    """In place of --tables, --num-tables, --num-devices and --memory-fill: a family of tasks, such
    as giants or giants:tight; docs/policy.md has them."""
    tasks: Path | None = None
    """In place of --tables: a folder of tasks as --save-tasks writes them. All are compared, and
    they say how many tables and devices they have, how much memory and which batch size."""
    save_tasks: Path | None = None
    """Write the tasks into this folder, for other planners: 0.json, 1.json, ..."""
    plans: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=FOLDER: plans from elsewhere for --tasks, called as the tasks are: 0.json, ... Those of
    tasks without such a file count as out of memory. May be given several times."""
    num_tasks: int = 8
    """Tasks to begin with. With --measure more are drawn where that is what is missing."""
    num_tables: int = 60
    """Tables of a task."""
    num_devices: int = 4
    """Devices of a task."""
    sharders: str = "random,dim,size,lookup,size_lookup,cost,autoshard"
    """Names with commas between them, or all: those that can run here, and that measure only with
    --measure."""
    policy: Path = Path("cpu")
    """Folder of a policy, as ppo_shard.py makes it, or the name of one that is shipped."""
    policies: str | None = None
    """NAME=FOLDER,...: further policies, by names for the table. Each makes one plan, as policy
    does, by the same cost model."""
    cost_model: Path | None = None
    """Folder of a cost model, or the name of one that is shipped; by default the one in the
    policy's folder, else the shipped one."""
    batch_size: int = 1024
    """Samples of a batch."""
    memory_fill: float = 0.1
    """Share of all devices' memory that the tables take: 0.1 is loose, 0.9 is tight."""
    seed: int = 0
    """Of the tasks, and of sharders that draw."""
    measure: bool = False
    """Measure every shard on the Ray cluster: what its fused operator computes, forward and
    backward. All-to-alls are those of the objective's link: on a CPU ranks share cores, so measured
    ones would say more about this machine than about the plans. Without it, plans are priced with
    the cost model that some of the sharders go by themselves."""
    judge: Literal["costs", "training"] = "costs"
    """costs: what a step takes by the objective. training: what it takes when TorchRec trains a
    small model by each plan, as train_torchrec.py does, all in turns for --seconds."""
    precision: float = 0.01
    """Measure until the 95 % interval of each sharder's ratio to the best heuristic is within plus
    and minus this: more visits of shards that matter, other index batches, more tasks."""
    seconds: float = 300.0
    """Or until so many seconds are spent, planning included; what is left out is told."""
    seeds: int = SEEDS
    """Index batches that the visits of a shard are spread over; with one, results hold for this
    batch alone. What autoshard_verified chooses by is measured with others."""
    verified: int = 3
    """Plans that autoshard_verified measures in the end: all once, the better half again, ..."""
    verify_seconds: float = MEASURE_SECONDS
    """Seconds that autoshard_verified may take for a task. Its best plans are measured once."""
    store: Path = Path("costs.db")
    """SQLite file that keeps what is measured, and where it is looked up first."""
    out: Path | None = None
    """Folder for tasks, plans and pictures."""
    json: Path | None = None
    """Write the scores here."""
    mlflow_uri: str | None = None
    """Where to log; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""

    @property
    def names(self) -> list[str]:
        """Of the sharders."""
        return list(dict.fromkeys(name.strip() for name in self.sharders.split(",")))

    @property
    def further(self) -> list[str]:
        """What --policies names."""
        return [] if self.policies is None else [one.strip() for one in self.policies.split(",")]

    def check(self) -> None:
        """UserError unless the options make sense."""
        if _ALL in self.names:
            raise UserError(f"--sharders {_ALL} are all there are: name no others beside it")
        check_sharders(self.names)
        if sum(source is not None for source in (self.tables, self.family, self.tasks)) != 1:
            raise UserError(
                "name tables to draw tasks from with --tables, or a folder with --tasks, or a "
                "family of tasks with --family"
            )
        if self.family is not None:
            Choice.read(self.family, "--family")
        assert self.choice is None or self.choice.name  # or a name that is wrong is told
        if self.plans and self.tasks is None:
            raise UserError("--plans needs the tasks that they are for: name their folder, --tasks")
        if self.tasks is not None and self.names_objective:
            raise UserError(
                "the tasks of --tasks say what counts: leave out --objective and --link"
            )
        counts = ("num_tasks", "num_tables", "num_devices", "batch_size", "verified", "seeds")
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), "seed": 0},
            more_than=dict.fromkeys(("precision", "seconds", "verify_seconds", "memory_fill"), 0),
            up_to={"memory_fill": 1},
        )
        self.check_objective(self.num_devices)
        if self.judge == "training" and self.measure:
            raise UserError("--measure measures costs: leave it out, or --judge training")
        for name in NEED_POOL.intersection(self.names):
            if not self.measure:
                raise UserError(
                    f"sharder {name} measures its best plans: add --measure, or leave it out"
                )
        check_file(self.json, "--json")
        check_folder(self.out, "--out")
        check_folder(self.save_tasks, "--save-tasks")
        check_task_folder(self.save_tasks)

    def told_as(self, objectives: Collection[Objective]) -> tuple[str, Subject]:
        """What counts of tasks with such objectives and how it is known, and what it is of."""
        if self.judge == "training":
            return "with TorchRec", TRAINED
        known = "measured" if self.measure else "estimated, not measured"
        first, *others = objectives
        told = f"{first.name}, each task with its own link" if others else str(first)
        return f"{told}; {known}", PRICED

    @property
    def choice(self) -> Choice | None:
        """The family that is asked for; None where tables or tasks are."""
        return None if self.family is None else Choice.read(self.family, "--family")

    @property
    def source(self) -> str:
        """Where tasks come from, in words."""
        return str(self.tables or self.tasks or self.family)

    def deals(self) -> Generator:
        """Who deals."""
        if self.choice is not None:
            return self.choice.deals
        fill = (self.memory_fill, self.memory_fill)
        return RandomDeals((self.num_tables,) * 2, (self.num_devices,) * 2, fill)


@one_thread()  # of several, each waits for the others: networks this small gain nothing
def main(config: CompareConfig) -> None:
    """Let every sharder plan the same tasks, cost the plans, say who is best."""
    if config.names == [_ALL]:
        config = replace(config, sharders=",".join(all_sharders(config.measure)))
    config.check()
    theirs = named_folders("--plans", config.plans, ())
    policies = named_folders("--policies", config.further, theirs)
    cost_model = config.cost_model or model_beside(config.policy)
    policy, model = load_policy(config.policy), load_model(cost_model)
    others = {name: load_policy(folder) for name, folder in policies.items()}
    contest, oracle = _contest(config, theirs, model)
    for one in ([policy] if NEED_POLICY.intersection(config.names) else []) + [*others.values()]:
        one.check(contest.most_devices)
    contestants = Contestants(
        config.names, oracle, policy, config.seed, config.verified, config.verify_seconds, others
    )
    if config.measure:
        MeasurementStore(config.store).close()  # one that cannot be used is told before work starts
    with ExitStack() as stack:
        run = stack.enter_context(
            tracking.tracked_run("compare", _run_name(config), asdict(config), config.mlflow_uri)
        )
        found, hardware = _judged(config, contest, contestants, stack)
        scores, best = scores_of(found, oracle, config.measure, config.judge == "training")
        objectives = list(dict.fromkeys(task.objective for task in found.tasks))
        what, subject = config.told_as(objectives)
        figures = {
            "sharders": {name: asdict(score) for name, score in scores.items()},
            "best_heuristic": best,
            "tasks": len(found.tasks),
            "devices": contest.most_devices,
            "tables": max(len(task.tables) for task in found.tasks),
            "measured": config.measure,
            "trained": config.judge == "training",
            "batch_size": oracle.batch_size,
            "objectives": [objective.to_json() for objective in objectives],
            "memory_fill": None if config.tables is None else config.memory_fill,
            "seconds": found.seconds,
            "measuring_seconds": found.measuring_seconds,
            "visits": found.visits,
            "ended": found.ended,
            "policy": str(config.policy),
            "policies": {name: str(folder) for name, folder in policies.items()},
            "cost_model": str(cost_model),
            "hardware": hardware,
        }
        cli.console.print(score_table(scores, best, what, subject))
        if found.ended:
            cli.console.print(_told(found), soft_wrap=True)
        folder = config.out or Path(stack.enter_context(TemporaryDirectory()))
        plans = {name: [o.plan for o in some] for name, some in found.outcomes.items()}
        files = [
            *write_results(folder, found.tasks, plans),
            *_pictures(folder, found, scores, what, subject),
        ]
        for path in files:
            run.artifact(path, path.parent.relative_to(folder).as_posix())
        documents.write(folder / "compare.json", figures)
        run.artifact(folder / "compare.json")
        run.metrics(_metrics(scores))
        run.tags({"hardware": hardware, "num_devices": contest.most_devices})
        run.data(tables_source(config.source, contest.tables))
        run.note(verdict(scores, best, what, subject))
        if config.json is not None:
            documents.write(config.json, figures)
    cli.console.print(verdict(scores, best, what, subject), soft_wrap=True)


def _judged(
    config: CompareConfig, contest: Contest, contestants: Contestants, stack: ExitStack
) -> tuple[Judgement, str]:
    """What the judge finds, and on which hardware."""
    if config.judge == "training":
        stack.enter_context(ray_cluster())
        found = judge_trained(contest, contestants, config.seconds, config.save_tasks)
        return found, cpu_fingerprint()
    if not config.measure:
        found = judge_estimated(contest, contestants, config.save_tasks)
        return found, contestants.oracle.model.provenance.hardware
    pool = stack.enter_context(plan_pool(config.store))
    hardware = pool.devices()[0].hardware
    limits = Limits(config.precision, config.seconds)
    found = judge_measured(
        contest, contestants, pool, limits, config.seeds, save_tasks=config.save_tasks
    )
    return found, hardware


def _contest(
    config: CompareConfig, plans: Mapping[str, Path], model: CostModel
) -> tuple[Contest, EstimatedCosts]:
    """The tasks, and the oracle for them; UserError if it does not speak of such tasks."""
    if config.tasks is not None:
        contest = Contest.read(config.tasks, plans)
        first = contest.first
        oracle = oracle_for(model, first.batch_size, contest.tables)
        with documents.naming(config.tasks):
            oracle.check(first)
        return contest, oracle
    tables = _tables(config)
    oracle = oracle_for(model, config.batch_size, tables)
    deck = Deck(oracle, [table.whole() for table in tables])
    deals = config.deals()
    objective = config.wanted(deals.most_devices, oracle.link)
    dealt = deal_tasks(deck, deals, config.seed)
    # A family may draw links: they count unless an option is given.
    overruled = config.names_objective
    tasks = (
        replace(task, objective=objective) if overruled or task.objective.link is None else task
        for task in dealt
    )
    return Contest.drawn(tasks, config.num_tasks, tables, deals.most_devices), oracle


def _pictures(
    folder: Path, found: Judgement, scores: Mapping[str, Score], what: str, subject: Subject
) -> list[Path]:
    """What steps take by all sharders, and a plan of the best one."""
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    files = [pictures / "step_ms.png"]
    score_picture(scores, what, files[0], subject)
    best = best_sharder(scores)
    cost = next((o.cost for o in found.outcomes.get(best or "", ()) if o.cost is not None), None)
    if cost is not None:
        files.append(pictures / "best_plan.png")
        cost.picture(files[-1], f"{best}, {what}")
    return files


def _told(found: Judgement) -> str:
    """How judging went, in a line."""
    return (
        f"{found.ended} ({len(found.tasks)} tasks, {found.visits} visits in "
        f"{found.measuring_seconds:.0f} of {found.seconds:.0f} s)"
    )


def _run_name(config: CompareConfig) -> str:
    what = "measure" if config.measure else "estimate"
    if config.judge == "training":
        what = "train"
    if config.tasks is not None:
        return f"{what} {config.tasks.name}"
    if config.family is not None:
        return f"{what} {config.family}"
    assert config.tables is not None
    return f"{what} {config.num_tables} on {config.num_devices}, {short_name(config.tables)}"


def _tables(config: CompareConfig) -> list[EmbeddingTable]:
    """The tables that tasks are drawn from: those that nothing has learned from, if they do."""
    if config.choice is not None:
        return tables_by_part(config.choice.family.tables())["test"]
    assert config.tables is not None
    tables = load_tables(config.tables)
    if config.num_tables > len(tables):
        raise UserError(
            f"--num-tables {config.num_tables} is more than the {len(tables)} tables of "
            f"{config.tables}: ask for fewer"
        )
    unseen = tables_by_part(tables)["test"]
    if config.num_tables <= len(unseen):
        return unseen
    cli.console.print(
        f"note: {config.tables} has {len(unseen)} tables that models and policies never learn "
        f"from, too few for tasks of {config.num_tables}: all {len(tables)} are used",
        soft_wrap=True,
    )
    return list(tables)


def _metrics(scores: Mapping[str, Score]) -> dict[str, float]:
    """What MLflow takes of the scores: numbers, by name and sharder."""
    return {
        f"{field}/{name}": float(value)
        for name, found in scores.items()
        for field, value in asdict(found).items()
        if isinstance(value, int | float)
    }


if __name__ == "__main__":
    cli.run_command(main, CompareConfig)
