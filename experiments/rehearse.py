#!/usr/bin/env python
"""Measure what training takes beside the operators, and add it to a cost model."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from autoshard.benchmark import MeasurementStore, MeasureSettings, ReferenceLevel
from autoshard.benchmark.backends import RequestedKind
from autoshard.benchmark.rehearsals.kept import RehearsedPlan, rehearsed_plans
from autoshard.cost_model import CostModel, load_model, save_model
from autoshard.cost_model.learning.overheads import (
    MIN_REHEARSALS,
    WAY_FITS,
    coefficient_lines,
    fit_overhead,
    measured_operators,
    plans_like,
    report_on,
)
from autoshard.cost_model.models.checkpoint import check_free
from autoshard.cost_model.pricing.repeated_measurements import (
    SEEDS,
    RepeatedMeasurements,
    evaluation_seeds,
)
from autoshard.cost_model.step.overhead import StepOverhead
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import measuring_pool, ray_cluster
from autoshard.integration.rehearsal.rank_group import Effort, RankGroup
from autoshard.sharders.heuristics.random_plans import copying_plans, random_plans, row_wise_plans
from autoshard.workload import Device, ShardingPlan, ShardingTask, UserError, load_tables
from autoshard.workload.arrays import Floats
from autoshard.workload.bounds import check_bounds

_ANY_BYTES = 2**50  # not checked before training


@dataclass(frozen=True)
class RehearseConfig:
    """Train by random plans with TorchRec, measure their operators, and fit what else a step takes.

    Ranks take turns, so any number of them can be rehearsed on one machine. The store keeps all
    rehearsals, and none is repeated: rehearse several tasks, then fit all of them with --out.
    Requires TorchRec.
    """

    tables: str | None = None
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N.
    Without tables, the rehearsals in the store are fitted."""
    num_devices: int = 4
    """Number of ranks."""
    batch_size: int = 1024
    """Samples of a batch, of all ranks together."""
    num_plans: int = 8
    """Number of random plans."""
    num_copying: int = 0
    """Number of further random plans that also copy tables to all ranks (data-parallel)."""
    num_row_wise: int = 0
    """Number of further random plans with tables in blocks of rows on all ranks (row-wise)."""
    rounds: int = 2
    """Rounds of ten steps by each plan, each with models built anew."""
    seed: int = 0
    """Seed of the plans."""
    devices: RequestedKind = "auto"
    """Kind of devices; auto: GPUs if the cluster has any, else cores. Ranks take turns on cores of
    one machine, and on one GPU if there are fewer than ranks."""
    store: Path = Path("costs.db")
    """SQLite file that keeps rehearsals and measurements."""
    cost_model: Path = Path("cpu")
    """Folder of the cost model that learns them, or the name of a shipped one."""
    out: Path | None = None
    """Folder for that cost model with what training takes. Default: it is only printed."""
    force: bool = False
    """Replace the model in --out."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        counts = ("num_devices", "batch_size", "num_plans", "rounds")
        optional = ("num_copying", "num_row_wise", "seed")
        check_bounds(self, at_least={**dict.fromkeys(counts, 1), **dict.fromkeys(optional, 0)})
        if self.out is not None:
            check_free(self.out, self.force)


def main(config: RehearseConfig) -> None:
    """Rehearses, measures, fits, and saves the model."""
    config.check()
    model = load_model(config.cost_model)
    with MeasurementStore(config.store, must_exist=config.tables is None) as store:
        if config.tables is not None:
            operator = model.provenance.operator
            devices = Device.uniform(config.num_devices, _ANY_BYTES)
            # Ranks draw lookups from the reuse of tables, whatever is known of their blocks.
            tables = tuple(table.without_access() for table in load_tables(config.tables))
            task = ShardingTask(tables, devices, config.batch_size, operator)
            with ray_cluster():
                plans = _rehearse(config, task, store)
                _measure(config, task, plans)
        _fit(config, store, model)


def _rehearse(
    config: RehearseConfig, task: ShardingTask, store: MeasurementStore
) -> list[ShardingPlan]:
    """Trains by random plans; returns them."""
    with closing(RankGroup(config.num_devices, config.devices)) as ranks:
        here = replace(task, devices=ranks.devices())
        drawn = random_plans(here, config.seed)
        rng = np.random.default_rng(config.seed)
        plans = list(islice(drawn, config.num_plans))
        plans += islice(copying_plans(drawn, here, rng), config.num_copying)
        plans += islice(row_wise_plans(drawn, here, rng), config.num_row_wise)
        cli.say(f"training by {len(plans)} random plans of {len(task.tables)} tables")
        named = {f"plan {number}": plan for number, plan in enumerate(plans)}
        found = ranks.train_interleaved(task, named, Effort(config.rounds), store)
    for name, rehearsal in found.items():
        launched = f", launched in {rehearsal.launch_ms:.2f} ms" * bool(rehearsal.launch_ms)
        cli.say(f"  {name}: {rehearsal.step_ms:.2f} ms (±{rehearsal.half_width:.1%}){launched}")
    return plans


def _measure(config: RehearseConfig, task: ShardingTask, plans: Sequence[ShardingPlan]) -> None:
    """Measures the operators of plans."""
    shards = [shard for plan in plans for shard in plan.shards(task) if shard is not None]
    with measuring_pool(config.store, config.devices) as pool:
        settings = MeasureSettings(task.batch_size, task.operator)
        repeats = RepeatedMeasurements(pool, settings, evaluation_seeds(SEEDS), notify=cli.note)
        repeats.measure(shards, SEEDS)
        cli.say(f"measured {len(shards)} operators in {repeats.seconds:.0f} s")


def _fit(config: RehearseConfig, store: MeasurementStore, model: CostModel) -> None:
    """Fits all rehearsals of the store; prints the terms and saves the model."""
    makes = store.makes()
    if not makes:
        raise UserError(f"{config.store}: holds no measurements: name --tables to rehearse")
    hardware, versions = makes[-1]
    measured_at = store.level(hardware, versions)
    level = _level_of_model(model, hardware) or measured_at
    factor = level.both_ms / measured_at.both_ms if level and measured_at else 1.0
    known: dict[str, tuple[list[RehearsedPlan], list[Floats]]] = {
        like: ([], []) for like in ("", *WAY_FITS)
    }
    for plan in rehearsed_plans(store, hardware):
        found = measured_operators(store, plan, hardware, versions)
        like = plans_like(plan.plan)
        if found is not None and like is not None:
            rehearsed, operators = known[like]
            rehearsed.append(plan.scaled(factor))
            operators.append(factor * found)
    overhead = _fitted(known, model, hardware, level)
    for like, (rehearsed, operators) in known.items():
        if rehearsed:
            report = report_on(overhead, rehearsed, operators)
            cli.say(
                f"{len(rehearsed)} plans{like} on {hardware}: step over price {report.ratio:.3f}, "
                f"deviation {report.deviation:.1%}"
            )
            shares = ", ".join(f"{name} {share:.1%}" for name, share in report.shares.items())
            cli.say(f"  shares of a step: {shares}")
    for line in coefficient_lines(overhead):
        cli.say(f"  {line}")
    if config.out is not None:
        overheads = {**model.overheads, hardware: overhead}
        learned = replace(model, overhead=model.overhead or overhead, overheads=overheads)
        save_model(learned, config.out, config.force)
        cli.say(f"the model is in {config.out}")


def _fitted(
    known: Mapping[str, tuple[Sequence[RehearsedPlan], Sequence[Floats]]],
    model: CostModel,
    hardware: str,
    level: ReferenceLevel | None,
) -> StepOverhead:
    """Returns the overhead fitted to plans and measured operators of each way, where enough."""
    overhead = replace(fit_overhead(*known[""]), reference_level=level)
    known_here = model.overheads_at(hardware, level).get(hardware)
    if known_here is not None:
        overhead = overhead.with_ways_of(known_here)
    for like, (_, fit) in WAY_FITS.items():
        if len(known[like][0]) >= MIN_REHEARSALS:
            overhead = fit(overhead, *known[like])
        elif known_here is not None:
            cli.note(
                f"{len(known[like][0])} plans{like} were rehearsed, and at least {MIN_REHEARSALS} "
                "are needed to say what these take: the model's figures are kept, if it has any"
            )
    return overhead


def _level_of_model(model: CostModel, hardware: str) -> ReferenceLevel | None:
    """Returns the reference level to which the model's costs on this hardware are normalised."""
    known = model.on_hardware(hardware)
    return None if known is None else known.provenance.reference_level


if __name__ == "__main__":
    cli.run_command(main, RehearseConfig)
