"""One measurement at a time on a core, whichever pool of this machine asks for it.

A lock on a file of the core, which the system frees when its holder ends, however it ends. The
holder writes into the file who it is, for those who wait in vain.
"""

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

_LOOK_EVERY_S = 0.01  # a look takes microseconds of the core that is being measured on


class DeviceBusy(Exception):  # noqa: N818 - a state of affairs, not an error
    """Another pool on this machine is measuring on the same core."""


@contextmanager
def claimed(core: int, label: str, patience_s: float) -> Iterator[None]:
    """Hold a core against others who measure on this machine, as long as the block runs.

    DeviceBusy says who holds it if it does not come free within `patience_s`, during which this
    thread waits. Pools of one user see each other if they share the folder for temporary files.

    Args:
        core: its number.
        label: who measures, as others are told: "the pool of ...".
    """
    folder = Path(tempfile.gettempdir()) / f"autoshard-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # To append: whoever opens a file to write empties it, and the holder may be another.
    with open(folder / f"core{core}.lock", "a+b", buffering=0) as lock:
        deadline = time.monotonic() + patience_s
        while not _taken(lock):
            if time.monotonic() >= deadline:
                raise DeviceBusy(
                    f"core {core} of {socket.gethostname()} is held by {_holder(lock)}"
                )
            time.sleep(_LOOK_EVERY_S)
        _write(lock, json.dumps({"label": label, "process": os.getpid(), "since": time.time()}))
        try:
            yield
        finally:
            _write(lock, "")


def this_pool() -> str:
    """The label of an actor's pool: there is one pool a Ray cluster."""
    import ray

    if not ray.is_initialized():
        return "a process without a Ray cluster"
    return f"the pool of Ray cluster {ray.get_runtime_context().gcs_address}"


def _taken(lock: FileIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(lock: FileIO, text: str) -> None:
    with suppress(OSError):  # a full disk keeps nobody from measuring
        lock.truncate(0)  # what a holder left that was killed goes, too
        lock.write(text.encode())


def _holder(lock: FileIO) -> str:
    """Who holds the lock, as it says itself."""
    lock.seek(0)
    try:
        told = json.loads(lock.read())
        seconds = max(0.0, time.time() - told["since"])
        return f"{told['label']} (process {told['process']}, for {seconds:.0f} s)"
    except (ValueError, TypeError, KeyError):  # it has only just taken it, or could not write
        return "another process"
