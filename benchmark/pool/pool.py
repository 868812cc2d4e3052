"""`BenchmarkPool`: the client of the pool, which measures shards on all devices of the cluster."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autoshard.benchmark.backends import KINDS
from autoshard.benchmark.machine.hardware import DeviceInfo, machine_id
from autoshard.benchmark.measurement import (
    Exchange,
    MeasuredCollective,
    Measurement,
    MeasureSettings,
    ReferenceLevel,
    TimingOptions,
)
from autoshard.benchmark.pool.coordinator import PoolCoordinator
from autoshard.benchmark.pool.devices import DeviceFleet
from autoshard.benchmark.pool.fleet import Fleet, PoolError
from autoshard.benchmark.probe.report import PROBE_SECONDS, MachineProbe
from autoshard.workload import Shard, ShardCost, UserError
from autoshard.workload.data_sheets import is_hardware

POOL_NAME = "benchmark-pool"
POOL_NAMESPACE = "autoshard"

_PATIENCE_SECONDS = 5.0  # longest wait of one call for answers
_MAX_SILENT_SECONDS = 120.0  # after which the client checks that there still are devices
_MAX_ABSENT_SECONDS = 120.0  # Ray takes half a minute to declare a node dead
_RECONNECT_SECONDS = 0.5
_MAX_LOSSES = 3  # of the pool's actor in a row, without an answer in between

Progress = Callable[[Measurement], None]


class BenchmarkPool:
    """The cluster's pool, found by name or started. Ray must be initialised.

    The pool outlives its clients, and all clients of a cluster share it. Options that select
    devices only apply if this client starts the pool.

    Args:
        store: SQLite file of measurements, on the machine of the pool's actor, which is that of
            whoever started the pool.
        kind: One of `KINDS`; "auto" takes GPUs where the cluster has any, else CPU cores. For GPUs
            the pool asks Ray's autoscaler and waits 15 minutes for the first.
        max_devices: Maximum number of devices.
        time_limit_s: Seconds after which a shard counts as hanging, and is recorded as failed.
            Measurements end by themselves after `TimingOptions.max_seconds`.
        fleet: Other devices than the cluster's own, such as simulated ones.
        name: Name of the pool's actor.
        hardware: Fingerprint of the devices that measure, in place of `kind`: there is a pool for
            each that is asked for. By default, most of the devices are of the hardware that is
            measured on, and the others are left aside.
    """

    def __init__(
        self,
        store: Path | str,
        kind: str = "auto",
        max_devices: int | None = None,
        time_limit_s: float = 300.0,
        fleet: Fleet | None = None,
        name: str = POOL_NAME,
        hardware: str = "",
    ) -> None:
        if hardware:
            kind, name = hardware.partition(":")[0], f"{name} of {hardware}"
        if kind not in KINDS:
            raise PoolError(f"device kind {kind!r} is not one of {', '.join(KINDS)}")
        self.store = Path(store).expanduser().resolve()
        self._kind = kind
        self._name = name
        self._fleet = fleet or DeviceFleet(kind, max_devices, hardware)
        self._time_limit_s = time_limit_s
        self._actor = self._find_or_start()

    def _find_or_start(self) -> Any:
        here = ray.get_runtime_context().get_node_id()
        # An asynchronous actor, in which many calls may wait at once.
        actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(PoolCoordinator)
        return actor.options(
            max_concurrency=1000,
            name=self._name,
            namespace=POOL_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            # Not softly: Ray places it elsewhere then, even if this node has room. There the path
            # of the store means another file.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        ).remote(self._fleet, self._time_limit_s)

    def of_hardware(self, hardware: str) -> "BenchmarkPool":
        """Returns the pool of devices with this fingerprint, which has the same store.

        It is this one if its devices have it, or none is named.
        """
        if not hardware or is_hardware(hardware, self.make()[0]):
            return self
        return BenchmarkPool(self.store, time_limit_s=self._time_limit_s, hardware=hardware)

    def devices(self) -> list[DeviceInfo]:
        """Returns the devices that measure, once there are any; PoolError if there never are."""
        found: list[DeviceInfo] = []
        while not found:
            self._wait_for_devices()
            found = self._ask("devices")
        return found

    def make(self) -> tuple[str, str]:
        """Returns hardware and library versions of the devices that measure."""
        self.devices()
        hardware, versions = self._ask("make")
        return hardware, versions

    def _wait_for_devices(self, shards: int = 1) -> None:
        """Waits until shards can be measured; PoolError if they never can."""
        started, first = time.monotonic(), None
        while first is None:
            first = self._ask("ready", shards, time.monotonic() - started)
        if self._kind not in ("auto", first.kind):
            raise PoolError(
                f"the cluster's pool measures on {first.kind}, not on {self._kind}: end it first, "
                "with experiments/pool.py stop"
            )

    def check_store_is_here(self) -> None:
        """Raises PoolError if the store is on another machine, which this process cannot read."""
        there = self._ask("machine")
        if there != machine_id():
            raise PoolError(
                f"{self.store} is on {there.partition(':')[0]}, where the cluster's pool was "
                "started, and cannot be read from here: run this there, or end the pool with "
                "experiments/pool.py stop"
            )

    def probe(self, seconds: float = PROBE_SECONDS) -> MachineProbe | None:
        """Returns the probe of the devices that measure, from the store or run now.

        None if it cannot be run now, for which there is a notice.
        """
        self._wait_for_devices()
        found: MachineProbe | None = self._ask("probe", str(self.store), seconds)
        return found

    def close(self) -> None:
        """Closes the store, so that its file is complete. The pool opens it again when needed."""
        self._ask("close_store", str(self.store))

    def peak_bytes(self) -> dict[str, int]:
        """Returns the peak memory of each device's actor by the device's name."""
        return dict(self._ask("peak_bytes"))

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the pool's actor, devices excluded."""
        return float(self._ask("cpu_seconds"))

    def notices(self) -> list[str]:
        """Returns notices about devices: foreign load, mixed hardware, lost devices."""
        return list(self._ask("notices"))

    def stream(
        self,
        shards: Sequence[Shard],
        settings: MeasureSettings,
        timing: TimingOptions | None = None,
        retry_failed: bool = False,
        repeats: int = 1,
    ) -> Iterator[tuple[int, Measurement]]:
        """Yields each shard's number and measurement, as they arrive.

        A shard is measured until the store holds `repeats` measurements, and the answer is their
        mean. Stored failures are answers, too, unless `retry_failed`. If the pool's actor is lost,
        missing shards are requested again.

        Raises:
            PoolError: The pool's actor was lost several times without an answer in between.
        """
        missing = set(range(len(shards)))
        losses = 0
        while missing:
            if losses == _MAX_LOSSES:
                raise PoolError(
                    f"the pool was killed {losses} times while it measured {len(missing)} shards, "
                    "most likely because memory ran out: measure smaller shards, or on a machine "
                    "with more memory"
                )
            losses += 1
            order = sorted(missing)
            wanted = [shards[index] for index in order]
            timing, store = timing or TimingOptions(), str(self.store)
            self._wait_for_devices(len(wanted))
            request = self._ask("submit", wanted, settings, timing, store, retry_failed, repeats)
            try:
                for place, measurement in self._collect(request):
                    losses = 0
                    missing.discard(order[place])
                    yield order[place], measurement
                    if not missing:
                        return
            finally:
                # A stream whose driver has left the cluster, as after Ctrl-C, would start another;
                # the pool itself cancels what nobody collects.
                if missing and ray.is_initialized():
                    self._actor.cancel.remote(request)

    def _collect(self, request: str) -> Iterator[tuple[int, Measurement]]:
        """Yields answers of a request until it is complete or the pool has dropped it."""
        silent_since = time.monotonic()
        while (answers := self._ask("collect", request, _PATIENCE_SECONDS)) is not None:
            if answers:
                silent_since = time.monotonic()
                yield from answers
            elif time.monotonic() - silent_since > _MAX_SILENT_SECONDS:
                self._wait_for_devices()
                silent_since = time.monotonic()

    def measure(
        self,
        shards: Sequence[Shard],
        settings: MeasureSettings,
        timing: TimingOptions | None = None,
        retry_failed: bool = False,
        progress: Progress | None = None,
        repeats: int = 1,
    ) -> list[Measurement]:
        """Returns the measurement of each shard, in their order, all at the store's reference
        level.

        `progress` is called with each measurement as it arrives.
        """
        answers: dict[int, Measurement] = {}
        level: ReferenceLevel | None = None
        for index, measurement in self.stream(shards, settings, timing, retry_failed, repeats):
            answers[index] = measurement
            if measurement.timing is not None:
                level = measurement.timing.reference_level
            if progress is not None:
                progress(measurement)
        return [answers[index].normalized_to(level) for index in range(len(shards))]

    def node_sizes(self) -> list[int]:
        """Returns the number of devices of each node, the largest first."""
        sizes: list[int] = self._ask("node_sizes")
        return sizes

    def exchange(
        self,
        dims: Sequence[int],
        batch_size: int,
        nodes: int | None = None,
        collective: MeasuredCollective = "all_to_all",
    ) -> Exchange:
        """Returns the measured collective of a plan whose rank r computes `dims[r]` columns.

        Args:
            dims: Columns of each rank.
            batch_size: Samples of the batch of all ranks.
            nodes: Number of nodes, with as many ranks each; by default as few as have the devices.
            collective: Which one, as `ExchangeKey` describes it.
        """
        self._wait_for_devices(len(dims))
        asked = tuple(dims), batch_size, nodes, collective, str(self.store)
        found: Exchange = self._ask("exchange", *asked)
        return found

    def shutdown(self) -> None:
        """Ends the pool and all its actors, for all clients."""
        end_pool(self._name)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Calls the pool's actor; if it was lost, waits for it or starts it again."""
        deadline = math.inf
        while True:
            try:
                return ray.get(getattr(self._actor, method).remote(*arguments))
            except RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise
            except (RayActorError, ActorUnschedulableError) as error:  # lost, or with its node
                deadline = min(deadline, time.monotonic() + _MAX_ABSENT_SECONDS)
                if time.monotonic() > deadline:
                    raise PoolError(
                        "the pool's actor has not come back for "
                        f"{_MAX_ABSENT_SECONDS:.0f} s ({type(error).__name__}): see whether the "
                        "cluster runs (ray status), and run again"
                    ) from error
                time.sleep(_RECONNECT_SECONDS)
                self._actor = self._find_or_start()


def find_pool(name: str = POOL_NAME) -> Any | None:
    """Returns the actor of the cluster's pool; None if none runs."""
    try:
        return ray.get_actor(name, namespace=POOL_NAMESPACE)
    except ValueError:
        return None


def pool_names() -> list[str]:
    """Returns the names of the cluster's pools: of most devices, and of hardware by name."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in actors if each["namespace"] == POOL_NAMESPACE]
    return sorted(name for name in names if name.partition(" of ")[0] == POOL_NAME)


def end_pool(name: str = POOL_NAME) -> bool:
    """Ends the cluster's pool and all its actors, for all clients; False if there is none."""
    actor = find_pool(name)
    if actor is None:
        return False
    with suppress(RayError):  # it may be lost just now
        ray.get(actor.cancel_device_requests.remote(), timeout=_PATIENCE_SECONDS)
    ray.kill(actor)
    return True


class MeasuredCosts:
    """The `CostOracle` that measures on a pool, and on those of other hardware where it is named.

    Kinds of hardware are measured one after the other.
    """

    def __init__(self, pool: BenchmarkPool, settings: MeasureSettings) -> None:
        self._pool = pool
        self._settings = settings

    def costs(self, shards: Sequence[Shard], hardware: Sequence[str] = ()) -> list[ShardCost]:
        """Returns measured costs; MeasurementError describes a shard that cannot be measured."""
        named = list(hardware) or [""] * len(shards)
        answers = {}
        for kind in dict.fromkeys(named):
            pool = self._pool.of_hardware(kind)
            mine = [shard for shard, name in zip(shards, named, strict=True) if name == kind]
            answers[kind] = iter(pool.measure(mine, self._settings))
        return [next(answers[kind]).cost() for kind in named]
