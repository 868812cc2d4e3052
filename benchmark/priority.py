"""At which priority processes of ours run."""

import contextlib
import os
from pathlib import Path


def at_usual_priority() -> None:
    """For what measures and what deals out work: first thing, for loading libraries takes long.

    Ray starts its workers at a low priority, at which whoever else is on a core leaves next to
    none of it. On Linux each thread has its own, and those to come take that of who starts them.
    """
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # gone, or not allowed: then all takes longer
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
