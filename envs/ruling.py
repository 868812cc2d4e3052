"""The rules of one game, in the order in which it places its pieces."""

import torch
from torch import Tensor

from autoshard.envs.deck import Demands, Ints


class Ruling:
    """Says where a piece may go, beside those that are placed.

    Args:
        demands: of a deal.
        order: places of its pieces, in the order of the game.
    """

    def __init__(self, demands: Demands, order: Ints) -> None:
        self._demands, self._order = demands, torch.from_numpy(order)

    def admitted(self, place: int, homes: Tensor) -> Tensor:
        """The devices that the piece at this place may lie on: [devices], true or false.

        Args:
            place: in the order.
            homes: the device of each piece in the order, -1 for those that are still to come.
        """
        piece = int(self._order[place])
        lawful = torch.from_numpy(self._demands.lawful[piece].copy())
        if self._demands.conflicts is not None:
            conflicting = torch.from_numpy(self._demands.conflicts[piece])[self._order]
            others = homes[: len(self._order)][conflicting]
            lawful[others[others >= 0]] = False
        return lawful
