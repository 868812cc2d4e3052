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
        self._lawful = torch.from_numpy(demands.lawful[order])
        groups, kin = demands.groups[order], demands.kin[order]
        shared = groups.astype(float) @ groups.T.astype(float) > 0
        self._conflicts = torch.from_numpy(shared & (kin[:, None] != kin[None]))

    def admitted(self, place: int, homes: Tensor) -> Tensor:
        """The devices that the piece at this place may lie on: [devices], true or false.

        Args:
            place: in the order.
            homes: the device of each piece in the order, -1 for those that are still to come.
        """
        lawful = self._lawful[place].clone()
        others = homes[: len(self._conflicts)][self._conflicts[place]]
        lawful[others[others >= 0]] = False
        return lawful
