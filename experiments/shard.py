#!/usr/bin/env python
"""Shard your own tables: a plan of who holds what, and what it will cost."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autoshard.benchmark import MeasurementStore, MeasureSettings, PlanCost
from autoshard.cost_model import load_model
from autoshard.cost_model.training import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.outputs import PICTURES, check_file
from autoshard.experiments.judging.judge import judge_plan
from autoshard.experiments.judging.outcomes import Maxima, best_heuristic, maxima_of
from autoshard.experiments.judging.shard_visits import (
    SEEDS,
    ShardVisits,
    judging_seeds,
    plan_pool,
    told_as,
    verifying_seeds,
)
from autoshard.experiments.training.loading import check_sharders, model_beside, oracle_for
from autoshard.experiments.training.policy_check import PolicyCheck
from autoshard.sharders import (
    HEURISTICS,
    NEED_POLICY,
    NEED_POOL,
    VERIFY_SECONDS,
    Means,
    load_policy,
    make_sharder,
)
from autoshard.workload import Device, ShardingTask, UserError, load_tables
from autoshard.workload.bounds import check_bounds

_GB = 2**30
_MOST_GB = 2**32  # more than there is
_ALIKE = 5e-4  # a relative difference that would read 0.0 %


@dataclass(frozen=True)
class ShardConfig:
    """Decide which device holds which table, or which of its columns.

    It needs neither a cluster nor a network: costs are estimated by a cost model. Only
    autoshard_verified measures its best plans, on the Ray cluster that it finds or starts.
    """

    tables: str
    """A CSV, JSON, Parquet or dlrm_datasets file, or synthetic:N[:SEED[:small|full]]."""
    num_devices: int
    """Devices to shard over."""
    memory_gb: str
    """GB (of 2^30 bytes) that weights and optimizer state may take of a device: one number for
    all, or one for each with commas between them."""
    sharder: str = "autoshard"
    """Who decides: autoshard, policy, cost, size_lookup, ...; a wrong name lists them all."""
    out: Path = Path("plan.json")
    """File for the plan."""
    picture: Path | None = None
    """PNG or SVG of what each device costs."""
    batch_size: int = 1024
    """Samples of a batch."""
    policy: Path = Path("cpu")
    """Folder of a policy, as ppo_shard.py makes it, or the name of one that is shipped."""
    cost_model: Path | None = None
    """Folder of a cost model, or the name of one that is shipped; by default the one in the
    policy's folder, else the shipped one."""
    seed: int = 0
    """Of sharders that draw."""
    verified: int = 3
    """Plans that autoshard_verified measures: all once, the better half again, and so on."""
    verify_seconds: float = VERIFY_SECONDS
    """Seconds that autoshard_verified may measure. All its plans are measured once."""
    store: Path = Path("costs.db")
    """SQLite file that keeps what autoshard_verified measures."""

    def check(self) -> None:
        """UserError unless the options make sense."""
        check_sharders([self.sharder])
        counts = ("num_devices", "batch_size", "verified")
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), "seed": 0},
            more_than={"verify_seconds": 0},
        )
        check_file(self.out, "--out")
        check_file(self.picture, "--picture", PICTURES)

    def devices(self) -> tuple[Device, ...]:
        """The devices with their memory; UserError unless it is one number, or one for each."""
        try:
            numbers = [float(part) for part in self.memory_gb.split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(0 < number < _MOST_GB for number in numbers):
            raise UserError(
                f"--memory-gb must be a number more than 0, or one for each device as in 16,16,32, "
                f"got {self.memory_gb!r}"
            )
        if len(numbers) not in (1, self.num_devices):
            raise UserError(
                f"--memory-gb names {len(numbers)} devices and --num-devices {self.num_devices}: "
                "give one number for all, or one for each"
            )
        each = numbers * (self.num_devices // len(numbers))
        return tuple(Device(f"device{n}", int(number * _GB)) for n, number in enumerate(each))


@one_thread()  # of several, each waits for the others: networks this small gain nothing
def main(config: ShardConfig) -> None:
    """Plan, say what the plan costs beside the best heuristic's, write it."""
    config.check()
    devices, tables = config.devices(), load_tables(config.tables)
    policy = load_policy(config.policy)
    model = load_model(config.cost_model or model_beside(config.policy))
    if config.sharder in NEED_POLICY:
        policy.check(len(devices))
    oracle = oracle_for(model, config.batch_size, tables)
    task = ShardingTask(tables, devices, config.batch_size, model.provenance.operator)
    with ExitStack() as stack:
        measuring = None
        if config.sharder in NEED_POOL:
            MeasurementStore(config.store).close()  # one that cannot be used is told at once
            pool = stack.enter_context(plan_pool(config.store))
            settings = MeasureSettings(config.batch_size, task.operator)
            measuring = partial(ShardVisits, pool, settings, told=told_as(model, pool))
        verify = None if measuring is None else measuring(verifying_seeds(SEEDS)).max_ms
        means = Means(oracle, policy, verify, config.verified, config.verify_seconds, config.seed)
        plan = make_sharder(config.sharder, means).shard(task)
        plan.check(task)
        measured = None
        if measuring is not None:
            measured = judge_plan(measuring(judging_seeds(SEEDS)), task, plan, visits=SEEDS)
    cost = oracle.plan_cost(plan, task)
    cli.console.print(cost.table(f"{config.sharder}, estimated"))
    heuristics = PolicyCheck([task], config.seed).outcomes(policy, model, tuple(HEURISTICS))
    cli.console.print(_compared(config.sharder, cost, maxima_of(heuristics)), soft_wrap=True)
    if measured is not None:
        low, high = measured.interval_ms
        cli.console.print(
            f"measured: {measured.mean_ms:.2f} ms (95 % interval {low:.2f} to {high:.2f} ms)"
        )
    if config.picture is not None:
        cost.picture(config.picture, config.sharder)
    plan.save(config.out)
    cli.console.print(f"the plan is in {config.out}", soft_wrap=True)


def _compared(sharder: str, cost: PlanCost, maxima: Maxima) -> str:
    """One line: what the slowest device computes, and what it would by the best heuristic."""
    ours = cost.max_compute_ms
    line = f"estimated: the slowest device computes {ours:.2f} ms a step (all-to-all left out)"
    best = best_heuristic(maxima)
    assert best is not None  # all heuristics are among them
    (theirs,) = maxima[best]
    if theirs is None:
        return f"{line}; no heuristic finds a plan that fits"
    less = 1 - ours / theirs
    if sharder == best or abs(less) < _ALIKE:
        return f"{line}, the least of any heuristic"
    told = f"{less:.1%} less" if less > 0 else f"{-less:.1%} more"
    return f"{line}, {told} than by the best heuristic ({best}, {theirs:.2f} ms)"


if __name__ == "__main__":
    cli.run_command(main, ShardConfig)
