"""What a process of ours does about itself: its priority, its memory, its garbage collector."""

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from autoshard.benchmark.system_files import ROOT, read_text

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of glibc's mallopt
_MAX_INT = 2**31 - 1  # which takes C's int


def at_usual_priority() -> None:
    """Puts this process at the priority of others, before it loads libraries, which takes long.

    Ray starts its workers at a low priority, at which whoever else is on a core leaves next to
    none of it. On Linux each thread has its own, and those to come take that of who starts them.
    """
    for thread in (ROOT / "proc/self/task").iterdir():
        with suppress(OSError):  # gone, or not allowed: then all takes longer
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)


def keep_freed_memory(max_bytes: int) -> None:
    """Lets the C library keep so much of freed memory instead of handing it back.

    Fresh pages cost several times the zeroing of kept ones, at every shard; and without it the
    output of each forward pass may or may not be made of fresh pages, which is up to 1.5 times its
    cost and changes with the process's history.
    """
    with suppress(OSError, AttributeError):  # not glibc: only slower
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, min(max_bytes, _MAX_INT))


def release_freed_memory() -> None:
    """Hands all freed memory back, also what lies below something that is still in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_bytes() -> int:
    """Returns the most main memory that this process has ever taken; 0 if the system is silent."""
    found = re.search(r"VmHWM:\s*(\d+) kB", read_text(ROOT / "proc/self/status"))
    return int(found[1]) * 1024 if found else 0


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses it: a collection would be charged to an operator, or walk a growing list again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
