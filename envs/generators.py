"""Who deals: objects that draw tasks from a deck."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autoshard.envs.deck import Deal, Deck, Ints
from autoshard.workload import FieldError
from autoshard.workload.packing import first_fit_decreasing

_LOOSER = 1.05  # factor on all memory until the tables can be packed


class Generator(Protocol):
    """Draws the next task. No task has more than `most_tables` and `most_devices`."""

    @property
    def most_tables(self) -> int:
        """Tables of the largest task."""
        ...

    @property
    def most_devices(self) -> int:
        """Devices of the largest task."""
        ...

    def __call__(self, deck: Deck, rng: np.random.Generator) -> Deal:
        """A task of the deck's tables."""
        ...


@dataclass(frozen=True)
class RandomDeals:
    """Tasks of a random number of random tables on a random number of devices.

    Ranges are inclusive. Every task can be solved: where first fit decreasing finds no packing of
    the tables, all devices get more memory until it does.

    Args:
        num_tables: fewest and most tables.
        num_devices: fewest and most devices.
        fill: loosest and tightest share of all memory that the tables take.
        unevenness: devices' memories are drawn from 1 - unevenness to 1 of the largest.
    """

    num_tables: tuple[int, int] = (60, 60)
    num_devices: tuple[int, int] = (4, 4)
    fill: tuple[float, float] = (0.1, 0.8)
    unevenness: float = 0.0

    def __post_init__(self) -> None:
        for field in ("num_tables", "num_devices"):
            low, high = getattr(self, field)
            if not 1 <= low <= high:
                raise FieldError(field, f"must be from 1 up, the least first, got {low} to {high}")
        if not 0 < self.fill[0] <= self.fill[1] <= 1:
            raise FieldError("fill", f"must lie between 0 and 1, got {self.fill}")
        if not 0 <= self.unevenness < 1:
            raise FieldError("unevenness", f"must lie between 0 and 1, got {self.unevenness}")

    @property
    def most_tables(self) -> int:
        """Tables of the largest task."""
        return self.num_tables[1]

    @property
    def most_devices(self) -> int:
        """Devices of the largest task."""
        return self.num_devices[1]

    def __call__(self, deck: Deck, rng: np.random.Generator) -> Deal:
        """A task of the deck's tables; of all of them if it has fewer than asked for."""
        most = min(self.most_tables, len(deck.pieces))
        count = int(rng.integers(min(self.num_tables[0], most), most + 1))
        tables: Ints = rng.permutation(len(deck.pieces))[:count]
        devices = int(rng.integers(self.num_devices[0], self.num_devices[1] + 1))
        shares = 1 - self.unevenness * rng.random(devices)
        sizes = deck.bytes[tables]
        total = sizes.sum() / rng.uniform(*self.fill)
        memory: Ints = np.ceil(total * shares / shares.sum()).astype(np.int64)
        while first_fit_decreasing(sizes.tolist(), memory.tolist()) is None:
            memory = np.ceil(memory * _LOOSER).astype(np.int64)
        return Deal(tables, memory)
