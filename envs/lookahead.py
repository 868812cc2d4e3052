"""Whether the largest units to come still find room: what keeps games out of most dead ends."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]

_FORESEEN = 4  # of the largest units to come that room is looked for


def room_is_left(
    free: Tensor, size: Tensor, largest: Tensor, sizes: Tensor, placed: Tensor
) -> Tensor:
    """Whether the largest units to come fit in if the current one goes to a device, each where it
    fits most tightly: [seats, devices].

    Args:
        free: bytes of each device, less than 0 where there is none: [seats, devices].
        size: bytes of the current unit: [seats].
        largest: bytes of the largest unit that comes after it: [seats].
        sizes: bytes of all units in their order: [seats, units].
        placed: units that come before the current one: [seats].
    """
    fits = torch.ones(free.shape, dtype=torch.bool)
    # Each unit takes no more than one of the places for units as large as the largest, so where
    # there are enough of these none goes without, wherever it fits most tightly.
    place, room = largest.clamp_min(1), free.double()
    places = (room.clamp_min(0) / place[:, None]).floor_().sum(1)
    tight = (places - (size / place).ceil_() < _FORESEEN).nonzero()[:, 0].numpy()
    if len(tight):
        to_come = np.arange(sizes.shape[1]) > placed.numpy()[tight, None]
        coming = np.where(to_come, sizes.numpy()[tight], 0.0)
        fits.numpy()[tight] = _all_fit(room.numpy()[tight], size.numpy()[tight], coming)
    return fits


def _all_fit(room: Floats, size: Floats, coming: Floats) -> npt.NDArray[np.bool_]:
    """The same [games, devices]. Mostly of few games, for which numpy is quicker than torch."""
    rows, devices = np.arange(len(room))[:, None], np.arange(room.shape[1])
    after = np.repeat(room[:, None], room.shape[1], axis=1)
    after[:, devices, devices] -= size[:, None]
    found = np.ones(room.shape, np.bool_)
    for needed in np.sort(coming, axis=1)[:, : -_FORESEEN - 1 : -1].T[:, :, None]:
        free = np.where(after < needed[..., None], np.inf, after)
        tightest = free.argmin(2)
        found &= free[rows, devices, tightest] < np.inf
        after[rows, devices, tightest] -= needed
    return found
