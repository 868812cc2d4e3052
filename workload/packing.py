"""Fitting tables into memory, whatever they cost: first fit decreasing."""

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """The room of each size: the largest first, each where it fits first; None if one does not.

    Rooms are tried in their order, the largest first, so that few are left nearly empty.
    """
    free = list(rooms)
    order = sorted(range(len(free)), key=lambda room: -free[room])
    homes = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        for room in order:
            if free[room] >= sizes[number]:
                free[room] -= sizes[number]
                homes[number] = room
                break
        else:
            return None
    return homes
