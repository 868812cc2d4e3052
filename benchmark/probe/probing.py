"""Runs a `MachineProbe`: a few seconds on a device, first for shards, then for its memory."""

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from autoshard.benchmark.backends import backend_of, backend_of_hardware
from autoshard.benchmark.backends.base import DeviceBackend, Place, TimedOperator
from autoshard.benchmark.machine.device_lock import DeviceBusy
from autoshard.benchmark.machine.hardware import (
    free_memory_bytes,
    machine_id,
    physical_cores,
    with_threads,
)
from autoshard.benchmark.machine.process import collector_paused, release_freed_memory
from autoshard.benchmark.operator.reference import reference_operators
from autoshard.benchmark.probe.memory import SET_BYTES, MemoryProbe
from autoshard.benchmark.probe.report import PROBE_SECONDS, MachineProbe, ProbeError
from autoshard.benchmark.probe.shard_times import TimeLimit, probe_shards
from autoshard.workload.sizes import format_bytes

CLAIM_SECONDS = 10.0  # longest wait for a device that others measure on
MEMORY_SHARE = 4  # a probe takes at most this fraction of the free memory
_OWN_BYTES = 96 * 2**20  # the reference, indices and small operators
_MEASURING_SHARE = 0.9  # of the time; the rest is for the last operator and for giving back memory
_SHARDS_SHARE = 0.64  # of the time: a model adjusts to shards best


def run_probe(
    backend: DeviceBackend,
    seconds: float = PROBE_SECONDS,
    references: Sequence[TimedOperator] | None = None,
    max_seconds: float = math.inf,
) -> MachineProbe:
    """Probes the device to which this process is bound.

    Numbers for which there is no time or memory are missing, those of large working sets first.

    Args:
        backend: The device.
        seconds: Wall time that the probe may take.
        references: The device's reference operators; None to build one.
        max_seconds: Wall time after which the probe is given up. Its shards take longer than
            `seconds` where other programs use the device.

    Raises:
        ProbeError: There is too little memory, or `max_seconds` are over.
    """
    started = time.monotonic()
    free_bytes = backend.probe_memory_bytes()
    sizes = _sizes_that_fit(free_bytes)
    if references is None:
        references = reference_operators(backend, copies=1)
    deadline, limit = started + _SHARDS_SHARE * seconds, TimeLimit(started, max_seconds)
    for_shards = free_bytes // MEMORY_SHARE - _OWN_BYTES
    shards, level = probe_shards(backend, references, for_shards, deadline, limit)
    with collector_paused():
        probe = MemoryProbe(backend, references, sizes, started + _MEASURING_SHARE * seconds)
        probe.run()
        found = probe.report(time.monotonic() - started)
    del probe
    gc.collect()  # modules are cycles
    backend.flush(sizes[-1])
    return replace(found, shards=shards, reference_level=level or found.reference_level)


def probe_here(
    kind: str = "cpu",
    seconds: float = PROBE_SECONDS,
    threads: int = 1,
    max_seconds: float = math.inf,
    waiting: Callable[[str], None] | None = None,
) -> MachineProbe:
    """Probes this machine's first device of a kind, in this process and without Ray.

    Args:
        kind: Kind of device.
        seconds: Wall time that the probe may take.
        threads: Cores of a CPU device.
        max_seconds: Wall time after which the probe is given up, from when it has the device.
        waiting: Called with what is waited for, if that takes more than a second.

    Raises:
        ProbeError: There is too little memory, too few cores, or another process measures on them.
    """
    backend, cores = backend_of(kind), physical_cores()
    if threads > 1:
        backend = backend_of_hardware(with_threads(backend.fingerprint(), threads))
    if threads > len(cores):
        raise ProbeError(f"this machine has {len(cores)} cores, and --threads asks for {threads}")
    core = cores[0]
    cpus, threads_before = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        name, memory = f"{kind}{core}", free_memory_bytes()
        backend.bind(Place(kind, machine_id(), core, "", name, memory, cores[:threads]))
        with backend.claim("a probe of this machine", CLAIM_SECONDS, waiting):
            return run_probe(backend, seconds, max_seconds=max_seconds)
    except DeviceBusy as error:
        raise ProbeError(
            f"this machine cannot be probed now: {error}: run again when that has ended"
        ) from error
    finally:
        release_freed_memory()
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(threads_before)


def _sizes_that_fit(free_bytes: int) -> list[int]:
    """Returns the working sets for which there is memory; ProbeError if there are none."""
    sizes = [size for size in SET_BYTES if (size + _OWN_BYTES) * MEMORY_SHARE <= free_bytes]
    if not sizes:
        needed = (SET_BYTES[0] + _OWN_BYTES) * MEMORY_SHARE
        raise ProbeError(
            f"a probe needs {format_bytes(needed)} of free memory, of which it takes a quarter; "
            f"there are {format_bytes(free_bytes)}"
        )
    return sizes
