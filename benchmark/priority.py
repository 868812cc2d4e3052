"""At which priority processes of ours run."""

import contextlib
import os


def at_usual_priority() -> None:
    """For what measures and what deals out work: first thing, for loading libraries takes long.

    Ray starts its workers at a low priority, at which whoever else is on a core leaves next to
    none of it.
    """
    with contextlib.suppress(OSError):  # not allowed: it works as well, and takes longer
        os.setpriority(os.PRIO_PROCESS, 0, 0)
