"""Measures many shards with a progress bar, and summarises the run."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.benchmark import BenchmarkPool, Exchange, Measurement, MeasureSettings
from autoshard.benchmark.backends import backend_of
from autoshard.benchmark.machine.hardware import DeviceInfo
from autoshard.benchmark.measurement import MeasuredCollective
from autoshard.experiments.collecting.pacing import Pace, stream_within
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.progress import following
from autoshard.experiments.console.ray_cluster import Notices
from autoshard.experiments.tracking.storage import Storage
from autoshard.workload import EmbeddingTable, Shard, UserError, random_exchanges
from autoshard.workload.sampling import MAX_TASK_DEVICES

# Columns of each rank in the collectives to which links are fitted.
FITTED: Mapping[MeasuredCollective, Sequence[int]] = {
    "all_to_all": (16, 64, 128, 256, 512),
    "all_reduce": (16, 128, 512),
}
_KEEP_SECONDS = 60.0  # between two copies to --storage


@dataclass(frozen=True)
class Summary:
    """The summary of a run."""

    requested: int  # number of shards
    measured: int  # number of measured shards
    reused: int  # number of shards that the store held
    failed: int  # number of shards that could not be measured
    left_out: int  # number of shards left out because of --seconds
    seconds: float  # measuring time
    promised_seconds: float | None  # predicted measuring time; None if too few shards were measured
    shards_per_second: float  # measured shards per second
    duty_cycle: float  # share of the devices' time inside timed operators
    devices: list[dict[str, str]]  # name, kind and node of each device
    median_spread: float  # median relative spread of the costs


def collect(
    pool: BenchmarkPool,
    shards: Mapping[MeasureSettings, Sequence[Shard]],
    budget: Budget | None = None,
    storage: Storage | None = None,
) -> Summary:
    """Measures shards with a progress bar, as many as the budget allows.

    Args:
        pool: Pool that measures.
        shards: Shards by the settings to measure them with, which share the budget.
        budget: Time limit.
        storage: Storage to which the store is copied every minute.

    Raises:
        KeyboardInterrupt: The message has the number of measured shards.
    """
    budget, devices = budget or Budget(), pool.devices()
    answers: list[Measurement] = []
    predicted: list[float | None] = []
    started = kept = time.monotonic()
    for number, (settings, part_shards) in enumerate(shards.items()):
        names = ", ".join(device.name for device in devices)
        cli.say(f"measuring {len(part_shards)} shards, batch {settings.batch_size:,}, on {names}")
        left, before = len(shards) - number, len(answers)
        part = budget if left == 1 else budget.part(1 / left)
        pace, total_s = Pace(part_shards, settings.batch_size, len(devices)), None
        stream = stream_within(pool, part_shards, settings, pace, part, retry_failed=True)
        try:
            with following(len(part_shards), "shards", lambda: part.at_most(pace.left_s())) as step:  # noqa: B023
                for _, measurement in stream:
                    answers.append(measurement)
                    step()
                    if total_s is None and (left_s := pace.left_s()) is not None:
                        total_s = pace.passed_s + part.left_s()
                        if left_s <= part.left_s():
                            total_s = pace.passed_s + left_s
                            cli.say(f"  this will take {total_s:.0f} s, {left_s:.0f} more")
                        else:
                            cli.say(
                                f"  all would take {pace.passed_s + left_s:.0f} s, more than "
                                f"{part} leave: some will be left out"
                            )
                    if storage is not None and time.monotonic() - kept > _KEEP_SECONDS:
                        storage.keep_store(pool.store)
                        kept = time.monotonic()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{len(answers) - before} of {len(part_shards)} shards are in {pool.store}; run "
                "again to continue"
            ) from None
        predicted.append(total_s)
    Notices().print_new(pool)
    known = [seconds for seconds in predicted if seconds is not None]
    return summarise(
        answers,
        devices,
        time.monotonic() - started,
        sum(map(len, shards.values())),
        sum(known) if len(known) == len(predicted) else None,
    )


def collect_exchanges(
    pool: BenchmarkPool,
    tables: Sequence[EmbeddingTable],
    count: int,
    batch_size: int,
    seed: int,
    budget: Budget,
) -> None:
    """Measures those of `count` random all-to-alls that the store lacks, within the budget.

    They have up to as many ranks as the kind of device allows. All-reduces by which links are
    fitted come after them.
    """
    if count == 0:
        return
    devices = pool.devices()
    ranks = len(devices) * backend_of(devices[0].kind).max_ranks
    max_ranks = int(min(MAX_TASK_DEVICES, ranks))
    if max_ranks < 2:
        raise UserError(
            "--num-exchanges needs at least two devices, the cluster has one: leave it out"
        )
    exchanges = random_exchanges(tables, count, max_ranks, seed)
    with following(len(exchanges), "all-to-alls") as step:
        for number, dims in enumerate(exchanges):
            if budget.is_spent:
                cli.say(
                    f"stopped by {budget}: {number} of {len(exchanges)} all-to-alls measured; run "
                    "again to continue"
                )
                return
            pool.exchange(dims, batch_size)
            step()
    measure_equal(pool, batch_size, {"all_reduce": FITTED["all_reduce"]})


def measure_equal(
    pool: BenchmarkPool,
    batch_size: int,
    columns: Mapping[MeasuredCollective, Sequence[int]] = FITTED,
) -> list[Exchange]:
    """Measures collectives with as many columns on each rank, inside a node and among all nodes.

    Args:
        pool: Pool that measures, on each of its devices.
        batch_size: Samples of the batch of all ranks.
        columns: Columns of each rank, by the collective.
    """
    pool.devices()  # waits for some
    sizes = pool.node_sizes()
    places = {1: max(sizes), len(sizes): min(sizes) * len(sizes)}  # ranks by the number of nodes
    return [
        pool.exchange((number,) * ranks, batch_size, nodes, collective)
        for nodes, ranks in places.items()
        if ranks > 1
        for collective, numbers in columns.items()
        for number in numbers
    ]


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
    known = [answer.timing.spread.both for answer in answers if answer.timing is not None]
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
