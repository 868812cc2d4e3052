"""Whether tables can be packed, for many tasks at once: first fit decreasing over arrays."""

import numpy as np
import numpy.typing as npt

from autoshard.workload.tables import DIM_STEP

Ints = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

_MOST_HALVED = 48  # slices that become two before a task is given up


def surely_pack(sizes: Ints, rooms: Ints) -> Truths:
    """Whether no order of rooms can make first fit decreasing fail; it may succeed elsewhere, too.

    It fails at a size s only if every room has less than s left, so that all rooms together have
    less than their count times s left. What they have left is known whatever went where: all room,
    minus the sizes before s. Where that is enough at each size, none can fail.

    Args:
        sizes: what is to be packed, [tasks, sizes]; 0 where a task has fewer.
        rooms: where, [tasks, rooms]; 0 where a task has fewer.
    """
    falling = -np.sort(-sizes, axis=1)
    before = np.cumsum(falling, axis=1) - falling
    left = rooms.sum(1, keepdims=True) - before
    return np.asarray((left >= (rooms > 0).sum(1, keepdims=True) * falling).all(1))


def all_fit(sizes: Ints, rooms: Ints) -> Truths:
    """Whether first fit decreasing packs the sizes of each task, as `first_fit_decreasing` does:
    [tasks], of arrays as `surely_pack` takes them.
    """
    fits = surely_pack(sizes, rooms)
    unsure = np.flatnonzero(~fits)
    if len(unsure):
        falling, largest_first = (-np.sort(-values[unsure], axis=1) for values in (sizes, rooms))
        fits[unsure] = _first_fit(falling, largest_first)
    return fits


def _first_fit(falling: Ints, free: Ints) -> Truths:
    """Of sizes that fall, into rooms that fall: each where it fits first."""
    fits = np.ones(len(falling), bool)
    tasks = np.arange(len(falling))
    for size in falling.T:
        room = (free >= size[:, None]).argmax(1)  # the first; of none 0, which has too little
        fits &= free[tasks, room] >= size
        free[tasks, room] -= size
    return fits


def all_fit_split(fixed: Ints, column: Ints, widths: Ints, rooms: Ints) -> Truths:
    """The same where tables may be halved: the largest slice of each task, again and again, until
    first fit decreasing packs all. A slice of w columns takes `fixed + w * column` bytes.

    Args:
        fixed: bytes of each slice of a table, however narrow: [tasks, tables].
        column: bytes of each of its columns.
        widths: columns; 0 where a task has fewer tables.
        rooms: as in `all_fit`.
    """
    fits = np.zeros(len(rooms), bool)
    left = np.arange(len(rooms))  # tasks that are neither packed nor given up
    for _ in range(_MOST_HALVED):
        sizes = np.where(widths > 0, fixed + widths * column, 0)
        packed = all_fit(sizes, rooms[left])
        fits[left[packed]] = True
        wide = widths >= 2 * DIM_STEP
        # More slices need more memory in sum: what is too much stays too much.
        on = ~packed & wide.any(1) & (sizes.sum(1) <= rooms[left].sum(1))
        left = left[on]
        if not len(left):
            break
        fixed, column, widths = (values[on] for values in (fixed, column, widths))
        largest = np.where(wide[on], sizes[on], -1).argmax(1)
        tasks = np.arange(len(left))
        first = widths[tasks, largest] // (2 * DIM_STEP) * DIM_STEP
        second = widths[tasks, largest] - first
        fixed, column = (
            np.concatenate([values, values[tasks, largest, None]], 1) for values in (fixed, column)
        )
        widths = np.concatenate([widths, second[:, None]], 1)
        widths[tasks, largest] = first
    return fits
