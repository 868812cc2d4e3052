"""Measures a collective on the pool's devices until its median is known. Imports no torch."""

import asyncio
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayTaskError

from autoshard.benchmark.backends import backend_of
from autoshard.benchmark.machine.device_lock import DeviceBusy
from autoshard.benchmark.measurement import (
    Exchange,
    ExchangeKey,
    ExchangePart,
    MeasuredCollective,
    MeasurementError,
)
from autoshard.benchmark.pool.fleet import BUSY_WAIT_SECONDS, PoolDevice
from autoshard.benchmark.statistics import median_spread

_ITERATIONS = 40  # of a round
_MAX_ROUNDS = 4
_PRECISION = 0.05  # ranks wait for each other: their times vary more than an operator's


async def measure_exchange(
    key: ExchangeKey, devices: list[PoolDevice], hardware: str, versions: str
) -> Exchange:
    """Runs the exchange on devices that the caller holds; ranks are assigned round-robin."""
    backend = backend_of(devices[0].info.kind)
    if key.ranks > len(devices) * backend.max_ranks:
        raise MeasurementError(
            f"{key.what} among {key.ranks} {backend.noun}s needs as many, the pool has "
            f"{len(devices)}: {backend.collectives} runs one rank on each"
        )
    forward: list[list[float]] = [[] for _ in range(key.ranks)]
    backward: list[list[float]] = [[] for _ in range(key.ranks)]
    spread = 1.0
    host, port = await devices[0].call("open_rendezvous")
    name = uuid.uuid4().hex
    parts = [
        ExchangePart(
            key=key,
            ranks=tuple(range(place, key.ranks, len(devices))),
            host=host,
            port=port,
            name=name,
            iterations=_ITERATIONS,
        )
        for place in range(len(devices))
    ]
    for _ in range(_MAX_ROUNDS):
        for times in await _on_all(devices, "exchange", [(part,) for part in parts]):
            forward[times.rank] += times.forward_ms
            backward[times.rank] += times.backward_ms
        both = zip(zip(*forward, strict=True), zip(*backward, strict=True), strict=True)
        spread = median_spread([max(map(sum, zip(f, b, strict=True))) for f, b in both])
        if spread <= _PRECISION:
            break
    await _on_all(devices, "end_exchange", [()] * len(devices))
    return Exchange(
        key=key,
        hardware=hardware,
        versions=versions,
        forward_ms=tuple(statistics.median(values) for values in forward),
        backward_ms=tuple(statistics.median(values) for values in backward),
        spread=spread,
        iterations=len(forward[0]),
        measured_at=time.time(),
    )


def devices_of_nodes(devices: Sequence[PoolDevice]) -> list[list[PoolDevice]]:
    """Returns the devices of each node, the largest node first."""
    by_node: dict[str, list[PoolDevice]] = {}
    for device in sorted(devices, key=lambda device: device.place.unit):
        by_node.setdefault(device.place.owner, []).append(device)
    return sorted(by_node.values(), key=len, reverse=True)


def devices_of_ranks(
    devices: Sequence[PoolDevice], ranks: int, nodes: int | None
) -> list[PoolDevice]:
    """Returns the device of each rank, those of a node one after the other.

    Args:
        devices: All that measure.
        ranks: Number of ranks; if it is more than there are devices, all are returned.
        nodes: Number of nodes with as many ranks each; by default as few as have the devices.

    Raises:
        MeasurementError: There are not so many nodes with so many devices.
    """
    largest_first = devices_of_nodes(devices)
    for count in (nodes,) if nodes else range(1, len(largest_first) + 1):
        chosen, each = largest_first[:count], ranks // count
        if ranks == count * each and len(chosen) == count and len(chosen[-1]) >= each:
            return [device for node in chosen for device in node[:each]]
    if nodes:
        sizes = ", ".join(str(len(node)) for node in largest_first)
        raise MeasurementError(
            f"a collective of {ranks} ranks on {nodes} nodes needs {-(-ranks // nodes)} devices "
            f"of each; the number of devices of the cluster's nodes: {sizes}"
        )
    return [device for node in largest_first for device in node][:ranks]


def key_of(
    dims: tuple[int, ...],
    batch_size: int,
    devices: Sequence[PoolDevice],
    collective: MeasuredCollective = "all_to_all",
) -> ExchangeKey:
    """Returns the key of a collective whose ranks are assigned to devices round-robin."""
    owners = list(dict.fromkeys(device.place.owner for device in devices))
    homes = [owners.index(devices[n % len(devices)].place.owner) for n in range(len(dims))]
    several = tuple(homes) if len(owners) > 1 else ()
    return ExchangeKey(dims, batch_size, len(devices), several, collective)


async def wait_until_free(
    key: ExchangeKey,
    devices: list[PoolDevice],
    time_limit_s: float,
    report: Callable[[str], None],
) -> None:
    """Waits for devices that other pools hold, before any rank waits for one that cannot start.

    Devices are not reserved: a collective fails if one is taken for long afterwards.
    """
    deadline = time.monotonic() + time_limit_s
    holder = await _holder(devices, time_limit_s)
    if holder is not None:
        report(f"{key.what} had to wait: {holder}")
    while holder is not None:
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"{key.what} among {key.ranks} ranks cannot be measured: {holder}"
            )
        await asyncio.sleep(BUSY_WAIT_SECONDS)
        holder = await _holder(devices, time_limit_s)


async def _holder(devices: list[PoolDevice], time_limit_s: float) -> str | None:
    """Returns the description of another pool that holds one of these devices, if any does."""
    looks = asyncio.gather(*(device.call("check_free") for device in devices))
    try:
        await asyncio.wait_for(looks, time_limit_s)
    except RayTaskError as error:
        if not isinstance(error.cause, DeviceBusy):
            raise
        return str(error.cause)
    return None


async def _on_all(
    devices: list[PoolDevice], method: str, arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Calls a method of all devices at once, and returns all that their answers hold."""
    calls = [device.call(method, *each) for device, each in zip(devices, arguments, strict=True)]
    return [found for answer in await asyncio.gather(*calls) for found in answer or ()]
