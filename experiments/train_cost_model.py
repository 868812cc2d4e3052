#!/usr/bin/env python
"""Train a cost model on measured shards, let it learn from its own proposals, and test it."""

import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autoshard.benchmark import Exchange
from autoshard.cost_model import (
    CommCostModel,
    CostDataset,
    CostModel,
    EstimatedCosts,
    Provenance,
    Selection,
    read_costs,
    split,
)
from autoshard.cost_model.calibration import FEW, calibrate
from autoshard.cost_model.checkpoint import OtherHardware, check_free, load_model, save_model
from autoshard.cost_model.communication import (
    FEWEST_EXCHANGES,
    communication_error,
    held_out_of,
    train_communication,
)
from autoshard.cost_model.compute_training import train_compute
from autoshard.cost_model.dataset import FEWEST_SHARDS
from autoshard.cost_model.evaluation import Evaluation, evaluate, evaluations_per_second
from autoshard.cost_model.pictures import draw_all
from autoshard.cost_model.training import Curves, TrainOptions
from autoshard.experiments import tracking
from autoshard.experiments.collecting.proposals import Proposer
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.outputs import check_file
from autoshard.experiments.console.progress import following
from autoshard.experiments.tracking.data_sources import store_source
from autoshard.workload import UserError, documents
from autoshard.workload.bounds import check_bounds
from autoshard.workload.operators import Optimizer, Weights

REGISTERED_AS = tracking.COST_MODELS
# Of the seconds, where there is a check as well: rounds make the model better, a check only tells.
_ROUNDS_SHARE = 0.7
_NOISE_SHARE = 0.25  # of what is left after the rounds: to learn how noisy measurements are


@dataclass(frozen=True)
class TrainConfig:
    """Train a cost model on what was measured, and say how good it is on tables it never saw.

    Tables are split once and for all into those that teach, those that stop and those that test;
    collect_costs.py keeps them apart.
    """

    store: tuple[Path, ...]
    """Stores and Parquet files to learn from; new measurements go into the first store."""
    out: Path
    """Folder for the model."""
    rounds: int = 0
    """Rounds of learning from what sharders propose by the model as it is."""
    budget_shards: int = 300
    """Shards to be measured in all rounds together."""
    check_tasks: int = 20
    """Tasks of test tables on which a search's promises are measured; 0: none."""
    seconds: float | None = None
    """Measure no longer than this, from the start of the command: rounds come first, then the noise
    of test shards, then the check. What is left out is told. Training itself takes what it takes.
    By default as long as it takes."""
    calibrate: Path | None = None
    """Do not train: adapt this model to at most 50 shards of the store."""
    batch_size: tuple[int, ...] = ()
    """Learn from these batch sizes only; by default from all in the store."""
    weights: Weights | None = None
    """Which of the store's operators, if it holds several."""
    optimizer: Optimizer | None = None
    """The same."""
    hardware: str | None = None
    """Which of the store's hardware, if it holds several."""
    hyper: TrainOptions = field(default_factory=TrainOptions)
    """How to learn."""
    seed: int = 0
    """Of the networks' first weights, and of what is drawn."""
    force: bool = False
    """Replace the model in --out."""
    json: Path | None = None
    """Write the figures here."""
    mlflow_uri: str | None = None
    """Where to log; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""


def main(config: TrainConfig) -> None:
    """Train, test, save, log."""
    budget = Budget(config.seconds)
    check_free(config.out, config.force)
    check_file(config.json, "--json")
    counts = ("rounds", "check_tasks", "budget_shards", "seed")
    check_bounds(config, at_least=dict.fromkeys(counts, 0))
    if config.budget_shards < config.rounds:
        raise UserError(f"--budget-shards {config.budget_shards} is less than one a round")
    config.hyper.check()
    if config.calibrate is not None and (config.rounds or config.hyper != TrainOptions()):
        raise UserError("--calibrate trains nothing: leave --rounds and --hyper out")
    data = _read(config)
    name = f"cost model {config.out.name}"
    with tracking.tracked_run("train_cost_model", name, asdict(config), config.mlflow_uri) as run:
        if config.calibrate is not None:
            model, figures = _calibrated(config.calibrate, data)
        else:
            model, figures = _trained(config, data, run, budget)
        save_model(model, config.out, config.force)
        tags = {"hardware": data.hardware, "versions": data.versions}
        version = run.register(config.out, REGISTERED_AS, tags)
        run.tags(tags)
        run.data(*(store_source(store) for store in config.store))
        run.metrics(_numbers(figures))
        if config.json is not None:
            documents.write(config.json, figures)
    cli.console.print(
        f"the model is in {config.out}, and in MLflow as {REGISTERED_AS} version {version}",
        soft_wrap=True,
    )


def _trained(
    config: TrainConfig, data: CostDataset, run: tracking.TrackedRun, budget: Budget
) -> tuple[CostModel, dict[str, Any]]:
    """Train on the store, round by round; then test."""
    with ExitStack() as stack:
        proposer = Proposer.start(
            stack, config.store, data, needed=config.rounds > 0, seed=config.seed
        )
        model, curves = _train(config, data)
        rounds = budget.part(_ROUNDS_SHARE) if config.check_tasks else budget
        for number in range(config.rounds):
            assert proposer is not None
            count = config.budget_shards // config.rounds
            this = rounds.part(1 / (config.rounds - number))
            if this.left_s() < curves.seconds:  # to learn from it would take longer
                proposer.leave_out("proposed_shards", count * (config.rounds - number))
                break
            oracle = EstimatedCosts(model, data.most_common_batch)
            proposer.measure_proposals(oracle, number, count, this)
            data = _read(config)
            model, curves = _train(config, data)
        if proposer is not None and split(data)["test"].noise_floor() is None:
            proposer.measure_again(split(data)["test"], budget.part(_NOISE_SHARE))
            data = _read(config)
        oracle = EstimatedCosts(model, data.most_common_batch)
        promised = None
        if proposer is not None and config.check_tasks:
            promised = proposer.check(oracle, config.check_tasks, budget)
        left_out = {} if proposer is None else proposer.left_out
    parts = split(data)
    found = evaluate(model.compute, parts["train"], parts["test"])
    slices = list(
        {piece.digest: piece for s in parts["test"].shards for piece in s.slices}.values()
    )
    figures = {
        "num_train": len(parts["train"]),
        "num_validation": len(parts["validation"]),
        **found.to_json(),
        "communication_error": _communication_error(model.communication, data.exchanges),
        "proposals": promised,
        "left_out": left_out,
        "seconds": curves.seconds,
        "evaluations_per_second": evaluations_per_second(oracle, slices),
    }
    _report(found, figures)
    if left_out:
        told = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in left_out.items())
        cli.console.print(f"stopped by {budget}: left out {told}", soft_wrap=True)
    run.curve("training_loss", curves.steps, curves.losses)
    run.curve("validation_error", curves.steps, curves.errors)
    with tempfile.TemporaryDirectory() as folder:
        for picture in draw_all(found, curves, Path(folder)):
            run.artifact(picture, "pictures")
    provenance = Provenance.of(data, _numbers(figures))
    return CostModel(model.compute, provenance, model.communication), figures


def _train(config: TrainConfig, data: CostDataset) -> tuple[CostModel, Curves]:
    parts = split(data)
    cli.console.print(
        f"training on {len(parts['train'])} shards, stopped by {len(parts['validation'])}, "
        f"tested by {len(parts['test'])} of other tables"
    )
    with following(config.hyper.steps, "steps") as step:
        compute, curves = train_compute(
            parts["train"], parts["validation"], config.hyper, config.seed, step
        )
    communication = None
    if len(data.exchanges) >= FEWEST_EXCHANGES:
        communication, _ = train_communication(data.exchanges, config.hyper, config.seed)
    else:
        cli.console.print(
            f"note: {len(data.exchanges)} all-to-alls teach nothing of communication, "
            f"{FEWEST_EXCHANGES} would: collect_costs.py --num-exchanges",
            soft_wrap=True,
        )
    return CostModel(compute, Provenance.of(data), communication), curves


def _calibrated(source: Path, data: CostDataset) -> tuple[CostModel, dict[str, Any]]:
    """Adapt a model to a few of the store's shards; test it on those of test tables, if any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)  # which is why it is calibrated
        before = load_model(source)
    parts = split(data, must_be_full=False)
    few = parts["train"].subset(range(min(FEW, len(parts["train"]))))
    model = calibrate(before, few)
    figures: dict[str, Any] = {"num_train": len(few), "num_test": len(parts["test"])}
    if len(parts["test"]) >= FEWEST_SHARDS:
        old = evaluate(before.compute, few, parts["test"])
        new = evaluate(model.compute, few, parts["test"])
        figures |= {**new.to_json(), "uncalibrated_mape": old.score.median_error}
        cli.console.print(
            f"calibrated with {len(few)} shards: on {len(parts['test'])} others its median error "
            f"was {old.score.median_error:.1%} and is {_error_told(new)}",
            soft_wrap=True,
        )
    provenance = replace(model.provenance, figures=_numbers(figures))
    return replace(model, provenance=provenance), figures


def _read(config: TrainConfig) -> CostDataset:
    selection = Selection(config.weights, config.optimizer, config.batch_size, config.hardware)
    return read_costs(config.store, selection)


def _communication_error(
    model: CommCostModel | None, exchanges: tuple[Exchange, ...]
) -> float | None:
    return None if model is None else communication_error(model, held_out_of(exchanges))


def _report(found: Evaluation, figures: dict[str, Any]) -> None:
    """The figures for people."""
    additive = found.baselines["additive"]
    lines = [
        ("median error", _error_told(found)),
        ("Kendall tau", f"{found.score.kendall_tau:.3f} (sum of tables alone "
                        f"{additive.kendall_tau:.3f})"),
        ("90 % interval", f"holds {found.coverage_90:.1%}"),
        ("evaluations", f"{figures['evaluations_per_second']:,.0f} a second"),
    ]  # fmt: skip
    if figures["proposals"] is not None:
        told = figures["proposals"]
        lines.append(
            ("promises", f"measured / promised {told['measured_over_promised']:.3f}, of the "
                         f"slowest device {told['max_measured_over_promised']:.3f}")
        )  # fmt: skip
        for name, ms in told["measured_max_ms"].items():
            lines.append((name, f"{ms:.2f} ms on the slowest device, mean of tasks"))
    for name, value in lines:
        cli.console.print(f"  {name:<14} {value}", soft_wrap=True)
    for name, count, own, additive_error in found.by_size():
        cli.console.print(
            f"  {name + ' tables':<14} error {own:.1%}, of the sum {additive_error:.1%} "
            f"({count} shards)"
        )


def _error_told(found: Evaluation) -> str:
    """The median error, and what of it is the model's."""
    told = f"{found.score.median_error:.1%}"
    if found.net_error is None:
        return f"{told} (how much of it is noise is not known)"
    return f"{told}: model {found.net_error:.1%}, noise {found.noise:.1%}"


def _numbers(figures: dict[str, Any]) -> dict[str, float]:
    """Those that MLflow takes as metrics."""
    return {
        name: float(value)
        for name, value in tracking.flat(figures).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


if __name__ == "__main__":
    cli.run_command(main, TrainConfig)
