"""First-fit decreasing bin packing of tables into memory, for many tasks at once."""

import numpy as np

from autoshard.workload.arrays import Bools, Ints
from autoshard.workload.packing.admission import Occupancy, RuleMasks
from autoshard.workload.tables.table import DIM_STEP

_MAX_SPLITS = 48  # before a task counts as infeasible


def first_fit_decreasing(sizes: Ints, capacities: Ints, masks: RuleMasks | None = None) -> Ints:
    """Returns the device of each item, [tasks, items]; -1 if no device admits it.

    The largest items are placed first, and the devices with the most memory are tried first.

    Args:
        sizes: Bytes of items, [tasks, items]; padded with 0.
        capacities: Bytes of devices, [tasks, devices]; padded with 0.
        masks: Rules, if there is one task; its items are the units of the masks.
    """
    tasks, homes = np.arange(len(sizes)), np.full(sizes.shape, -1)
    held = Occupancy(masks, capacities.copy())
    order = np.argsort(-capacities, axis=1, kind="stable")
    for units in np.argsort(-sizes, axis=1, kind="stable").T:
        size = sizes[tasks, units]
        admitted = np.take_along_axis(held.admits(units, size), order, 1)
        first = admitted.argmax(1)
        fit = np.flatnonzero(admitted[tasks, first])
        chosen = order[fit, first[fit]]
        homes[fit, units[fit]] = chosen
        held.enter_each(fit, units[fit], size[fit], chosen)
    return homes


def surely_pack(sizes: Ints, capacities: Ints) -> Bools:
    """Returns a sufficient condition for first-fit decreasing to succeed in any order of devices.

    It fails at an item of size s only if every device has less than s free, so that all devices
    together have less than s times their number free. The free memory in sum does not depend on the
    placement: it is the capacity minus the items before s. If it suffices at each item, none fails.
    """
    falling = -np.sort(-sizes, axis=1)
    before = np.cumsum(falling, axis=1) - falling
    left = capacities.sum(1, keepdims=True) - before
    return np.asarray((left >= (capacities > 0).sum(1, keepdims=True) * falling).all(1))


def all_fit(sizes: Ints, capacities: Ints) -> Bools:
    """Returns whether first-fit decreasing packs all items of each task: [tasks]."""
    fits = surely_pack(sizes, capacities)
    unsure = np.flatnonzero(~fits)
    if len(unsure):
        fits[unsure] = (first_fit_decreasing(sizes[unsure], capacities[unsure]) >= 0).all(1)
    return fits


def all_fit_split(fixed: Ints, column: Ints, widths: Ints, capacities: Ints) -> Bools:
    """Returns `all_fit` where tables may be split: [tasks].

    The largest piece of each task is split repeatedly until first-fit decreasing packs all. A piece
    of w columns takes `fixed + w * column` bytes.

    Args:
        fixed: Bytes of a piece that do not depend on its width, [tasks, tables].
        column: Bytes of each column.
        widths: Number of columns; padded with 0.
        capacities: Bytes of devices, [tasks, devices].
    """
    fits = np.zeros(len(capacities), bool)
    left = np.arange(len(capacities))  # tasks that are neither packed nor infeasible
    for _ in range(_MAX_SPLITS):
        sizes = np.where(widths > 0, fixed + widths * column, 0)
        packed = all_fit(sizes, capacities[left])
        fits[left[packed]] = True
        wide = widths >= 2 * DIM_STEP
        # Splitting increases memory in sum, so a task that exceeds it stays infeasible.
        on = ~packed & wide.any(1) & (sizes.sum(1) <= capacities[left].sum(1))
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
