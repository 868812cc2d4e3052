"""Work on several things side by side, each on a core, in processes that are forked from this."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from autoshard.benchmark.hardware import physical_cores
from autoshard.workload import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
_work: Callable[[Any], Any] | None = None  # of a forked process


def processes_for(items: int) -> int:
    """Returns the number of processes that work on so many things; 1: it is this one."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # its threads' locks would be copied as they are
        return 1
    return min(items, len(physical_cores()))


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yields the result of each item, in their order.

    Args:
        work: Any function of one item; results must be picklable. What it changes, stays in the
            process that it ran in.
        items: What to work on.

    Raises:
        UserError: A process was killed.
    """
    processes = processes_for(len(items))
    if processes < 2:
        yield from map(work, items)
        return
    forks = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, forks, _begin, (work,)) as executor:
        try:
            yield from executor.map(_run, items)
        except BrokenProcessPool:
            raise UserError(
                f"one of {processes} processes was killed, most likely because memory ran out: "
                "give each more, or fewer cores (taskset)"
            ) from None


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is reported by the first process alone


def _run(item: Any) -> Any:
    assert _work is not None
    return _work(item)
