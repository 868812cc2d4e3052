"""A lock for each device, so that pools of one machine take turns to measure on it.

It is a lock on a file, which the system releases when its holder ends. The holder writes its
description into the file, for the messages of others.
"""

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

_LOOK_EVERY_S = 0.01  # a look takes microseconds of the core that is being measured on
_SILENCE_S = 1.0  # waiting for longer is reported


class DeviceBusy(Exception):  # noqa: N818 - a state of affairs, not an error
    """Another pool on this machine is measuring on the same device."""


@contextmanager
def claimed(
    device: str, label: str, patience_s: float, waiting: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Holds a device while the block runs; waits up to `patience_s` for it.

    Pools of one user see each other if they share the folder for temporary files.

    Args:
        device: Name of the device on this machine, such as `core 3`.
        label: Description of the holder, for messages of others.
        patience_s: Seconds to wait.
        waiting: Called once with what is waited for, after the first second.

    Raises:
        DeviceBusy: The device did not become free; the message describes its holder.
    """
    folder = Path(tempfile.gettempdir()) / f"autoshard-devices-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Opened to append: opening to write would erase the description of another holder.
    with open(folder / f"{device.replace(' ', '')}.lock", "a+b", buffering=0) as lock:
        started = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited_s = time.monotonic() - started
                if waited_s >= patience_s:
                    raise DeviceBusy(_held(device, lock)) from None
                if waiting is not None and waited_s >= _SILENCE_S:
                    waiting(_held(device, lock))
                    waiting = None
            time.sleep(_LOOK_EVERY_S)
        _write(lock, json.dumps({"label": label, "process": os.getpid(), "since": time.time()}))
        try:
            yield
        finally:
            _write(lock, "")


def this_pool() -> str:
    """Returns the label of an actor's pool: there is one pool per Ray cluster."""
    import ray

    if not ray.is_initialized():
        return "a process without a Ray cluster"
    return f"the pool of Ray cluster {ray.get_runtime_context().gcs_address}"


def _write(lock: FileIO, text: str) -> None:
    with suppress(OSError):  # a full disk must not prevent measuring
        lock.truncate(0)
        lock.write(text.encode())


def _held(device: str, lock: FileIO) -> str:
    return f"{device} of {socket.gethostname()} is held by {_holder(lock)}"


def _holder(lock: FileIO) -> str:
    lock.seek(0)
    try:
        holder = json.loads(lock.read())
        seconds = max(0.0, time.time() - holder["since"])
        return f"{holder['label']} (process {holder['process']}, for {seconds:.0f} s)"
    except (ValueError, TypeError, KeyError):  # it has just taken the lock, or could not write
        return "another process"
