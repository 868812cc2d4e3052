#!/usr/bin/env python
"""Check what this machine and its Ray cluster can measure, and what is missing."""

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import ray

from autoshard.benchmark import BenchmarkPool, MeasurementError, MeasurementStore, MeasureSettings
from autoshard.benchmark.backends import KINDS, backend_of
from autoshard.benchmark.backends.cuda import CudaBackend
from autoshard.benchmark.machine.containers import cpu_quota
from autoshard.benchmark.machine.hardware import cpu_fingerprint, free_memory_bytes
from autoshard.benchmark.operator.fbgemm import check_pair, installed_fbgemm, training_ops
from autoshard.benchmark.pool.devices import nodes_that_measure, reports_of
from autoshard.benchmark.statistics import pooled_variance
from autoshard.cost_model.learning.links import fit_links
from autoshard.experiments.collecting.collection import measure_equal
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.workload import UserError, load_tables, random_shards

_TABLES = "synthetic:40:1:small"
_SHARDS, _REPEATS = 6, 3
_BATCH = 1024
_NOISE = 0.05  # deviation of repeats above which plans are hard to tell apart
_DISK_BYTES, _SHARED_BYTES = 5e9, 1e9
_SHARED = Path("/dev/shm")  # noqa: S108 - it is looked at only


class Finding(NamedTuple):
    """One line of the report; `mend` says what to do where something is missing."""

    subject: str
    says: str
    mend: str = ""


@dataclass(frozen=True)
class DoctorConfig:
    """Print what this machine and its Ray cluster have, measure a few shards and collectives, and
    say how to mend what is missing.

    The exit code is 2 if nothing can be measured. A cluster is found or started; nothing is stored.
    """


def main(config: DoctorConfig) -> None:  # noqa: ARG001
    """Prints the findings as they are made; UserError if nothing can be measured."""
    measured = False
    for finding in _findings():
        measured |= finding.subject == "measuring" and not finding.mend
        mark = "  !" if finding.mend else " ok"
        cli.say(f"{mark} {finding.subject:<12} {finding.says}")
        if finding.mend:
            cli.say(f"{'':<17}{finding.mend}")
    if not measured:
        raise UserError("nothing can be measured here: mend what is marked with ! above")


def _findings() -> Iterator[Finding]:
    try:
        torch, _ = check_pair()
        training_ops()
    except UserError as error:
        yield Finding("libraries", "not usable", str(error))
        return
    yield Finding(
        "libraries", f"torch {torch}, {' '.join(installed_fbgemm())}, ray {ray.__version__}"
    )
    yield _torchrec()
    quota = cpu_quota()
    limited = "" if quota is None else f", limited to {quota:g} cores by a quota"
    yield Finding("CPU", f"{cpu_fingerprint().removeprefix('cpu: ')}{limited}")
    yield _gpu()
    yield _disk()
    try:
        with ray_cluster():
            yield from _cluster()
            with tempfile.TemporaryDirectory() as folder:
                yield from _measuring(Path(folder) / "doctor.db")
    except (UserError, MeasurementError) as error:
        yield Finding("measuring", "not possible", str(error))


def _torchrec() -> Finding:
    try:
        return Finding("TorchRec", metadata.version("torchrec"))
    except metadata.PackageNotFoundError:
        says = "not installed: needed for train_torchrec.py, rehearse.py and --judge training"
        return Finding("TorchRec", f"{says} (make setup)")


def _gpu() -> Finding:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("GPU", "none on this machine")
    gpu = CudaBackend()
    problem = gpu.problem()
    if problem is not None:
        return Finding("GPU", "not usable", problem)
    return Finding("GPU", gpu.fingerprint().removeprefix("cuda: "))


def _disk() -> Finding:
    free, shared = shutil.disk_usage(Path.cwd()).free, shutil.disk_usage(_SHARED).free
    says = (
        f"{free / 1e9:.0f} GB free here, {shared / 1e9:.0f} GB in /dev/shm; "
        f"{free_memory_bytes() / 1e9:.0f} GB of free memory"
    )
    mend = ""
    if free < _DISK_BYTES:
        mend = f"free {_DISK_BYTES / 1e9:.0f} GB: Ray stops working on a full disk"
    elif shared < _SHARED_BYTES:
        mend = "give the container more shared memory (docker run --shm-size=2g): Ray uses it"
    return Finding("disk", says, mend)


def _cluster() -> Iterator[Finding]:
    nodes = nodes_that_measure(ray.nodes())  # type: ignore[no-untyped-call]
    reports = ray.get(reports_of(nodes))
    yield Finding("Ray cluster", f"nodes to measure on: {len(nodes)}")
    for kind in KINDS[1:]:
        backend = backend_of(kind)
        places = backend.places(nodes, reports, ())
        hosts = Counter(place.name.partition("@")[2] for place in places)
        each = ", ".join(f"{count} on {host}" for host, count in sorted(hosts.items())[:8])
        says = f"{len(places)} {backend.noun}s" + (f": {each}" if each else "")
        yield Finding("devices", says)


def _measuring(path: Path) -> Iterator[Finding]:
    pool = BenchmarkPool(path)
    devices = pool.devices()
    settings = MeasureSettings(_BATCH)
    shards = random_shards(load_tables(_TABLES), _SHARDS, 8, seed=1)
    answers = pool.measure(shards, settings, repeats=_REPEATS)
    failed = [answer.reason for answer in answers if not answer.ok]
    if failed:
        yield Finding("measuring", f"{len(failed)} of {len(shards)} shards failed", failed[0])
        return
    totals = [answer.total_ms for answer in answers]
    yield Finding(
        "measuring",
        f"{len(shards)} shards of {min(totals):.1f} to {max(totals):.1f} ms on {len(devices)} "
        f"devices of {devices[0].hardware}",
    )
    pool.close()
    hardware, versions = pool.make()
    with MeasurementStore(path) as store:
        yield _noise([[t.total_ms for t in same] for same in store.repeats(hardware, versions)])
    yield from (Finding("notice", notice) for notice in pool.notices())
    yield from _links(pool)


def _noise(repeats_ms: Sequence[Sequence[float]]) -> Finding:
    """Returns by how much repeat measurements of the same shards deviate from their means."""
    again = sum(len(same) - 1 for same in repeats_ms)
    if again == 0:
        return Finding("noise", "not known: no shard was measured more than once")
    logs = [[math.log(ms) for ms in same] for same in repeats_ms]
    noise = math.sqrt(pooled_variance(logs, 0.0, 0.0))
    times = again + len(repeats_ms)
    says = f"{times} measurements of {len(repeats_ms)} shards deviate by {noise:.1%}"
    mend = "other programs use the devices: end them, or expect to measure longer"
    return Finding("noise", says, mend if noise > _NOISE else "")


def _links(pool: BenchmarkPool) -> Iterator[Finding]:
    """Measures collectives inside a node and among all nodes, and says which options fit them."""
    sizes, measured = pool.node_sizes(), measure_equal(pool, _BATCH)
    for (name, _), alike in groupby(measured, lambda e: (e.key.collective, bool(e.key.nodes))):
        few, *_, many = alike
        where = f"{len(set(few.key.nodes))} nodes" if few.key.nodes else "one node"
        both = "" if name == "all_reduce" else ", forward and backward"
        low_ms, high_ms = (max(map(sum, zip(e.forward_ms, e.backward_ms, strict=True)))
                           for e in (few, many))  # fmt: skip
        yield Finding(
            name.replace("_", "-"),
            f"{few.key.ranks} ranks on {where}{both}: {low_ms:.1f} ms for "
            f"{few.key.dims[0]} columns of each rank, {high_ms:.1f} ms for {many.key.dims[0]}",
        )
    links = fit_links(measured)
    if not links:
        yield Finding("link", "one device, or more columns take no longer")
        return
    options = links[max(links)].options
    says = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    among = f"{len(sizes)} nodes" if max(links) > max(sizes) or max(sizes) == 1 else "one node"
    yield Finding("link", f"{max(links)} ranks on {among}: {says}")


if __name__ == "__main__":
    cli.run_command(main, DoctorConfig)
