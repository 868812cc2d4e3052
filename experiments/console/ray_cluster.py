"""The Ray cluster that is there, or one started on this machine, and its pool that measures."""

import logging
import os
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from autoshard import benchmark  # whose pool is loaded where something is measured
from autoshard.experiments.console import cli
from autoshard.workload import UserError

_ANSWER_SECONDS = 5.0


@contextmanager
def ray_cluster(must_run: bool = False) -> Iterator[None]:
    """A connection to Ray: RAY_ADDRESS, else a cluster running here, else one of our own.

    `must_run`: UserError rather than a cluster of our own.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    if ray.is_initialized():  # whoever runs us has joined already, and stays joined
        yield
        return
    address = _address(must_run)
    # Of a cluster that starts here: a low priority spares what else a node runs, which is us alone.
    # Beside others it would leave our workers next to none of a core.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        given = os.environ.get("RAY_ADDRESS")
        where = f"RAY_ADDRESS={given}" if given else "this machine"
        reason = str(error).splitlines()[0]
        raise UserError(f"no Ray cluster can be joined at {where}: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def measuring_pool(store: Path) -> "Iterator[benchmark.BenchmarkPool]":
    """A connection to the cluster's pool, whose measurements go into the store."""
    with ray_cluster():
        pool = benchmark.BenchmarkPool(store)
        try:
            yield pool
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"what was measured is in {store}; run again to go on"
            ) from None
        Notices().tell(pool)
        pool.close()


class Notices:
    """Prints each notice of the pool once, however often the pool repeats it."""

    def __init__(self) -> None:
        self._subjects: set[str] = set()

    def tell(self, pool: "benchmark.BenchmarkPool") -> None:
        """Prints the new notices."""
        for notice in pool.notices():
            subject = notice.partition(":")[0]  # how much of a load is printed once
            if subject not in self._subjects:
                self._subjects.add(subject)
                cli.note(notice)


def _address(must_run: bool) -> str | None:
    """For `ray.init`; UserError where nothing answers, which Ray would try for many minutes."""
    given = os.environ.get("RAY_ADDRESS")
    if given:
        if problem := _problem(given):
            raise UserError(
                f"no Ray cluster answers at RAY_ADDRESS={given} ({problem}): start it, or unset "
                "RAY_ADDRESS to use this machine"
            )
        return None  # Ray reads it by itself
    latest = _latest()
    if not _problem(latest):
        return "auto" if must_run else None
    if must_run:
        raise UserError(f"no Ray cluster runs here: nothing answers at {latest}, the latest one's")
    return "local"


def _latest() -> str:
    """What Ray has noted of this machine's latest cluster: a killed one leaves its address."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def _problem(address: str) -> str:
    """Why nothing answers at HOST:PORT; empty if something does, or if it is no such address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return ""
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
