"""The connection to a Ray cluster, and to its pool of benchmark actors."""

import logging
import os
import signal
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from autoshard import benchmark  # its pool is loaded only where something is measured
from autoshard.benchmark.backends import RequestedKind
from autoshard.experiments.console import cli
from autoshard.workload import UserError
from autoshard.workload.errors import reason_of

_ANSWER_SECONDS = 5.0


@contextmanager
def ray_cluster(must_run: bool = False) -> Iterator[None]:
    """Connects to RAY_ADDRESS, else to a cluster on this machine, else starts one.

    With `must_run`, raises UserError instead of starting a cluster.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    if ray.is_initialized():  # the caller has connected, and stays connected
        yield
        return
    address = _address(must_run)
    # A cluster that starts here gives its workers normal priority: nothing else of it needs the
    # node, and beside other processes, Ray's low priority would leave workers next to no time.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Nobody looks at the dashboard of a cluster that ends with this command.
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **own)
    except (ConnectionError, ValueError) as error:
        given = os.environ.get("RAY_ADDRESS")
        where = f"RAY_ADDRESS={given}" if given else "this machine"
        raise UserError(f"no Ray cluster can be joined at {where}: {reason_of(error)}") from error
    joined = ray.get_runtime_context().gcs_address
    # `ray job stop` and Kubernetes send it: a run is to end as by Ctrl-C, and say how to go on.
    before = signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not _is_lost(joined, error):
            raise
        reason = reason_of(error).partition(". ")[0]  # Ray adds what to read
        raise UserError(
            f"the Ray cluster at {joined} was lost ({reason}): start it, and run again, with "
            "--resume to continue a training or a sweep"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Does what Ctrl-C does now: Tune has a handler of its own while trials run."""
    now = signal.getsignal(signal.SIGINT)  # a job in the background ignores it
    (now if callable(now) else signal.default_int_handler)(number, frame)


@contextmanager
def measuring_pool(
    store: Path, devices: RequestedKind = "auto"
) -> "Iterator[benchmark.BenchmarkPool]":
    """Connects to the cluster's pool of such devices; its measurements go into the store."""
    with ray_cluster():
        pool = benchmark.BenchmarkPool(store, devices)
        try:
            yield pool
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"what was measured is in {store}; run again to continue"
            ) from None
        Notices().print_new(pool)
        pool.close()


class Notices:
    """Prints each notice of the pool once, however often the pool repeats it."""

    def __init__(self) -> None:
        self._subjects: set[str] = set()

    def print_new(self, pool: "benchmark.BenchmarkPool") -> None:
        """Prints the notices whose subject, the text before the colon, is new."""
        for notice in pool.notices():
            subject = notice.partition(":")[0]
            if subject not in self._subjects:
                self._subjects.add(subject)
                cli.note(notice)


def _address(must_run: bool) -> str | None:
    """Returns the address for `ray.init`; UserError where Ray would retry for many minutes."""
    given = os.environ.get("RAY_ADDRESS")
    if given:
        if problem := _problem(given):
            raise UserError(
                f"no Ray cluster answers at RAY_ADDRESS={given} ({problem}): start it, or unset "
                "RAY_ADDRESS to use this machine"
            )
        return "local" if given == "local" else None  # Ray reads other ones itself
    # A cluster that was killed leaves its address in this file.
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    file = Path(folder) / "ray" / "ray_current_cluster"
    latest = file.read_text().strip() if file.is_file() else ""
    if latest and not _problem(latest):
        return "auto" if must_run else None
    if not must_run:
        return "local"
    if latest:
        raise UserError(f"no Ray cluster runs here: nothing answers at {latest}, the latest one's")
    return "auto"  # that of another command, which leaves no file


def _is_lost(address: str, error: BaseException | None) -> bool:
    """Returns whether a cluster's head is gone, or another one answers at its address."""
    if _problem(address):
        return True
    while error is not None:
        if isinstance(error, AuthenticationError):  # it does not know us
            return True
        error = error.__cause__ or error.__context__
    return False


def _problem(address: str) -> str:
    """Returns why nothing answers at HOST:PORT; empty if something does, or for other addresses."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return ""
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
