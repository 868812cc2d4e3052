"""The devices of a pool, whatever they are: which of them measure, and what to know of them."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from autoshard.benchmark.backends.base import Place
from autoshard.benchmark.hardware import DeviceInfo
from autoshard.benchmark.measurement import Measurement
from autoshard.workload import UserError

_HIGH_LOAD = 0.15  # of a device's time: beyond the system's own small share
_HIGH_DISTURBANCE = 0.6  # of a device's iterations
_HIGH_THROTTLING = 0.05  # of a device's time: a quota that is never met stops nothing
_LOAD_MEMORY = 0.8  # how much of the running mean each new measurement leaves in place


class PoolError(UserError):
    """The pool cannot measure."""


@dataclass(eq=False)
class PoolDevice:
    """A running actor, and a lock for those who need the device for themselves."""

    place: Place
    handle: Any
    info: DeviceInfo
    versions: str
    exclusive: asyncio.Lock = field(default_factory=asyncio.Lock)
    alive: bool = True
    busy: bool = False
    foreign_load: float = 0.0
    disturbed: float = 0.0
    throttled: float = 0.0

    @property
    def make(self) -> tuple[str, str]:
        """Hardware and library versions: costs are comparable where they are equal."""
        return self.info.hardware, self.versions

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the device's benchmark answers."""
        return await self.handle.call.remote(method, *arguments)

    def end(self) -> None:
        """End the actor."""
        ray.kill(self.handle)


class Fleet(ABC):
    """All devices of a pool. Costs are only comparable on one make of hardware, so the pool
    measures on the most numerous one and says which devices it leaves aside.

    What kinds of fleets differ in is how they `grow`. A fleet travels to the pool's actor when
    that starts, so it holds nothing yet that cannot be pickled.
    """

    def __init__(self) -> None:
        self.devices: list[PoolDevice] = []
        self.main_make = ("", "")  # hardware and versions of most devices
        self.faults: list[str] = []
        self._reported: set[str] = set()
        self._on_change: Callable[[], None] = lambda: None

    @abstractmethod
    async def grow(self) -> None:
        """Give up devices that are gone and start what is missing; `add` those that run."""

    def request_devices(self, count: int) -> None:  # noqa: B027 - most fleets have nobody to ask
        """There is work for so many devices: ask for them where they can be had."""

    @property
    def is_settling(self) -> bool:
        """True while devices are being started."""
        return False

    def unavailable_reason(self, waited_s: float) -> str | None:
        """Why there are no devices, once there is no use in waiting any longer; else None."""
        return None if self.devices or waited_s < 1 else "it has none"

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this whenever devices have come, gone or failed to come."""
        self._on_change = on_change

    def add(self, device: PoolDevice) -> None:
        """Take a device into service."""
        self.devices.append(device)
        self._changed()

    def report(self, fault: str) -> None:
        """Have users told, once, however often it is seen."""
        if fault not in self._reported:
            self._reported.add(fault)
            self.faults.append(fault)

    def drop(self, device: PoolDevice, reason: str) -> None:
        """Take a device out of service."""
        if device.alive:
            device.alive = False
            self.devices.remove(device)
            self.faults.append(f"{device.info.name}: {reason}")
            device.end()
            self._changed()

    def release(self) -> None:
        """End all devices; `grow` starts them again."""
        for device in self.devices:
            device.alive = False
            device.end()
        self.devices.clear()
        self._changed()

    def measuring(self) -> list[PoolDevice]:
        """The devices that measure."""
        return [device for device in self.devices if device.make == self.main_make]

    def in_use(self, device: PoolDevice) -> bool:
        """True if the device is of the make that measures."""
        return device.alive and device.make == self.main_make

    def observe(self, device: PoolDevice, measurement: Measurement) -> None:
        """Learn from a measurement how much of a device others take."""
        if measurement.timing is not None:
            timing, step = measurement.timing, 1 - _LOAD_MEMORY
            share = timing.disturbed / timing.iterations
            device.foreign_load += step * (timing.foreign_load - device.foreign_load)
            device.throttled += step * (measurement.throttled - device.throttled)
            device.disturbed += step * (share - device.disturbed)

    def notices(self) -> list[str]:
        """What users should know of the devices, one line each; faults are told once."""
        lines, self.faults = self.faults, []
        for device in self.devices:
            if device.throttled > _HIGH_THROTTLING:
                lines.append(
                    f"{device.info.name} is throttled: the container's CPU quota stops it for "
                    f"{device.throttled:.0%} of the time, so measuring takes longer: raise the "
                    "quota or leave more of it to the pool"
                )
            elif device.foreign_load > _HIGH_LOAD:
                lines.append(
                    f"{device.info.name} is under foreign load: other processes take "
                    f"{device.foreign_load:.0%} of it, so measuring takes longer"
                )
            elif device.disturbed > _HIGH_DISTURBANCE:
                lines.append(
                    f"{device.info.name} is disturbed: others took much of the time of "
                    f"{device.disturbed:.0%} of its iterations"
                )
            if not self.in_use(device):
                lines.append(
                    f"{device.info.name} is left aside: it is {device.info.hardware} with "
                    f"{device.versions}, most devices are {' with '.join(self.main_make)}"
                )
        return lines

    def _changed(self) -> None:
        makes = Counter(device.make for device in self.devices)
        # Of two that are as many the pool stays with the one it has.
        if makes[self.main_make] < max(makes.values(), default=0):
            self.main_make = makes.most_common(1)[0][0]
        self._on_change()
