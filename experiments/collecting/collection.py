"""Measuring many shards with a bar that tells how long it takes, and what came of it."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.benchmark import BenchmarkPool, Measurement, MeasureSettings
from autoshard.benchmark.backends import backend_of
from autoshard.benchmark.hardware import DeviceInfo
from autoshard.experiments.collecting.pacing import Pace, stream_within
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.progress import following
from autoshard.experiments.tracking.storage import Storage
from autoshard.workload import EmbeddingTable, Shard, UserError, random_exchanges
from autoshard.workload.sampling import MOST_TASK_DEVICES

_KEEP_SECONDS = 60.0  # between two copies to --storage


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Args:
        requested: shards.
        measured: of these.
        reused: of these, from the store.
        failed: of these.
        left_out: of these, as --seconds were spent.
        seconds: that measuring took.
        promised_seconds: that it was told to take, at its start; None if too few were measured to
            tell.
        shards_per_second: measured ones.
        duty_cycle: share of the devices' time inside timed operators.
        devices: name, kind and node of each.
        median_spread: of the costs.
    """

    requested: int
    measured: int
    reused: int
    failed: int
    left_out: int
    seconds: float
    promised_seconds: float | None
    shards_per_second: float
    duty_cycle: float
    devices: list[dict[str, str]]
    median_spread: float

    @staticmethod
    def together(runs: Sequence["Summary"]) -> "Summary":
        """Of runs one after another on the same devices."""
        if len(runs) == 1:
            return runs[0]
        requested, measured, reused, failed, left_out = (
            sum(getattr(run, count) for run in runs)
            for count in ("requested", "measured", "reused", "failed", "left_out")
        )
        seconds = sum(run.seconds for run in runs)
        told = [run.promised_seconds for run in runs if run.promised_seconds is not None]
        rate = sum(run.shards_per_second * run.seconds for run in runs) / seconds
        duty = sum(run.duty_cycle * run.seconds for run in runs) / seconds
        return Summary(
            requested=requested,
            measured=measured,
            reused=reused,
            failed=failed,
            left_out=left_out,
            seconds=round(seconds, 3),
            promised_seconds=round(sum(told), 3) if len(told) == len(runs) else None,
            shards_per_second=round(rate, 3),
            duty_cycle=round(duty, 4),
            devices=runs[0].devices,
            median_spread=round(statistics.median(run.median_spread for run in runs), 5),
        )


def collect(
    pool: BenchmarkPool,
    shards: Sequence[Shard],
    settings: MeasureSettings,
    budget: Budget | None = None,
    storage: Storage | None = None,
) -> Summary:
    """Measure the shards with a progress bar, as many as the budget allows.

    Tells how long it will take as soon as that is known. Ctrl-C keeps what was measured.
    """
    budget = budget or Budget()
    devices = pool.devices()
    cli.console.print(
        f"measuring {len(shards)} shards, batch {settings.batch_size:,}, on "
        + ", ".join(device.name for device in devices)
    )
    answers: list[Measurement] = []
    pace, promised = Pace(shards, settings.batch_size, len(devices)), None
    started = kept = time.monotonic()
    stream = stream_within(pool, shards, settings, pace, budget, retry_failed=True)
    try:
        with following(len(shards), "shards", lambda: budget.at_most(pace.left_s())) as step:
            for _, measurement in stream:
                answers.append(measurement)
                step()
                if promised is None and (left := pace.left_s()) is not None:
                    promised = _promised(pace.passed_s, left, budget)
                if storage is not None and time.monotonic() - kept > _KEEP_SECONDS:
                    storage.keep_store(pool.store)
                    kept = time.monotonic()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{len(answers)} of {len(shards)} shards are in {pool.store}; run again to go on"
        ) from None
    for notice in pool.notices():
        cli.console.print(f"note: {notice}", markup=False)
    seconds = time.monotonic() - started
    return summarise(answers, devices, seconds, len(shards), promised)


def _promised(passed_s: float, left_s: float, budget: Budget) -> float:
    """Seconds that measuring will take in all, which is told."""
    if left_s <= budget.left_s():
        cli.console.print(f"  this will take {passed_s + left_s:.0f} s, {left_s:.0f} more")
        return passed_s + left_s
    cli.console.print(
        f"  all would take {passed_s + left_s:.0f} s, more than {budget} leave for it: some will "
        "be left out",
        soft_wrap=True,
    )
    return passed_s + budget.left_s()


def collect_exchanges(
    pool: BenchmarkPool,
    tables: Sequence[EmbeddingTable],
    count: int,
    batch_size: int,
    seed: int,
    budget: Budget,
) -> None:
    """Measure `count` random all-to-alls, those that are not in the store yet, within the budget.

    They are among as many ranks as the kind of device allows.
    """
    if count == 0:
        return
    devices = pool.devices()
    ranks = len(devices) * backend_of(devices[0].kind).max_ranks
    most = int(min(MOST_TASK_DEVICES, ranks))
    if most < 2:
        raise UserError("an all-to-all needs at least two devices, the cluster has one")
    exchanges = random_exchanges(tables, count, most, seed)
    with following(len(exchanges), "all-to-alls") as step:
        for number, dims in enumerate(exchanges):
            if budget.is_spent:
                cli.console.print(
                    f"stopped by {budget}: {number} of {len(exchanges)} all-to-alls measured; run "
                    "again to go on"
                )
                return
            pool.exchange(dims, batch_size)
            step()


def summarise(
    answers: Sequence[Measurement],
    devices: Sequence[DeviceInfo],
    seconds: float,
    requested: int,
    promised_seconds: float | None = None,
) -> Summary:
    """The figures of a run over these devices."""
    fresh = [answer for answer in answers if not answer.reused]
    timings = [answer.timing for answer in fresh if answer.timing is not None]
    busy = sum(timing.operator_seconds for timing in timings)
    known = [answer.timing.spread for answer in answers if answer.timing is not None]
    return Summary(
        requested=requested,
        measured=len(timings),
        reused=sum(answer.reused and answer.ok for answer in answers),
        failed=sum(not answer.ok for answer in answers),
        left_out=requested - len(answers),
        seconds=round(seconds, 3),
        promised_seconds=None if promised_seconds is None else round(promised_seconds, 3),
        shards_per_second=round(len(fresh) / seconds, 3) if fresh else 0.0,
        duty_cycle=round(busy / (seconds * len(devices)), 4),
        devices=[{"name": d.name, "kind": d.kind, "node": d.node} for d in devices],
        median_spread=round(statistics.median(known), 5) if known else 0.0,
    )
