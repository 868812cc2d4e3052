"""Runs jobs on a device, and handles their failures."""

import asyncio
import time
from collections.abc import Callable

from ray.exceptions import RayError, RayTaskError

from autoshard.benchmark.machine.device_lock import DeviceBusy
from autoshard.benchmark.measurement import (
    DeviceLost,
    Exchange,
    ExchangeKey,
    Measurement,
    MeasurementError,
    ShardFault,
)
from autoshard.benchmark.pool import exchanges as exchanging
from autoshard.benchmark.pool.devices import first_line
from autoshard.benchmark.pool.fleet import BUSY_WAIT_SECONDS, Fleet, PoolDevice
from autoshard.benchmark.pool.jobs import Job
from autoshard.benchmark.probe.report import MachineProbe

_MAX_CRASHES = 3  # crashes of actors on a shard after which the shard counts as failed


class Server:
    """Runs jobs on devices.

    A shard that fails, hangs or kills its actor is answered with the reason. The actor's state is
    then unreliable, so it is replaced.

    Args:
        fleet: Devices.
        time_limit_s: Seconds after which an operator counts as hanging.
        start_missing: Makes the fleet start missing devices.
    """

    def __init__(
        self, fleet: Fleet, time_limit_s: float, start_missing: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._time_limit_s = time_limit_s
        self._start_missing = start_missing

    async def measure(self, device: PoolDevice, jobs: list[Job]) -> list[Measurement | None]:
        """Returns the answers of a device; None where a job must be tried again."""
        limit_s = self._time_limit_s * len(jobs)
        try:
            answer = device.call("measure", [job.order for job in jobs])
            found: list[Measurement | None] = await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            return self._failed(device, jobs, f"no answer within {limit_s:g} s")
        except RayTaskError as error:
            if isinstance(error.cause, ShardFault):
                return self._record_failure(device, jobs, error.cause.number, error.cause.reason)
            if isinstance(error.cause, DeviceLost):
                self._fleet.lose(device, f"the driver has lost it ({error.cause})")
                self._start_missing()
                return [None] * len(jobs)
            if not isinstance(error.cause, DeviceBusy):
                return self._failed(device, jobs, first_line(error.cause))
            self._fleet.report(f"{device.info.name} had to be waited for: {error.cause}")
            await asyncio.sleep(BUSY_WAIT_SECONDS)
            return [None] * len(jobs)
        except RayError as error:  # the actor or its node is gone
            return self._crashed(device, jobs, f"died: {first_line(error)}")
        return found

    async def probe(self, device: PoolDevice, seconds: float) -> MachineProbe | None:
        """Returns the probe of a device; None if it cannot be probed now, which is reported."""
        try:
            answer = device.call("probe", seconds)
            found: MachineProbe = await asyncio.wait_for(answer, self._time_limit_s)
        except TimeoutError:
            self.replace(device, f"its probe did not end within {self._time_limit_s:g} s")
            return None
        except RayError as error:
            self._fleet.report(f"{device.info.name} was not probed: {first_line(error)}")
            return None
        return found

    async def exchange(
        self, key: ExchangeKey, devices: list[PoolDevice], hardware: str, versions: str
    ) -> Exchange:
        """Returns a collective's measurement by devices that were claimed for it.

        Raises:
            MeasurementError: It failed, and the devices are replaced.
        """
        try:
            await exchanging.wait_until_free(key, devices, self._time_limit_s, self._fleet.report)
            measuring = exchanging.measure_exchange(key, devices, hardware, versions)
            return await asyncio.wait_for(measuring, self._time_limit_s)
        except (TimeoutError, RayError) as error:
            reason = f"{key.what} among {key.ranks} ranks failed: {first_line(error)}"
            for device in devices:  # ranks may hang in it for good
                self.replace(device, reason)
            raise MeasurementError(reason) from None

    def _crashed(
        self, device: PoolDevice, jobs: list[Job], reason: str
    ) -> list[Measurement | None]:
        """Handles the loss of an actor; if it was dropped on purpose, shards are tried again."""
        if not device.alive:
            return [None] * len(jobs)
        if len(jobs) == 1:
            jobs[0].crashes += 1
            if jobs[0].crashes < _MAX_CRASHES:
                self.replace(device, reason)
                return [None]
            reason = f"{jobs[0].crashes} benchmark actors died while measuring it"
        return self._failed(device, jobs, reason)

    def _failed(self, device: PoolDevice, jobs: list[Job], reason: str) -> list[Measurement | None]:
        """Records a single shard as failed; several shards are tried again one by one."""
        if len(jobs) == 1:
            return self._record_failure(device, jobs, 0, reason)
        for job in jobs:
            job.alone = True
        self.replace(device, reason)
        return [None] * len(jobs)

    def _record_failure(
        self, device: PoolDevice, jobs: list[Job], number: int, reason: str
    ) -> list[Measurement | None]:
        """Answers one job as failed and replaces its device; the others are tried again."""
        self.replace(device, reason)
        answers: list[Measurement | None] = [None] * len(jobs)
        answers[number] = Measurement(
            jobs[number].shard,
            jobs[number].settings,
            device.info.hardware,
            device.versions,
            "failed",
            device.info.name,
            device.info.node,
            time.time(),
            reason=reason,
        )
        return answers

    def replace(self, device: PoolDevice, reason: str) -> None:
        """Ends an actor whose state is unreliable; another is started meanwhile."""
        self._fleet.drop(device, reason)
        self._start_missing()
