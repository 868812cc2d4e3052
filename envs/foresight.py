"""Whether the largest pieces to come still find room: what keeps games out of most dead ends."""

import torch
from torch import Tensor

_FORESEEN = 4  # of the largest pieces to come that room is looked for


def room_is_left(
    free: Tensor,
    exists: Tensor,
    size: Tensor,
    largest: Tensor,
    sizes: Tensor,
    to_come: Tensor,
) -> Tensor:
    """Whether the largest pieces to come fit in if the current one goes to a device, each where it
    fits most tightly: [seats, devices].

    Args:
        free: bytes of each device: [seats, devices].
        exists: whether it is there.
        size: bytes of the current piece: [seats].
        largest: bytes of the largest piece that comes after it: [seats].
        sizes: bytes of all pieces: [seats, pieces].
        to_come: which of them come after it.
    """
    fits = torch.ones_like(exists)
    # Each piece takes no more than one of the places for pieces as large as the largest, so where
    # there are enough of these none goes without, wherever it fits most tightly.
    place = largest.clamp_min(1)
    places = (free * exists).div(place[:, None], rounding_mode="floor").sum(1)
    tight = (places - (size / place).ceil() < _FORESEEN).nonzero()[:, 0]
    if not len(tight):
        return fits
    coming = sizes[tight] * to_come[tight]
    foreseen = coming.topk(min(_FORESEEN, coming.shape[1]), dim=1).values
    room = torch.where(exists, free, -1)[tight].double()
    itself = torch.eye(room.shape[1], dtype=torch.float64)
    after = room[:, None] - itself * size[tight, None, None]
    found = torch.ones_like(fits[tight])
    for needed in foreseen[:, :, None, None].unbind(1):
        tightest, where = after.masked_fill(after < needed, torch.inf).min(2, keepdim=True)
        found &= tightest[..., 0].isfinite()
        after = after.scatter_add(2, where, -needed.expand_as(where))
    fits[tight] = found
    return fits
