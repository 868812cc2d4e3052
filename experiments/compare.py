#!/usr/bin/env python
"""Compare sharders: the same tasks for all of them, their plans measured one beside the other."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmark import MeasurementStore
from cost_model import EstimatedCosts, load_model
from cost_model.training import one_thread
from envs import Deck, RandomDeals
from experiments import cli, tracking
from experiments.comparing import Outcome, estimated, make_plans, measured
from experiments.data_sources import short_name, tables_source
from experiments.loading import check_sharders, model_beside, oracle_for
from experiments.measuring import JUDGING_SEED, VERIFYING_SEED, PlanMeter, plan_pool
from experiments.outputs import check_file, check_folder
from experiments.policy_check import draw_tasks
from experiments.score_report import best_sharder, score_picture, score_table, verdict
from experiments.scoring import Score, bounds_ms, score_all
from sharders import NEED_POLICY, NEED_POOL, Means, load_policy, make_sharder
from workload import (
    EmbeddingTable,
    ShardingTask,
    UserError,
    documents,
    load_tables,
)
from workload.parts import tables_by_part


@dataclass(frozen=True)
class CompareConfig:
    """Compare sharders on the same random tasks, by measured or by estimated costs.

    Tables come from those of the file that neither cost models nor policies ever learn from (20 %
    of them), or from all if these are too few.
    """

    tables: str
    """A CSV, JSON, Parquet or dlrm_datasets file, or synthetic:N[:SEED[:small|full]]."""
    num_tasks: int = 8
    """Tasks to shard."""
    num_tables: int = 60
    """Tables of a task."""
    num_devices: int = 4
    """Devices of a task."""
    sharders: str = "random,dim,size,lookup,size_lookup,cost,autoshard"
    """Names with commas between them."""
    policy: Path = Path("cpu")
    """Folder of a policy, as ppo_shard.py makes it, or the name of one that is shipped."""
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
    backward. All-to-alls are left out, estimated or measured: on a CPU ranks share cores, so
    they would say more about this machine than about the plans. Without it, plans are priced with
    the cost model that some of the sharders go by themselves."""
    verified: int = 3
    """Plans that autoshard_verified measures for a task."""
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

    def check(self) -> None:
        """UserError unless the options make sense."""
        check_sharders(self.names)
        for option in ("num_tasks", "num_tables", "num_devices", "batch_size", "verified"):
            if (value := getattr(self, option)) < 1:
                raise UserError(f"--{option.replace('_', '-')} must be at least 1, got {value}")
        if not 0 < self.memory_fill <= 1:
            raise UserError(f"--memory-fill must lie between 0 and 1, got {self.memory_fill}")
        if self.seed < 0:
            raise UserError(f"--seed must be at least 0, got {self.seed}")
        for name in NEED_POOL.intersection(self.names):
            if not self.measure:
                raise UserError(
                    f"sharder {name} measures its best plans: add --measure, or leave it out"
                )
        check_file(self.json, "--json")
        check_folder(self.out, "--out")

    def deals(self) -> RandomDeals:
        """Who deals."""
        fill = (self.memory_fill, self.memory_fill)
        return RandomDeals((self.num_tables,) * 2, (self.num_devices,) * 2, fill)


@one_thread()  # of several, each waits for the others: networks this small gain nothing
def main(config: CompareConfig) -> None:
    """Draw tasks, let every sharder plan them, cost the plans, say who is best."""
    config.check()
    tables = _tables(config)
    cost_model = config.cost_model or model_beside(config.policy)
    policy, model = load_policy(config.policy), load_model(cost_model)
    if NEED_POLICY.intersection(config.names):
        policy.check(config.num_devices)
    oracle = oracle_for(model, config.batch_size, tables)
    deck = Deck(oracle, [table.whole() for table in tables])
    tasks = draw_tasks(deck, config.deals(), config.num_tasks, config.seed)
    if config.measure:
        MeasurementStore(config.store).close()  # one that cannot be used is told before work starts
    with ExitStack() as stack:
        run = stack.enter_context(
            tracking.tracked_run("compare", _run_name(config), asdict(config), config.mlflow_uri)
        )
        judge, verify, hardware = None, None, model.provenance.hardware
        if config.measure:
            pool = stack.enter_context(plan_pool(config.store))
            hardware = pool.devices()[0].hardware
            judge = PlanMeter(pool, model, JUDGING_SEED)
            verify = PlanMeter(pool, model, VERIFYING_SEED).max_ms
        sharders = {}
        for name in config.names:
            # An oracle each: what one sharder has looked up would cost the next no time.
            own = EstimatedCosts(model, config.batch_size)
            means = Means(own, policy, verify, config.verified, config.seed)
            sharders[name] = make_sharder(name, means)
        outcomes = make_plans(sharders, tasks)
        if judge is not None:
            outcomes = measured(outcomes, tasks, judge)
        else:
            outcomes = estimated(outcomes, tasks, oracle)
        scores, best = score_all(outcomes, bounds_ms(oracle, tasks))
        figures = {
            "sharders": {name: asdict(scores[name]) for name in outcomes},
            "best_heuristic": best,
            "tasks": config.num_tasks,
            "devices": config.num_devices,
            "tables": config.num_tables,
            "measured": config.measure,
            "batch_size": config.batch_size,
            "memory_fill": config.memory_fill,
            "policy": str(config.policy),
            "cost_model": str(cost_model),
            "hardware": hardware,
        }
        what = "measured" if config.measure else "estimated, not measured"
        cli.console.print(score_table(scores, best, what))
        folder = config.out or Path(stack.enter_context(TemporaryDirectory()))
        for path in write_results(folder, outcomes, tasks, scores, what):
            run.artifact(path, path.parent.relative_to(folder).as_posix())
        documents.write(folder / "compare.json", figures)
        run.artifact(folder / "compare.json")
        run.metrics(_metrics(scores))
        run.tags({"hardware": hardware, "num_devices": config.num_devices})
        run.data(tables_source(config.tables, tables))
        run.note(verdict(scores, best, what))
        if config.json is not None:
            documents.write(config.json, figures)
    cli.console.print(verdict(scores, best, what), soft_wrap=True)


def write_results(
    folder: Path,
    outcomes: Mapping[str, Sequence[Outcome]],
    tasks: Sequence[ShardingTask],
    scores: Mapping[str, Score],
    what: str,
) -> list[Path]:
    """Tasks, plans and pictures; returns the files."""
    files = []
    for number, task in enumerate(tasks):
        files.append(folder / "tasks" / f"{number}.json")
        task.save(files[-1])
    for name, some in outcomes.items():
        for number, outcome in enumerate(some):
            if outcome.plan is not None:
                files.append(folder / "plans" / name / f"{number}.json")
                outcome.plan.save(files[-1])
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    score_picture(scores, what, pictures / "max_ms.png")
    files.append(pictures / "max_ms.png")
    best = best_sharder(scores)
    cost = next((o.cost for o in outcomes.get(best or "", ()) if o.cost is not None), None)
    if cost is not None:
        files.append(pictures / "best_plan.png")
        cost.picture(files[-1], f"{best}, {what}")
    return files


def _run_name(config: CompareConfig) -> str:
    what = "measure" if config.measure else "estimate"
    return f"{what} {config.num_tables} on {config.num_devices}, {short_name(config.tables)}"


def _tables(config: CompareConfig) -> list[EmbeddingTable]:
    """The tables that tasks are drawn from: those that nothing has learned from, if they do."""
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
    """What MLflow takes of the scores: numbers, by sharder and name."""
    return {
        f"{field}/{name}": float(value)
        for name, found in scores.items()
        for field, value in asdict(found).items()
        if isinstance(value, int | float)
    }


if __name__ == "__main__":
    cli.run_command(main, CompareConfig)
