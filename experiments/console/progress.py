"""A progress bar with the remaining time; a few lines where there is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from autoshard.experiments.console.cli import console

_LINES = 5  # in a log: one at each fifth


@contextmanager
def following(
    total: int, what: str, left_s: Callable[[], float | None] | None = None
) -> Iterator[Callable[[], None]]:
    """Provides a function to call once for each of `total` things that are done.

    Args:
        total: Number of things.
        what: Name of the things.
        left_s: Returns the remaining seconds, or None if unknown. Default: extrapolated from the
            number of things done.
    """
    if console.is_terminal:
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn() if left_s is None else TextColumn("{task.fields[left]}"),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total, left="")

            def advance() -> None:
                seconds = None if left_s is None else left_s()
                left = "" if seconds is None else str(timedelta(seconds=round(seconds)))
                bar.update(task, advance=1, left=left)

            yield advance
        return
    started, done = time.monotonic(), 0

    def step() -> None:
        nonlocal done
        done += 1
        if done * _LINES // total > (done - 1) * _LINES // total:
            passed = time.monotonic() - started
            left = passed / done * (total - done) if left_s is None else left_s()
            about = "" if left is None else f", about {left:.0f} s left"
            console.print(f"  {done}/{total} {what}, {passed:.0f} s{about}")

    yield step
