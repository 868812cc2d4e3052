"""What is known of devices while a game is played: one array, and its parts by name."""

import torch
from torch import Tensor

WAITS = 3  # stages: forward (with backward, where they are one), backward, both all-to-alls
KNOWN = WAITS + 2  # of a device: what it spends before each wait, in all, and how uncertain that is
COST, DEVIATION = WAITS, WAITS + 1


class KnownDevices:
    """Of each device of each seat what is `KNOWN`, as it is and with the current piece.

    Args:
        seats: games side by side.
        max_devices: of any.
    """

    def __init__(self, seats: int, max_devices: int) -> None:
        self.known = torch.zeros(seats, max_devices, 2, KNOWN)

    @property
    def waits_ms(self) -> Tensor:
        """What each device spends before each wait: [seats, devices, WAITS]."""
        return self.known[:, :, 0, :WAITS]

    @property
    def joined_waits_ms(self) -> Tensor:
        """The same with the current piece."""
        return self.known[:, :, 1, :WAITS]

    @property
    def cost_ms(self) -> Tensor:
        """What each device spends in all: [seats, devices]."""
        return self.known[:, :, 0, COST]

    @property
    def joined_ms(self) -> Tensor:
        """The same with the current piece."""
        return self.known[:, :, 1, COST]

    @property
    def deviation(self) -> Tensor:
        """How uncertain that is, as a share: [seats, devices]."""
        return self.known[:, :, 0, DEVIATION]

    @property
    def joined_deviation(self) -> Tensor:
        """The same with the current piece."""
        return self.known[:, :, 1, DEVIATION]

    @property
    def plan_ms(self) -> Tensor:
        """What a step takes by each game's objective, as far as its plan goes: [seats]."""
        return self.waits_ms.amax(1).sum(1)
