"""First fit decreasing: packs tables into memory whatever they cost, for many tasks at once."""

import numpy as np
import numpy.typing as npt

from autoshard.workload.admission import Occupancy, RuleMasks
from autoshard.workload.tables import DIM_STEP

Ints = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

_NOWHERE = -1
_MAX_HALVED = 48  # slices that become two before a task is given up


def first_fit_decreasing(sizes: Ints, rooms: Ints, masks: RuleMasks | None = None) -> Ints:
    """Returns the room of each size, the largest size first, each in the first room that admits it;
    -1 where none does. The largest rooms are tried first: [tasks, sizes].

    Args:
        sizes: What is to be packed, [tasks, sizes]; 0 where a task has fewer.
        rooms: Where, [tasks, rooms]; 0 where a task has fewer.
        masks: The rules of the only task; its sizes are those of its units.
    """
    tasks, homes = np.arange(len(sizes)), np.full(sizes.shape, _NOWHERE)
    held, order = Occupancy(masks, rooms.copy()), np.argsort(-rooms, axis=1, kind="stable")
    for units in np.argsort(-sizes, axis=1, kind="stable").T:
        size = sizes[tasks, units]
        admitted = np.take_along_axis(held.admits(units, size), order, 1)
        first = admitted.argmax(1)
        fit = np.flatnonzero(admitted[tasks, first])
        chosen = order[fit, first[fit]]
        homes[fit, units[fit]] = chosen
        held.enter_each(fit, units[fit], size[fit], chosen)
    return homes


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
    """Returns whether first fit decreasing packs all sizes of each task: [tasks]."""
    fits = surely_pack(sizes, rooms)
    unsure = np.flatnonzero(~fits)
    if len(unsure):
        fits[unsure] = (first_fit_decreasing(sizes[unsure], rooms[unsure]) >= 0).all(1)
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
    for _ in range(_MAX_HALVED):
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
