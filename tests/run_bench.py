#!/usr/bin/env python
"""Take the figures that README and docs quote, on this machine, and write them there."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench import report
from bench.collecting import collecting_figures
from bench.families import (
    by_heart_figures,
    family_figures,
    measured_family_figures,
)
from bench.figure import Group, Taken
from bench.headroom import headroom_figures, size_figures
from bench.learners import learner_figures
from bench.measuring import measuring_figures, yardstick_figures
from bench.model import learning_figures, promise_figures
from bench.noise import flush_figures, noise_figures
from bench.policy import (
    memory_figures,
    plan_figures,
    speed_figures,
    training_figures,
    transfer_figures,
)
from bench.pool import scale_figures
from bench.published import published_figures
from bench.rehearsal import rehearsal_figures
from bench.sweep import sweep_figures
from rich.table import Table

from autoshard.benchmark.hardware import cpu_fingerprint, machine_memory_bytes, physical_cores
from autoshard.experiments.console import cli
from autoshard.experiments.console.checkout import git_commit, is_changed
from autoshard.experiments.console.outputs import check_folder
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.workload import UserError

# In the order in which they are taken and told.
GROUPS: Mapping[str, Group] = {
    "timing": Group(
        "Timing on one core", lambda _: [*yardstick_figures(), *flush_figures()], on_ray=False
    ),
    "cost-model": Group("The cost model", lambda _: learning_figures(), on_ray=False),
    "families": Group(
        "Families of tables that the shipped model has not learned from",
        lambda _: family_figures(),
        on_ray=False,
    ),
    "sharders": Group(
        "Speed of sharders, and tight memory",
        lambda _: [*speed_figures(), *memory_figures()],
        on_ray=False,
    ),
    "headroom": Group(
        "What there is to be won in families of tasks, by the cost model",
        lambda _: headroom_figures(),
    ),
    "sizes": Group(
        "Plans for tasks of sizes that nobody trains on, by the cost model",
        lambda _: size_figures(),
    ),
    "learners": Group(
        "What learners learn of all families in 120 s, three seeds each, by the cost model",
        lambda _: learner_figures(),
    ),
    "measuring": Group("Measuring", measuring_figures),
    "noise": Group("Noise of a measurement", noise_figures),
    "collecting": Group("What collecting promises", collecting_figures),
    "pool": Group("Many devices, many askers", scale_figures),
    "promises": Group(
        "What plans promise by the calibrated cost model, and measure", promise_figures
    ),
    "by-heart": Group("Tables learned by heart", by_heart_figures),
    "family-plans": Group("Plans for families left out, measured", measured_family_figures),
    "plans": Group("Plans for 60 tables on 4 devices, measured", plan_figures),
    "published": Group(
        "Plans of two families of tasks, and of the published recipes, measured",
        published_figures,
    ),
    "transfer": Group("The same policy on other tasks, measured", transfer_figures),
    "training-torchrec": Group("Training by plans, with TorchRec", rehearsal_figures),
    "training": Group("Training a policy", training_figures),
    "sweep": Group("Sweeps", sweep_figures),
}


@dataclass(frozen=True)
class BenchConfig:
    """Take the figures that README and docs quote, and write them there.

    All of them take about 105 minutes on two slow cores; docs/figures.md tells of each group how
    long it took. What was taken stays when the bench is stopped.
    """

    only: str = ",".join(GROUPS)
    """Groups of figures to take, with commas between them; the others stay as they are. With
    none ('') documents are written anew with what was taken before."""
    out: Path = Path("docs")
    """Folder for figures.json and figures.md. Tables of figures in its other pages, and in the
    README beside it, are brought up to date."""


def main(config: BenchConfig) -> None:
    """Take a group of figures after another, and write the documents after each."""
    names = _names(config.only)
    check_folder(config.out, "--out")
    known = report.load(config.out)
    report.save(config.out, _in_order(known))
    with ExitStack() as stack:
        for number, name in enumerate(names, 1):
            cli.console.rule(f"{number}/{len(names)} {GROUPS[name].title}", align="left")
            if GROUPS[name].on_ray:
                stack.enter_context(ray_cluster())  # the first one starts or joins it for all
            taken = _take(name)
            _print(taken)
            known[name] = taken
            report.save(config.out, _in_order(known))


def _names(asked: str) -> Sequence[str]:
    """The groups asked for, in our order; UserError if one is not known."""
    wanted = {name.strip() for name in asked.split(",") if name.strip()}
    if unknown := sorted(wanted - set(GROUPS)):
        raise UserError(
            f"--only: no group of figures is called {', '.join(unknown)}: there are "
            f"{', '.join(GROUPS)}"
        )
    return [name for name in GROUPS if name in wanted]


def _take(name: str) -> Taken:
    """A group of figures, with what they were taken with."""
    commit = git_commit() or "unknown"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = tuple(GROUPS[name].take(Path(folder)))
    cores, gib = len(physical_cores()), machine_memory_bytes() / 2**30
    return Taken(
        title=GROUPS[name].title,
        machine=f"{cpu_fingerprint()}, {cores} cores, {gib:.0f} GiB",
        date=datetime.now(tz=UTC).date().isoformat(),
        commit=commit[:12] + (" with changes" if is_changed() else ""),
        seconds=round(time.monotonic() - started, 1),
        figures=figures,
    )


def _in_order(known: Mapping[str, Taken]) -> Mapping[str, Taken]:
    """As they are told, whenever they were taken; without groups that are no more."""
    return {name: known[name] for name in GROUPS if name in known}


def _print(taken: Taken) -> None:
    table = Table("figure", "goal", "measured")
    for figure in taken.figures:
        table.add_row(figure.name, figure.goal, figure.measured)
    cli.console.print(table, f"{taken.seconds:,.0f} s")


if __name__ == "__main__":
    cli.run_command(main, BenchConfig)
