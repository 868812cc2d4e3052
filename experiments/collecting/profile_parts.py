"""Counts lookups in parts of the data on workers of a Ray cluster, and joins the counts."""

from collections import deque
from collections.abc import Callable, Generator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from autoshard.workload import UserError
from autoshard.workload.errors import reason_of
from autoshard.workload.profiling.profiler import TableProfiler
from autoshard.workload.profiling.row_counts import Arrays
from autoshard.workload.profiling.sources import Source

_PARTS = 4  # of each worker: more would be more counts to join, fewer leave workers idle at the end
_WAIT_S = 1.0


def counted_by_workers(
    source: Source,
    make: Callable[..., TableProfiler],
    profiler: TableProfiler,
    done: int,
    workers: int,
) -> Generator[int, None, None]:
    """Joins the counts of all portions from number `done` on to those of a profiler.

    Parts are joined in the order of the data, so what is joined is always its first portions. A
    part whose worker died is counted again by another.

    Args:
        source: Data, which each node can read.
        make: Makes a profiler, given its number of threads.
        profiler: Profiler that counts are joined to.
        done: Portions that it has counted.
        workers: Parts that are counted at once, each on one core.

    Yields:
        Number of portions that were joined; 0 about each second while none is.
    """
    count = min(len(source) - done, workers * _PARTS)
    edges = np.linspace(done, len(source), count + 1).astype(int).tolist()
    task: Any = ray.remote(num_cpus=1)(_count_part)
    shared = [ray.put(source), ray.put(make)]
    waiting, unjoined = deque(pairwise(edges)), deque[tuple[Any, int]]()
    running: list[Any] = []
    try:
        while waiting or unjoined:
            while waiting and len(running) < workers:
                first, last = waiting.popleft()
                running.append(task.remote(*shared, first, last))
                unjoined.append((running[-1], last - first))
            if running:
                _, running = ray.wait(running, timeout=_WAIT_S)
            yield 0
            while unjoined and unjoined[0][0] not in running:
                part, steps = unjoined.popleft()
                profiler.join(_result(part))
                yield steps
    finally:
        for part in running:
            ray.cancel(part, force=True)


def _count_part(
    source: Source, make: Callable[..., TableProfiler], first: int, last: int
) -> dict[str, Arrays]:
    """Returns the counts of portions `first` to `last - 1`."""
    profiler = make(threads=1)
    for portion in islice(source.portions(first), last - first):
        profiler.add(portion)
    return profiler.state()


def _result(part: Any) -> dict[str, Arrays]:
    try:
        found: dict[str, Arrays] = ray.get(part)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
    except RayError as error:
        raise UserError(
            f"a worker of Ray's died each time that it counted a part ({reason_of(error)}): "
            "give it less --max-gb, or use fewer --workers"
        ) from error
    return found
