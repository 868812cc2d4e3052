"""Feasibility lookahead: whether the largest remaining units still fit after an action."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.workload.arrays import Floats

_LOOKAHEAD = 4  # largest remaining units that are packed


def largest_units_fit(
    free: Tensor, size: Tensor, largest: Tensor, sizes: Tensor, placed: Tensor
) -> Tensor:
    """Returns whether best fit packs the largest remaining units once a device takes the current
    one: [envs, devices].

    Args:
        free: Free memory of each device in bytes, less than 0 where there is none: [envs, devices].
        size: Memory of the current unit in bytes, [envs].
        largest: Memory of the largest unit that comes after it, [envs].
        sizes: Memory of all units in their order, [envs, units].
        placed: Number of units before the current one, [envs].
    """
    fits = torch.ones(free.shape, dtype=torch.bool)
    # Each unit takes at most one slot of the size of the largest unit. Where there are enough of
    # these slots, every unit finds one, and nothing need be packed.
    slot, memory = largest.clamp_min(1), free.double()
    slots = (memory.clamp_min(0) / slot[:, None]).floor_().sum(1)
    tight = (slots - (size / slot).ceil_() < _LOOKAHEAD).nonzero()[:, 0].numpy()
    if len(tight):
        remaining = np.arange(sizes.shape[1]) > placed.numpy()[tight, None]
        remaining_sizes = np.where(remaining, sizes.numpy()[tight], 0.0)
        fits.numpy()[tight] = _best_fit(memory.numpy()[tight], size.numpy()[tight], remaining_sizes)
    return fits


def _best_fit(memory: Floats, size: Floats, remaining: Floats) -> npt.NDArray[np.bool_]:
    # In numpy, which is faster than torch for the few episodes that get here.
    rows, devices = np.arange(len(memory))[:, None], np.arange(memory.shape[1])
    after = np.repeat(memory[:, None], memory.shape[1], axis=1)
    after[:, devices, devices] -= size[:, None]
    found = np.ones(memory.shape, np.bool_)
    for needed in np.sort(remaining, axis=1)[:, : -_LOOKAHEAD - 1 : -1].T[:, :, None]:
        free = np.where(after < needed[..., None], np.inf, after)
        tightest = free.argmin(2)
        found &= free[rows, devices, tightest] < np.inf
        after[rows, devices, tightest] -= needed
    return found
