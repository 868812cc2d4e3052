"""Measures many shards with a progress bar, and summarises the run."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.benchmark import BenchmarkPool, Measurement, MeasureSettings
from autoshard.benchmark.backends import backend_of
from autoshard.benchmark.hardware import DeviceInfo
from autoshard.experiments.collecting.pacing import Pace, stream_within
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.progress import following
from autoshard.experiments.console.ray_cluster import Notices
from autoshard.experiments.tracking.storage import Storage
from autoshard.workload import EmbeddingTable, Shard, UserError, random_exchanges
from autoshard.workload.sampling import MAX_TASK_DEVICES

_KEEP_SECONDS = 60.0  # between two copies to --storage


@dataclass(frozen=True)
class Summary:
    """What a run measured.

    Args:
        requested: Number of shards.
        measured: Shards that were measured.
        reused: Shards that the store held.
        failed: Shards that could not be measured.
        left_out: Shards that --seconds left no time for.
        seconds: Measuring time.
        promised_seconds: Predicted measuring time; None if too few shards were measured.
        shards_per_second: Measured shards a second.
        duty_cycle: Share of the devices' time inside timed operators.
        devices: Name, kind and node of each device.
        median_spread: Median relative spread of the costs.
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


def collect(
    pool: BenchmarkPool,
    shards: Mapping[MeasureSettings, Sequence[Shard]],
    budget: Budget | None = None,
    storage: Storage | None = None,
) -> Summary:
    """Measures shards with a progress bar, as many as the budget allows, in turns of settings.

    Args:
        pool: Measures.
        shards: Shards by the settings to measure them with, which divide the budget.
        budget: Time limit.
        storage: Where the store is copied now and then.

    Raises:
        KeyboardInterrupt: Says how many shards are in the store.
    """
    budget, devices = budget or Budget(), pool.devices()
    answers: list[Measurement] = []
    predicted: list[float | None] = []
    started = kept = time.monotonic()
    for number, (settings, some) in enumerate(shards.items()):
        cli.console.print(
            f"measuring {len(some)} shards, batch {settings.batch_size:,}, on "
            + ", ".join(device.name for device in devices)
        )
        left, before = len(shards) - number, len(answers)
        part = budget if left == 1 else budget.part(1 / left)
        pace, total_s = Pace(some, settings.batch_size, len(devices)), None
        stream = stream_within(pool, some, settings, pace, part, retry_failed=True)
        try:
            with following(len(some), "shards", lambda: part.at_most(pace.left_s())) as step:  # noqa: B023
                for _, measurement in stream:
                    answers.append(measurement)
                    step()
                    if total_s is None and (left_s := pace.left_s()) is not None:
                        total_s = _announce(pace.passed_s, left_s, part)
                    if storage is not None and time.monotonic() - kept > _KEEP_SECONDS:
                        storage.keep_store(pool.store)
                        kept = time.monotonic()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{len(answers) - before} of {len(some)} shards are in {pool.store}; run again to "
                "go on"
            ) from None
        predicted.append(total_s)
    Notices().tell(pool)
    known = [each for each in predicted if each is not None]
    return summarise(
        answers,
        devices,
        time.monotonic() - started,
        sum(map(len, shards.values())),
        sum(known) if len(known) == len(predicted) else None,
    )


def _announce(passed_s: float, left_s: float, budget: Budget) -> float:
    """Prints and returns the seconds that measuring will take in all."""
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
    most = int(min(MAX_TASK_DEVICES, ranks))
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
    """Returns the summary of a run over these devices."""
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
