"""A progress bar with the time left; lines now and then where there is no terminal."""

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

_LINES = 5  # told in a log: at each fifth of the way


@contextmanager
def following(
    total: int, what: str, left_s: Callable[[], float | None] | None = None
) -> Iterator[Callable[[], None]]:
    """Call the function it gives once for each of the `total` things that are done.

    `left_s` tells the seconds that are left where counting would mislead; None: not known yet.
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
            yield lambda: bar.update(task, advance=1, left=_told(left_s))
        return
    started, done, told = time.monotonic(), 0, 0

    def step() -> None:
        nonlocal done, told
        done += 1
        if done * _LINES // total > told:
            told = done * _LINES // total
            passed = time.monotonic() - started
            left = passed / done * (total - done) if left_s is None else left_s()
            about = "" if left is None else f", about {left:.0f} s left"
            console.print(f"  {done}/{total} {what}, {passed:.0f} s{about}")

    yield step


def _told(left_s: Callable[[], float | None] | None) -> str:
    """As the bar shows it."""
    left = None if left_s is None else left_s()
    return "" if left is None else str(timedelta(seconds=round(left)))
