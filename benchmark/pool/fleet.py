"""The devices of a pool: which of them measure, and notices about them."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from autoshard.benchmark.backends import backend_of
from autoshard.benchmark.backends.base import Place
from autoshard.benchmark.machine.hardware import DeviceInfo
from autoshard.benchmark.measurement import Measurement
from autoshard.workload import UserError

BUSY_WAIT_SECONDS = 0.5  # before a core that another pool holds is tried again
_HIGH_LOAD = 0.15  # share of a device's time: beyond the system's own small share
_HIGH_DISTURBANCE = 0.6  # share of a device's iterations
_HIGH_THROTTLING = 0.05  # share of a device's time: a quota that is never met stops nothing
_LOAD_MEMORY = 0.8  # weight of older measurements in running means


class PoolError(UserError):
    """The pool cannot measure."""


@dataclass(eq=False)
class PoolDevice:
    """A running actor, with a lock for exclusive use of its device."""

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
        """Calls a method of the device's benchmark."""
        return await self.handle.call.remote(method, *arguments)

    def end(self) -> None:
        """Ends the actor."""
        ray.kill(self.handle)


class Fleet(ABC):
    """All devices of a pool.

    Costs are comparable on one make of hardware only, so the pool measures on the most common one
    and reports the other devices. Subclasses differ in how they `grow`. A fleet is pickled for the
    pool's actor when that starts.
    """

    def __init__(self) -> None:
        self.devices: list[PoolDevice] = []
        self.main_make = ("", "")  # hardware and versions of most devices
        self.faults: list[str] = []
        self.lost = 0  # devices so far
        self._reported: set[str] = set()
        self._on_change: Callable[[], None] = lambda: None

    @abstractmethod
    async def grow(self) -> None:
        """Drops devices that are gone and starts missing ones; running ones are added by `add`."""

    def request_devices(self, count: int) -> None:  # noqa: B027 - most fleets have nobody to ask
        """Requests devices for `count` shards, where that is possible."""

    @property
    def is_settling(self) -> bool:
        """True while devices are being started."""
        return False

    def unavailable_reason(self, waited_s: float) -> str | None:
        """Returns why there are no devices, once waiting any longer is of no use; else None."""
        return None if self.devices or waited_s < 1 else "it has none"

    def watch(self, on_change: Callable[[], None]) -> None:
        """Registers a callback for devices that have come, gone or failed to start."""
        self._on_change = on_change

    def add(self, device: PoolDevice) -> None:
        """Takes a device into service."""
        self.devices.append(device)
        self._changed()

    def report(self, fault: str) -> None:
        """Adds a notice for users, once."""
        if fault not in self._reported:
            self._reported.add(fault)
            self.faults.append(fault)

    def drop(self, device: PoolDevice, reason: str) -> None:
        """Takes a device out of service."""
        if device.alive:
            device.alive = False
            self.lost += 1
            self.devices.remove(device)
            self.faults.append(f"{device.info.name}: {reason}")
            device.end()
            self._changed()

    def lose(self, device: PoolDevice, reason: str) -> None:
        """Takes a device that is gone out of service; subclasses may let its place rest."""
        self.drop(device, reason)

    def release(self) -> None:
        """Ends all devices; `grow` starts them again."""
        for device in self.devices:
            device.alive = False
            device.end()
        self.devices.clear()
        self._changed()

    def measuring(self) -> list[PoolDevice]:
        """Returns the devices that measure."""
        return [device for device in self.devices if device.make == self.main_make]

    def in_use(self, device: PoolDevice) -> bool:
        """Returns whether the device is alive and of the make that measures."""
        return device.alive and device.make == self.main_make

    def observe(self, device: PoolDevice, measurement: Measurement) -> None:
        """Updates the load statistics of a device by a measurement."""
        if measurement.timing is not None:
            timing, step = measurement.timing, 1 - _LOAD_MEMORY
            share = timing.disturbed / timing.iterations
            device.foreign_load += step * (timing.foreign_load - device.foreign_load)
            device.throttled += step * (measurement.throttled - device.throttled)
            device.disturbed += step * (share - device.disturbed)

    def notices(self) -> list[str]:
        """Returns notices about devices, one line each; faults are reported once."""
        lines, self.faults = self.faults, []
        for device in self.devices:
            if device.throttled > _HIGH_THROTTLING:
                lines.append(
                    f"{device.info.name} is slowed down for {device.throttled:.0%} of the time by "
                    f"{backend_of(device.info.kind).throttle}"
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
                    f"{device.info.name} is not used: it is {device.info.hardware} with "
                    f"{device.versions}, most devices are {' with '.join(self.main_make)}"
                )
        return lines

    def _changed(self) -> None:
        makes = Counter(device.make for device in self.devices)
        # The pool keeps its make if another is as common.
        if makes[self.main_make] < max(makes.values(), default=0):
            self.main_make = makes.most_common(1)[0][0]
        self._on_change()
