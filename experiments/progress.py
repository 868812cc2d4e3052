"""A progress bar with the time left; lines now and then where there is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.cli import console

_LINES = 5  # told in a log: at each fifth of the way


@contextmanager
def following(total: int, what: str) -> Iterator[Callable[[], None]]:
    """Call the function it gives once for each of the `total` things that are done."""
    if console.is_terminal:
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    started, done, told = time.monotonic(), 0, 0

    def step() -> None:
        nonlocal done, told
        done += 1
        if done * _LINES // total > told:
            told = done * _LINES // total
            passed = time.monotonic() - started
            left = passed / done * (total - done)
            console.print(f"  {done}/{total} {what}, {passed:.0f} s, about {left:.0f} s left")

    yield step
