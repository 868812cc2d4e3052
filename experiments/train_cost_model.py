#!/usr/bin/env python
"""Train a cost model on measured shards, or calibrate one, and test it."""

import re
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autoshard.cost_model import (
    CostDataset,
    CostModel,
    EstimatedCosts,
    Provenance,
    Selection,
    read_costs,
    split,
)
from autoshard.cost_model.learning.evaluation import evaluate, evaluations_per_second
from autoshard.cost_model.learning.links import MIN_EXCHANGES, link_error
from autoshard.cost_model.learning.machine_training import KNOWN_SHARDS, train_and_leave_out
from autoshard.cost_model.learning.model_training import calibrate_model, train_model
from autoshard.cost_model.learning.pictures import draw_all
from autoshard.cost_model.learning.training import Curves, TrainOptions
from autoshard.cost_model.models.checkpoint import OtherHardware, check_free, load_model, save_model
from autoshard.experiments.collecting.proposals import Proposer
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.inputs import check_file
from autoshard.experiments.console.progress import following
from autoshard.experiments.tracking import runs
from autoshard.experiments.tracking.data_sources import store_source
from autoshard.workload import UserError, documents
from autoshard.workload.bounds import check_bounds
from autoshard.workload.tables.operators import Optimizer, Weights

REGISTERED_AS = runs.COST_MODELS
_MIN_MACHINES = 2
_ROUNDS_SHARE = 0.7  # share of --seconds if there is a check as well: only rounds improve the model
_NOISE_SHARE = 0.25  # share of the seconds after the rounds, for the measuring noise


@dataclass(frozen=True)
class TrainConfig:
    """Train a cost model on measurements, and test it on tables that it was not trained on.

    Each table belongs to one part for ever: training, early stopping or test.
    """

    store: tuple[Path, ...]
    """Stores and Parquet files of measurements. New ones are written to the first store."""
    out: Path
    """Folder for the model."""
    rounds: int = 0
    """Number of rounds. Each measures shards that sharders propose by the current model, and trains
    again."""
    budget_shards: int = 300
    """Number of shards to measure in all rounds together."""
    check_tasks: int = 20
    """Number of tasks of test tables for which predictions of plans are checked by measuring; 0:
    none."""
    seconds: float | None = None
    """Time limit in seconds of measuring, from the start of the command: rounds, then the noise of
    test shards, then the check. The report says what was left out. Training is not limited.
    Default: none."""
    calibrate: Path | None = None
    """Folder or name of a model to adapt to at most 50 shards of the store, in place of training;
    the name of a GPU, such as h100-80gb, stands for the model by its data sheet. Excludes --rounds
    and --hyper."""
    machines: tuple[Path, ...] = ()
    """Measurements of other machines, a store or Parquet file for each, two at least. Networks of
    all machines are trained as well: from them, plans for a machine that nobody measured are made
    by its probe. The test leaves each machine out in turn."""
    add_to: Path | None = None
    """Folder or name of a model that keeps its networks: only those of --machines are trained.
    --store holds what it was trained on."""
    batch_size: tuple[int, ...] = ()
    """Batch sizes to train on. Default: all in the store."""
    weights: Weights | None = None
    """Data type of the weights to train on. Required if the store has several."""
    optimizer: Optimizer | None = None
    """Optimizer to train on. Required if the store has several."""
    hardware: str | None = None
    """Hardware to train on. Required if the store has several."""
    hyper: TrainOptions = field(default_factory=TrainOptions)
    """Hyperparameters of training."""
    seed: int = 0
    """Seed of the networks' initial weights, and of sampled tasks and shards."""
    force: bool = False
    """Replace the model in --out."""
    register: str = REGISTERED_AS
    """Name of the model in MLflow's registry, or NAME@ALIAS, such as autoshard-cost-model@champion:
    the new version then gets the alias."""
    json: Path | None = None
    """File for the metrics."""
    mlflow_uri: str | None = None
    """MLflow tracking URI. Default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""

    def check(self) -> None:
        """Raises UserError unless the options are valid, and --out is free."""
        check_free(self.out, self.force)
        check_file(self.json, "--json")
        runs.check_registered(self.register)
        counts = ("rounds", "check_tasks", "budget_shards", "seed")
        check_bounds(self, at_least=dict.fromkeys(counts, 0))
        if self.budget_shards < self.rounds:
            raise UserError(f"--budget-shards {self.budget_shards} is less than one a round")
        self.hyper.check()
        if self.calibrate is not None and (self.rounds or self.hyper != TrainOptions()):
            raise UserError("--calibrate does not train: leave --rounds and --hyper out")
        if self.calibrate is not None and self.machines:
            raise UserError("--calibrate trains no networks of --machines: leave one of them out")
        if self.machines and len(self.machines) < _MIN_MACHINES:
            raise UserError(
                f"--machines {self.machines[0]}: name measurements of {_MIN_MACHINES} other "
                "machines at least: what differs between machines is learned from them"
            )
        if self.add_to is not None and (self.rounds or not self.machines):
            raise UserError("--add-to adds networks of --machines: name these, without --rounds")


def main(config: TrainConfig) -> None:
    """Trains or calibrates a model, then tests, saves and logs it."""
    budget = Budget(config.seconds)
    config.check()
    data = _read(config)
    machines = _read_machines(config, data)
    name = f"cost model {config.out.name}"
    with runs.tracked_run("train_cost_model", name, asdict(config), config.mlflow_uri) as run:
        if config.calibrate is not None:
            model, figures = _calibrated(config.calibrate, data)
        elif config.add_to is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", OtherHardware)  # nothing is predicted for this one
                model, figures = load_model(config.add_to), {}
            _check_store(config, model, data)
        else:
            model, figures = _trained(config, data, run, budget)
        if machines:
            model, machine_figures = _with_machines(config, model, [data, *machines])
            figures = {**figures, "machines_left_out": machine_figures}
        save_model(model, config.out, config.force)
        tags = {"hardware": data.hardware, "versions": data.versions}
        version = run.register(config.out.iterdir(), config.register, tags)
        run.tags(tags)
        run.data(*(store_source(store) for store in (*config.store, *config.machines)))
        run.metrics(_numbers(figures))
        if config.json is not None:
            documents.write(config.json, figures)
    cli.say(f"the model is in {config.out}, and in MLflow as {config.register} version {version}")


def _trained(
    config: TrainConfig, data: CostDataset, run: runs.TrackedRun, budget: Budget
) -> tuple[CostModel, dict[str, Any]]:
    """Trains a model on the store, in rounds, and tests it; returns it with its metrics."""
    with ExitStack() as stack:
        # Measures on the hardware of the store, if that is available.
        proposer = Proposer.start(
            stack, config.store, data, needed=config.rounds > 0, seed=config.seed
        )

        # 1. Train; then measure what sharders propose by the model, and train again.
        model, curves = _fitted(config, data)
        rounds = budget.part(_ROUNDS_SHARE) if config.check_tasks else budget
        for number in range(config.rounds):
            assert proposer is not None
            count = config.budget_shards // config.rounds
            this = rounds.part(1 / (config.rounds - number))
            if this.left_s() < curves.seconds:  # training would take longer
                proposer.left_out["proposed_shards"] += count * (config.rounds - number)
                break
            oracle = EstimatedCosts(model, data.most_common_batch)
            proposer.measure_proposals(oracle, number, count, this)
            data = _read(config)
            model, curves = _fitted(config, data)

        # 2. Measure test shards again for the measuring noise, and plans to check predictions.
        if proposer is not None and split(data)["test"].noise_floor() is None:
            proposer.measure_again(split(data)["test"], budget.part(_NOISE_SHARE))
            data = _read(config)
        oracle = EstimatedCosts(model, data.most_common_batch)
        checked = None
        if proposer is not None and config.check_tasks:
            checked = proposer.check(oracle, config.check_tasks, budget)
        left_out = {} if proposer is None else dict(+proposer.left_out)

    # 3. Evaluate on shards of test tables; print, log, draw.
    parts = split(data)
    found = evaluate(model.compute, parts["train"], parts["test"])
    pieces = {piece.digest: piece for shard in parts["test"].shards for piece in shard.pieces}
    speed = evaluations_per_second(oracle, list(pieces.values()))
    lines = [*found.lines(), ("evaluations", f"{speed:,.0f} a second")]
    if checked is not None:
        ratio, of_slowest = (checked[f"{of}measured_over_promised"] for of in ("", "max_"))
        text = f"measured / predicted {ratio:.3f}, of the slowest device {of_slowest:.3f}"
        lines.append(("predictions", text))
        for name, ms in checked["measured_max_ms"].items():
            lines.append((name, f"{ms:.2f} ms on the slowest device, mean of tasks"))
    for name, value in lines:
        cli.say(f"  {name:<14} {value}")
    if left_out:
        texts = (f"{count} {what.replace('_', ' ')}" for what, count in left_out.items())
        cli.say(f"stopped by {budget}: left out {', '.join(texts)}")
    run.curve("training_loss", curves.steps, curves.losses)
    run.curve("validation_error", curves.steps, curves.errors)
    with tempfile.TemporaryDirectory() as folder:
        for picture in draw_all(found, curves, Path(folder)):
            run.artifact(picture, "pictures")
    figures = {
        "num_train": len(parts["train"]),
        "num_validation": len(parts["validation"]),
        **found.to_json(),
        "communication_error": link_error(data.exchanges),
        "proposals": checked,
        "left_out": left_out,
        "seconds": curves.seconds,
        "evaluations_per_second": speed,
    }
    return replace(model, provenance=Provenance.of(data, _numbers(figures))), figures


def _fitted(config: TrainConfig, data: CostDataset) -> tuple[CostModel, Curves]:
    parts = split(data)
    cli.say(
        f"training on {len(parts['train'])} shards, stopped by {len(parts['validation'])}, "
        f"tested by {len(parts['test'])} of other tables"
    )
    with following(config.hyper.steps, "steps") as step:
        model, curves = train_model(data, config.hyper, config.seed, step)
    if not model.links:
        count = sum(each.key.collective == "all_to_all" for each in data.exchanges)
        cli.note(
            f"no link can be fitted to {count} all-to-alls: {MIN_EXCHANGES} "
            "with a device for each rank are needed (collect_costs.py --num-exchanges)"
        )
    return model, curves


def _calibrated(source: Path, data: CostDataset) -> tuple[CostModel, dict[str, Any]]:
    """Adapts a model to a few of the store's shards, and tests it on shards of test tables."""
    model, count, evaluations = calibrate_model(source, data)
    figures: dict[str, Any] = {"num_train": count, "num_test": len(split(data, False)["test"])}
    if evaluations is not None:
        old, new = evaluations
        figures |= {**new.to_json(), "uncalibrated_mape": old.score.median_error}
        cli.say(
            f"calibrated with {count} shards: on {figures['num_test']} others its median error "
            f"was {old.score.median_error:.1%} and is {new.error_text}"
        )
    return replace(model, provenance=replace(model.provenance, figures=_numbers(figures))), figures


def _with_machines(
    config: TrainConfig, model: CostModel, machines: Sequence[CostDataset]
) -> tuple[CostModel, dict[str, Any]]:
    """Trains networks of all machines; tests them on each machine that was left out."""
    cli.say(f"training on {len(machines)} machines, and on all but one for the test")
    with following((len(machines) + 1) * config.hyper.steps, "steps") as step:
        found, left_out = train_and_leave_out(machines, config.hyper, config.seed, step)
    figures = {}
    for each in left_out:
        # Names of metrics in MLflow have no parentheses and commas.
        figures[re.sub(r"[^\w .:-]", "", each.hardware)] = each.figures()
        cli.say(f"  left out: {each.hardware}, known by {KNOWN_SHARDS} of its shards")
        cli.say(f"    {each.text()}")
    return replace(model, machines=found), figures


def _read_machines(config: TrainConfig, data: CostDataset) -> list[CostDataset]:
    """Reads the measurements of other machines; UserError if one is named twice."""
    operator, known, found = data.operator, {data.hardware}, []
    for path in config.machines:
        selection = Selection(operator.weights, operator.optimizer, config.batch_size)
        machine = read_costs([path], selection)
        kind, wanted = (each.hardware.partition(":")[0] for each in (machine, data))
        if kind != wanted:
            raise UserError(f"--machines {path}: is of {machine.hardware}, not of kind {wanted}")
        if machine.hardware in known:
            raise UserError(
                f"--machines {path}: {machine.hardware} is named already: name other machines, "
                "or put its files into one store"
            )
        split(machine)  # raises if there is too little of it
        known.add(machine.hardware)
        found.append(machine)
    return found


def _check_store(config: TrainConfig, model: CostModel, data: CostDataset) -> None:
    """Raises UserError unless the model was trained on measurements as those of the store."""
    known = model.provenance
    for kind, trained, stored in (
        ("hardware", known.hardware, data.hardware),
        ("operator", known.operator, data.operator),
    ):
        if trained != stored:
            raise UserError(
                f"--add-to {config.add_to} was trained on {kind} {trained}, and --store holds "
                f"{stored}: give the measurements that it was trained on"
            )


def _read(config: TrainConfig) -> CostDataset:
    selection = Selection(config.weights, config.optimizer, config.batch_size, config.hardware)
    return read_costs(config.store, selection)


def _numbers(figures: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers among the metrics, by path."""
    return {
        name: float(value)
        for name, value in runs.flat(figures).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


if __name__ == "__main__":
    cli.run_command(main, TrainConfig)
