#!/usr/bin/env python
"""Measure the metrics that README and docs quote, and update these documents."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench import report
from bench.drift import callback_metrics, drift_metrics
from bench.drop_in import drop_in_metrics
from bench.drop_in_steps import drop_in_step_metrics
from bench.families import (
    correction_metrics,
    family_metrics,
    measured_family_metrics,
)
from bench.gpu_steps import gpu_step_metrics
from bench.headroom import headroom_metrics, size_metrics
from bench.host_memory import host_memory_metrics
from bench.learners import learner_metrics
from bench.machines import machine_metrics
from bench.measuring import collecting_metrics, measuring_metrics, yardstick_metrics
from bench.memory import slower_memory_metrics
from bench.metric import Group, GroupResult
from bench.mixed import mixed_metrics
from bench.model import learning_metrics, prediction_metrics
from bench.nodes import node_metrics
from bench.noise import flush_metrics, noise_metrics
from bench.policy import (
    memory_metrics,
    plan_metrics,
    speed_metrics,
    sweep_metrics,
    training_metrics,
    transfer_metrics,
)
from bench.pool import scale_metrics
from bench.published import published_metrics
from bench.rehearsal import rehearsal_metrics
from bench.simulated import simulated_metrics
from bench.ways import ways_metrics
from chaos.metrics import chaos_metrics
from rich.table import Table

from autoshard.benchmark.machine.hardware import (
    cpu_fingerprint,
    machine_memory_bytes,
    physical_cores,
)
from autoshard.experiments.console import cli
from autoshard.experiments.console.checkout import git_commit, is_changed
from autoshard.experiments.console.inputs import check_folder
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.workload import UserError

# In the order of measuring and of the page.
GROUPS: Mapping[str, Group] = {
    "timing": Group(
        "Timing on one core", lambda _: [*yardstick_metrics(), *flush_metrics()], on_ray=False
    ),
    "cost-model": Group("The cost model", lambda _: learning_metrics(), on_ray=False),
    "machines": Group("Machines left out of training", lambda _: machine_metrics(), on_ray=False),
    "simulated": Group("Plans with a simulated truth", lambda _: simulated_metrics(), on_ray=False),
    "families": Group("Held-out families of tables", lambda _: family_metrics(), on_ray=False),
    "sharders": Group(
        "Speed, and tight memory", lambda _: [*speed_metrics(), *memory_metrics()], on_ray=False
    ),
    "drop-in": Group("In place of TorchRec's planner", lambda _: drop_in_metrics(), on_ray=False),
    "ways": Group(
        "Rows and copies beside columns, predicted", lambda _: ways_metrics(), on_ray=False
    ),
    "gpu-steps": Group(
        "Training steps on GPUs, by price", lambda _: gpu_step_metrics(), on_ray=False
    ),
    "nodes": Group("Nodes with a slow link between them", lambda _: node_metrics(), on_ray=False),
    "mixed": Group("Devices that differ", lambda _: mixed_metrics(), on_ray=False),
    "memory": Group(
        "Slower memory, simulated",
        lambda _: [*slower_memory_metrics(), *host_memory_metrics()],
        on_ray=False,
    ),
    "drift": Group(
        "Drift of lookups", lambda _: [*callback_metrics(), *drift_metrics()], on_ray=False
    ),
    "headroom": Group("Headroom in families of tasks, predicted", lambda _: headroom_metrics()),
    "sizes": Group("Task sizes not used in training, predicted", lambda _: size_metrics()),
    "learners": Group(
        "Learners after 120 s with three seeds, predicted", lambda _: learner_metrics()
    ),
    "measuring": Group("Measuring", measuring_metrics),
    "noise": Group("Noise of measurements", noise_metrics),
    "collecting": Group("Time prediction of cost collection", collecting_metrics),
    "pool": Group("Many devices, many clients", scale_metrics),
    "predictions": Group("Predicted and measured cost of plans", prediction_metrics),
    "corrections": Group("Per-table corrections from 60 s of measuring", correction_metrics),
    "family-plans": Group("Measured plans for held-out families", measured_family_metrics),
    "plans": Group("Measured plans for 60 tables on 4 devices", plan_metrics),
    "published": Group("Measured plans, and published systems", published_metrics),
    "transfer": Group("Measured plans for other task sizes, same policy", transfer_metrics),
    "training-torchrec": Group("Training step time with TorchRec", rehearsal_metrics),
    "drop-in-steps": Group(
        "Training steps in place of TorchRec's planner", lambda _: drop_in_step_metrics()
    ),
    "training": Group("Training a policy", training_metrics),
    "sweep": Group("Sweeps", sweep_metrics),
    "chaos": Group("Faults at random moments", lambda _: chaos_metrics(), on_ray=False),
}


@dataclass(frozen=True)
class BenchConfig:
    """Measure the metrics that README and docs quote, and update these documents.

    All groups take some four hours on two cores; docs/figures.md has the time of each. If the bench
    is stopped, completed groups are kept.
    """

    only: str = ",".join(name for name in GROUPS if name != "chaos")
    """Groups to measure, separated by commas; others keep their values. Default: all but chaos. The
    empty string measures nothing and rewrites the documents."""
    out: Path = Path("docs")
    """Folder of figures.json and figures.md. Tables of metrics in its other pages, and in the
    README beside it, are updated."""


def main(config: BenchConfig) -> None:
    """Measures the groups and writes the documents after each."""
    names = _names(config.only)
    check_folder(config.out, "--out")
    known = report.load(config.out)
    report.save(config.out, _in_order(known))
    with ExitStack() as stack:
        for number, name in enumerate(names, 1):
            cli.console.rule(f"{number}/{len(names)} {GROUPS[name].title}", align="left")
            if GROUPS[name].on_ray:
                stack.enter_context(ray_cluster())  # the first one starts or joins it for all
            known[name] = _measured(name)
            _print(known[name])
            report.save(config.out, _in_order(known))


def _names(asked: str) -> Sequence[str]:
    """Returns the requested groups in the order of GROUPS; raises UserError for unknown ones."""
    wanted = {name.strip() for name in asked.split(",") if name.strip()}
    if unknown := sorted(wanted - set(GROUPS)):
        raise UserError(
            f"--only: unknown group {', '.join(unknown)}: use some of {', '.join(GROUPS)}"
        )
    return [name for name in GROUPS if name in wanted]


def _measured(name: str) -> GroupResult:
    """Measures a group; adds machine, date, commit and duration."""
    commit = git_commit() or "unknown"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        metrics = tuple(GROUPS[name].measure(Path(folder)))
    cores, gib = len(physical_cores()), machine_memory_bytes() / 2**30
    return GroupResult(
        title=GROUPS[name].title,
        machine=f"{cpu_fingerprint()}, {cores} cores, {gib:.0f} GiB",
        date=datetime.now(tz=UTC).date().isoformat(),
        commit=commit[:12] + (" with changes" if is_changed() else ""),
        seconds=round(time.monotonic() - started, 1),
        metrics=metrics,
    )


def _in_order(known: Mapping[str, GroupResult]) -> Mapping[str, GroupResult]:
    """Returns the results in the order of GROUPS, without groups that no longer exist."""
    return {name: known[name] for name in GROUPS if name in known}


def _print(result: GroupResult) -> None:
    table = Table("metric", "target", "measured")
    for metric in result.metrics:
        table.add_row(metric.name, metric.target, metric.measured)
    cli.console.print(table, f"{result.seconds:,.0f} s")


if __name__ == "__main__":
    cli.run_command(main, BenchConfig)
