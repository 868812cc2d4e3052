"""The rules of one game: where a piece may go, beside those that are placed."""

import torch
from torch import Tensor

from autoshard.envs.deck import Demands


class Ruling:
    """Says where a piece may go.

    Args:
        demands: of a deal.
    """

    def __init__(self, demands: Demands) -> None:
        self._lawful = torch.from_numpy(demands.lawful)
        conflicts = demands.conflicts
        self._conflicts = None if conflicts is None else torch.from_numpy(conflicts)

    def admitted(self, table: int, homes: Tensor, tables: Tensor) -> Tensor:
        """The devices that a piece of this table may lie on: [devices], true or false.

        Args:
            table: its number in the deal.
            homes: the device of each piece, -1 for those that are still to come.
            tables: which table each is of.
        """
        lawful = self._lawful[table].clone()
        if self._conflicts is not None:
            others = homes[self._conflicts[table][tables] & (homes >= 0)]
            lawful[others] = False
        return lawful
