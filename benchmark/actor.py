"""The benchmark actor of a device: owns the device and measures on it."""

import gc
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from autoshard.benchmark.backends.base import DeviceBackend, Place, TimedOperator
from autoshard.benchmark.machine.device_lock import this_pool
from autoshard.benchmark.machine.hardware import DeviceInfo
from autoshard.benchmark.measurement import (
    DeviceLost,
    ExchangePart,
    Measurement,
    Order,
    RankTimes,
    ShardFault,
    Status,
    Timing,
)
from autoshard.benchmark.operator import exchange, fbgemm
from autoshard.benchmark.operator.embedding_op import EmbeddingOp
from autoshard.benchmark.operator.reference import reference_operators
from autoshard.benchmark.operator.timing import time_interleaved
from autoshard.benchmark.probe.probing import run_probe
from autoshard.benchmark.probe.report import MachineProbe
from autoshard.workload import UserError
from autoshard.workload.access.lookups import lookups_in


class DeviceBenchmark:
    """Measures shards on one device, to which this process is bound."""

    def __init__(self, backend: DeviceBackend, place: Place) -> None:
        fbgemm.training_ops()
        self._backend = backend
        self._pool = this_pool()
        self._ranks: exchange.ExchangeRanks | None = None
        backend.bind(place)
        self._references = reference_operators(backend)
        self._watch = backend.stopwatch(references=self._references)
        host, hardware = socket.gethostname(), backend.fingerprint()
        self._info = DeviceInfo(
            backend.name_of(place), place.kind, host, hardware, backend.memory_bytes
        )
        self._versions = fbgemm.library_versions()
        gc.collect()
        gc.freeze()  # later collections walk a shard's own objects only: 1 ms instead of 130

    def describe(self) -> tuple[DeviceInfo, str]:
        """Returns the device and the versions of libraries."""
        return self._info, self._versions

    def peak_bytes(self) -> int:
        """Returns the peak memory of this process on the device."""
        return self._backend.peak_bytes()

    def measure(self, orders: Sequence[Order]) -> list[Measurement]:
        """Measures shards, interleaved as far as they fit into memory together.

        Raises:
            DeviceBusy: Another pool holds the device.
            DeviceLost: The device is gone, which no shard is to blame for.
            ShardFault: An operator failed; this process must not measure any more.
        """
        with self._backend.claim(self._pool):
            started, throttled_s = time.monotonic(), self._backend.throttled_seconds()
            answers: dict[int, Measurement] = {}
            waiting = list(range(len(orders)))
            try:
                while waiting:
                    together = self._that_fit(orders, waiting)
                    waiting = waiting[len(together) :]
                    answers.update(self._interleaved(orders, together))
            except Exception as error:  # whatever a device that is gone leads to
                if self._backend.is_lost():
                    raise DeviceLost(ShardFault.of(0, error).reason) from error
                raise
            throttled_s = self._backend.throttled_seconds() - throttled_s
            share = min(1.0, throttled_s / (time.monotonic() - started))
            state = self._backend.state()
            return [
                replace(answers[n], throttled=share, device_state=state) for n in range(len(orders))
            ]

    def probe(self, seconds: float) -> MachineProbe:
        """Probes the device; DeviceBusy if another pool holds it."""
        with self._backend.claim(self._pool):
            return run_probe(self._backend, seconds, self._references)

    def check_free(self) -> None:
        """Raises DeviceBusy if another pool holds the device."""
        with self._backend.claim(self._pool):
            pass

    def open_rendezvous(self) -> tuple[str, int]:
        """Returns host and port where the ranks of the next all-to-all meet."""
        self._rendezvous = exchange.Rendezvous()
        return self._rendezvous.host, self._rendezvous.port

    def exchange(self, part: ExchangePart) -> list[RankTimes]:
        """Runs a round of this device's ranks of an all-to-all, which meet in the first one."""
        with self._backend.claim(self._pool):
            if self._ranks is None or self._ranks.part.name != part.name:
                self._ranks = exchange.ExchangeRanks(part, self._backend)
            return self._ranks.run()

    def end_exchange(self) -> None:
        """Ends the ranks of the last all-to-all, at the same time as on other devices."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _needed_bytes(self, order: Order) -> int:
        """Returns what building and running a shard takes on this device."""
        shard, settings, _ = order
        needed, per_lookup = settings.needed_bytes(shard), self._backend.lookup_bytes
        if not per_lookup:
            return needed
        looked_up = lookups_in([piece.table for piece in shard.pieces], settings.batch_size)
        return needed + per_lookup * int(looked_up.lookups.sum())

    def _that_fit(self, orders: Sequence[Order], waiting: Sequence[int]) -> list[int]:
        """Returns the first of the waiting orders that fit into memory together; at least one."""
        free, taken, chosen = self._backend.free_bytes(), 0, 0
        for number in waiting:
            taken += self._needed_bytes(orders[number])
            if taken > free and chosen:
                break
            chosen += 1
        return list(waiting[:chosen])

    def _interleaved(
        self, orders: Sequence[Order], numbers: Sequence[int]
    ) -> dict[int, Measurement]:
        """Measures orders whose operators are in memory at the same time."""
        answers: dict[int, Measurement] = {}
        operators: dict[int, EmbeddingOp] = {}
        free = self._backend.free_bytes()
        for number in numbers:
            shard, settings, _ = orders[number]
            needed, limit = self._needed_bytes(orders[number]), self._backend.max_width
            reason = ""
            if needed > free:
                reason = f"needs {needed:,} bytes, {self._info.name} has {free:,}"
            if limit is not None and any(piece.width > limit for piece in shard.pieces):
                reason = f"fbgemm takes at most {limit:,} columns of a table on this device"
            if reason:
                answers[number] = self._answer(orders[number], "refused", reason=reason)
                continue
            try:
                operators[number] = EmbeddingOp(shard, settings, self._backend)
            except UserError as error:  # a fault of the shard, such as a trace that is missing here
                answers[number] = self._answer(orders[number], "failed", reason=str(error))
        numbered = list(operators)
        try:
            timings = time_interleaved(
                [TimedOperator(op.forward, op.gradient) for op in operators.values()],
                self._watch,
                [orders[number].timing for number in numbered],
            )
        except ShardFault as fault:
            raise ShardFault(numbered[fault.number], fault.reason) from fault
        finally:
            operators.clear()
            gc.collect()  # modules are cycles: free their weights before the next shard's
            self._backend.flush(sum(self._needed_bytes(orders[n]) for n in numbers))
        for number, timing in zip(numbered, timings, strict=True):
            answers[number] = self._answer(orders[number], "ok", timing)
        return answers

    def _answer(
        self, order: Order, status: Status, timing: Timing | None = None, reason: str = ""
    ) -> Measurement:
        return Measurement(
            shard=order.shard,
            settings=order.settings,
            hardware=self._info.hardware,
            versions=self._versions,
            status=status,
            device=self._info.name,
            node=self._info.node,
            measured_at=time.time(),
            timing=timing,
            reason=reason,
        )
