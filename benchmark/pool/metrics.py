"""The pool's state, as Ray's metrics: for its dashboard, Prometheus, and `autoshard pool`."""

import time
from dataclasses import dataclass

import ray
from ray.util.metrics import Counter, Gauge

from autoshard.benchmark.pool.fleet import Fleet

WINDOW_SECONDS = 10.0  # that duty is of; Ray has Prometheus ask as often
_PREFIX = "autoshard_pool_"
_GAUGES = {
    "devices": "Devices that can measure.",
    "devices_busy": "Devices that measure shards now.",
    "shards_waiting": "Shards that wait for a device.",
    "duty": f"Share of time in which devices measured shards, of {WINDOW_SECONDS:g} seconds.",
}
_COUNTERS = {
    "shards_measured": "Shards measured.",
    "shards_failed": "Shards that could not be measured.",
    "devices_lost": "Devices whose actor died, hung or was replaced, or whose node left.",
}


@dataclass
class PoolState:
    """The value of each metric; counters begin with the pool's actor."""

    devices: int = 0
    devices_busy: int = 0
    shards_waiting: int = 0
    duty: float = 0.0
    shards_measured: int = 0
    shards_failed: int = 0
    devices_lost: int = 0


class PoolMetrics:
    """Metrics of the pool that this actor is. There is a pool for each hardware asked for by name,
    so the tag `pool` says which.
    """

    def __init__(self) -> None:
        tag = {"pool": ray.get_runtime_context().get_actor_name() or ""}
        self.state = PoolState()
        self._gauges = {
            name: Gauge(_PREFIX + name, text, ("pool",)).set_default_tags(tag)
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: Counter(_PREFIX + name, text, ("pool",)).set_default_tags(tag)
            for name, text in _COUNTERS.items()
        }
        self._given = dict.fromkeys(_COUNTERS, 0)  # to Ray so far
        self._updated = self._window = time.monotonic()
        self._device_s = self._busy_s = 0.0  # in the window so far

    def answered(self, ok: bool) -> None:
        """Counts a shard that was measured, or could not be."""
        self.state.shards_measured += ok
        self.state.shards_failed += not ok

    def busy(self, change: int) -> None:
        """Counts one more device that measures shards, or one less."""
        self._pass_time()
        self.state.devices_busy += change

    def update(self, fleet: Fleet, waiting: int) -> PoolState:
        """Reads the fleet, exports all metrics to Ray, and returns their values."""
        self._pass_time()
        state = self.state
        state.devices, state.devices_lost = len(fleet.measuring()), fleet.lost
        state.shards_waiting = waiting
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, name))
        for name, counter in self._counters.items():
            if (more := getattr(state, name) - self._given[name]) > 0:
                counter.inc(more)
                self._given[name] += more
        return state

    def _pass_time(self) -> None:
        now = time.monotonic()
        self._device_s += (now - self._updated) * self.state.devices
        self._busy_s += (now - self._updated) * self.state.devices_busy
        self._updated = now
        if now - self._window >= WINDOW_SECONDS:
            self.state.duty = self._busy_s / self._device_s if self._device_s else 0.0
            self._window, self._device_s, self._busy_s = now, 0.0, 0.0
