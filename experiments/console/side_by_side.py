"""Work on several things side by side, each on a core, in processes that are forked from this."""

import ctypes
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

from autoshard.benchmark.machine.hardware import physical_cores
from autoshard.workload import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
_FORKS = get_context("fork")
_SIGNAL_OF_PARENT = 1  # of prctl: the signal that a process gets when its parent ends


def processes_for(items: int) -> int:
    """Returns the number of processes that work on so many things; 1: it is this one."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # its threads' locks would be copied as they are
        return 1
    return min(items, len(physical_cores()))


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yields the result of each item, in their order. The first error ends all that still works.

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
    waiting, found, handed_out = deque(enumerate(items)), dict[int, Result](), 0
    running = dict[Connection, tuple[int, BaseProcess]]()
    try:
        while handed_out < len(items):
            while waiting and len(running) < processes:
                number, item = waiting.popleft()
                receiver, process = _start(work, item)
                running[receiver] = number, process
            for ready in wait(list(running)):
                receiver = cast("Connection", ready)
                found[running[receiver][0]] = _answer(receiver, processes)
                _, process = running.pop(receiver)
                process.join()
            while handed_out in found:
                yield found.pop(handed_out)
                handed_out += 1
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _start(work: Callable[[Item], Any], item: Item) -> tuple[Connection, BaseProcess]:
    receiver, sender = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(work, item, sender, os.getpid()), daemon=True)
    process.start()
    sender.close()  # the end of the process then is the end of what can be received
    return receiver, process


def _run(work: Callable[[Item], Any], item: Item, sender: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the first process, which ends this
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        return
    # A progress bar puts its own files here, whose locks its thread may have held.
    sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    try:
        answer: tuple[BaseException | None, Any] = (None, work(item))
    except Exception as error:
        answer = (_picklable(error), None)
    sender.send(answer)


def _answer(receiver: Connection, processes: int) -> Any:
    try:
        error, result = receiver.recv()
    except EOFError:
        raise UserError(
            f"one of {processes} processes was killed, most likely because memory ran out: add "
            "memory, or use fewer cores, as with taskset -c 0"
        ) from None
    if error is not None:
        raise error
    return result


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
