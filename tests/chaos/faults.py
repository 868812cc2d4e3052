"""Faults: what is done to the processes of a world, and how it is undone."""

import random
import resource
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from chaos.world import World, kill, wait_until

_HOUR = 3600.0
_BLOCK = 1 << 20


class SkippedError(Exception):
    """A fault that cannot be made here; the message says why."""


def _nothing() -> None:
    pass


Undo = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        name: What happens.
        make: Makes it, and returns what undoes it; raises SkippedError where it cannot be made.
        seconds: How long it lasts, at most.
        only: Workloads that it concerns; all if empty.
        apart: Whether it needs two networks.
    """

    name: str
    make: Callable[[World, random.Random], Undo]
    seconds: float = 0.0
    only: tuple[str, ...] = ()
    apart: bool = False


def _actors(world: World, *classes: str) -> list[psutil.Process]:
    """Returns the actors of these classes once there are any, in the order of their numbers."""
    with suppress(TimeoutError):
        wait_until("actors", lambda: world.actors(*classes), 60)
    found = world.actors(*classes)
    if not found:
        raise SkippedError(f"no {' or '.join(classes)} runs")
    return sorted(found, key=lambda process: process.pid)


def _kill_one(*classes: str) -> Callable[[World, random.Random], Undo]:
    def make(world: World, rng: random.Random) -> Undo:
        kill([rng.choice(_actors(world, *classes))])
        return _nothing

    return make


def _kill_command(world: World, rng: random.Random) -> Undo:
    assert world.command is not None
    kill([psutil.Process(world.command.pid)])
    return _nothing


def _kill_mlflow(world: World, rng: random.Random) -> Undo:
    world.kill("mlflow")
    return world.start_mlflow


def _kill_node(world: World, rng: random.Random) -> Undo:
    world.kill("node")
    return world.start_node


def _kill_head(world: World, rng: random.Random) -> Undo:
    world.kill("head")

    def undo() -> None:
        world.kill("node")
        world.start_head()
        world.start_node()

    return undo


def _fill_disk(world: World, rng: random.Random) -> Undo:
    if not world.on_small_disk:
        raise SkippedError("no small disk can be mounted: needs root")
    filler = world.work / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (_BLOCK, 4096, 1):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass
    return filler.unlink


def _lock_store(world: World, rng: random.Random) -> Undo:
    if not world.store.exists():
        raise SkippedError("there is no store yet")
    other = sqlite3.connect(world.store, timeout=30, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other.close


def _jump(world: World, rng: random.Random) -> Undo:
    world.set_clock(rng.choice((-24, -1, 1, 24)) * _HOUR)
    return _nothing


def _cut_network(world: World, rng: random.Random) -> Undo:
    if world.machines is None:
        raise SkippedError("two networks need root")
    machine, _ = world.machines
    machine.unplug()
    return machine.plug_in


def _limit_memory(world: World, rng: random.Random) -> Undo:
    found = _actors(world, "DeviceProcess")
    _limit(found, _BLOCK)
    return lambda: _limit(found, None)


def _limit(processes: Sequence[psutil.Process], spare_bytes: int | None) -> None:
    """Limits the address space to what they have and so much more, or no longer."""
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            most = process.memory_info().vms + spare_bytes if spare_bytes is not None else -1
            hard = resource.prlimit(process.pid, resource.RLIMIT_AS)[1]
            resource.prlimit(process.pid, resource.RLIMIT_AS, (most, hard))


FAULTS = (
    Fault("actor killed", _kill_one("DeviceProcess")),
    Fault("pool killed", _kill_one("PoolCoordinator")),
    Fault("command killed", _kill_command),
    Fault("worker killed", _kill_one("EnvRunner", "Trainable"), only=("training", "sweeping")),
    Fault("MLflow's server killed", _kill_mlflow, 5.0),
    Fault("node killed", _kill_node, 5.0),
    Fault("head killed", _kill_head, 5.0),
    Fault("disk full", _fill_disk, 8.0),
    Fault("store locked", _lock_store, 15.0),
    Fault("clock jumps", _jump),
    Fault("network cut", _cut_network, 20.0, apart=True),
    Fault("memory limited", _limit_memory, 5.0),
)
