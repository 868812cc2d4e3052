"""Settings of the current process: priority, memory, garbage collector."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from autoshard.benchmark.machine.system_files import ROOT, read_bytes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of glibc's mallopt
_MAX_INT = 2**31 - 1  # largest int in C


def at_usual_priority() -> None:
    """Sets this process to normal priority, before it loads libraries, which takes long.

    Ray starts workers at a low priority, at which any other process on a core leaves them almost
    nothing. On Linux each thread has its own priority, which new threads inherit.
    """
    for thread in (ROOT / "proc/self/task").iterdir():
        with suppress(OSError):  # gone, or not allowed: then all takes longer
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)


def keep_freed_memory(max_bytes: int) -> None:
    """Lets the C library keep up to this much freed memory.

    Fresh pages take several times as long as zeroing kept ones, for every shard. Without it, the
    output of a forward pass is on fresh pages or not, depending on the process's history, which
    changes its cost by a factor of up to 1.5.
    """
    with suppress(OSError, AttributeError):  # not glibc: only slower
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, min(max_bytes, _MAX_INT))


def release_freed_memory() -> None:
    """Returns all freed memory to the system, including holes below used memory."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_bytes() -> int:
    """Returns the peak memory of this process; 0 if unknown."""
    return read_bytes(ROOT / "proc/self/status", "VmHWM") or 0


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector: its time would be charged to an operator."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
