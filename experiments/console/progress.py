"""A progress bar with the remaining time; lines where there is no terminal."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

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
SILENT_S = 30.0  # after which another one follows, even if nothing was done


class Step(Protocol):
    """Tells that `count` things are done, and what is being done now."""

    def __call__(self, count: int = 1, doing: str = "") -> None:
        """Tells it."""


@contextmanager
def following(
    total: int, what: str, left_s: Callable[[], float | None] | None = None
) -> Iterator[Step]:
    """Provides a function to call for each of `total` things that are done, or in between.

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
            TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn() if left_s is None else TextColumn("{task.fields[left]}"),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total, left="", doing="")

            def advance(count: int = 1, doing: str = "") -> None:
                seconds = None if left_s is None else left_s()
                left = "" if seconds is None else str(timedelta(seconds=round(seconds)))
                bar.update(task, advance=count, left=left, doing=doing)

            yield advance
        return
    log, ended = _Log(total, what, left_s), threading.Event()
    thread = threading.Thread(target=log.watch, args=(ended,), daemon=True)
    thread.start()
    try:
        yield log.step
    finally:
        ended.set()
        thread.join()


class _Log:
    """Prints a line at each fifth of the things, and when it has said nothing for a while."""

    def __init__(self, total: int, what: str, left_s: Callable[[], float | None] | None) -> None:
        self._total, self._what, self._left_s = total, what, left_s
        self._done, self._doing = 0, ""
        self._began = self._told = time.monotonic()

    def step(self, count: int = 1, doing: str = "") -> None:
        before, self._done, self._doing = self._done, self._done + count, doing
        if self._done * _LINES // self._total > before * _LINES // self._total:
            self._tell()

    def watch(self, ended: threading.Event) -> None:
        """Prints lines until the end, each so long after the one before."""
        while not ended.wait(max(0.0, self._told + SILENT_S - time.monotonic())):
            if time.monotonic() >= self._told + SILENT_S:
                self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        passed, left = self._told - self._began, None
        if self._left_s is not None:
            left = self._left_s()
        elif self._done:
            left = passed / self._done * (self._total - self._done)
        about = "" if left is None else f", about {left:.0f} s left"
        doing = f" ({self._doing})" if self._doing else ""
        console.print(
            f"  {self._done}/{self._total} {self._what}{doing}, {passed:.0f} s{about}",
            markup=False,
            soft_wrap=True,
        )
