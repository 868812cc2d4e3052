"""How the C library deals with the memory of shards that come and go."""

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of glibc's mallopt
KEPT_BYTES = 448 * 2**20


def keep_freed_memory() -> None:
    """Let the C library keep up to 448 MiB of freed memory instead of handing it back.

    Fresh pages cost several times the zeroing of kept ones, at every shard; and without it the
    output of each forward pass may or may not be made of fresh pages, which is up to 1.5 times its
    cost and changes with the process's history.
    """
    with suppress(OSError, AttributeError):  # not glibc: only slower
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def release_freed_memory() -> None:
    """Hand all freed memory back, also what lies below something that is still in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
