"""How rows of a table are numbered that has hot rows, or whose ids are hashed."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import nn

from autoshard.integration.models.bags import HOT_IDS
from autoshard.workload.access.batches import spreading_stride


class RowNumbers(nn.Module):
    """Tells hot from cold rows of a table, and where each is among its like.

    Hot rows are numbered as they are given, cold rows by a hash of their ids, so that neighbours
    are apart from each other. Where there are hot rows, four bytes for each row hold that:
    searching for ids took 4 times as long.

    Args:
        hot_ids: Ids of hot rows.
        rows: Rows of the table.
        first: Number of the first cold row, which differs between tables, so that their most used
            cold rows are not all in the first block.
    """

    ids_of_hot_rows: torch.Tensor
    numbers: torch.Tensor  # those of cold rows, and -1 - number of hot ones

    def __init__(self, hot_ids: torch.Tensor, rows: int, first: int = 0) -> None:
        super().__init__()
        self.hot, self._rows, self._first = len(hot_ids), rows, first
        self._stride = spreading_stride(rows - self.hot)
        self.register_buffer(HOT_IDS, hot_ids.long())  # weights of a checkpoint belong to them
        if not self.hot:
            return
        numbers = torch.ones(rows, dtype=torch.int32)
        numbers[hot_ids] = 0
        cold = numbers.cumsum(0).sub_(1).mul_(self._stride).add_(first)
        numbers = cold.remainder_(rows - self.hot).to(torch.int32)
        numbers[hot_ids] = -1 - torch.arange(self.hot, dtype=torch.int32)
        self.register_buffer("numbers", numbers, persistent=False)

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Refuses a state with other hot rows, in which numbers mean other rows."""
        given = state.get(prefix + HOT_IDS)
        if given is not None and not torch.equal(given.cpu(), self.ids_of_hot_rows.cpu()):
            *_, errors = arguments
            errors.append(f"{prefix}{HOT_IDS}: the state has other hot rows")
            return
        super()._load_from_state_dict(state, prefix, *arguments)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns which of these ids are hot, [ids]; numbers of the hot ones, and of the others."""
        numbers = self.numbers.to(ids.device)[ids].to(ids.dtype)
        hot = numbers < 0
        return hot, -1 - numbers[hot], numbers[~hot]

    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of rows of a table without hot ones."""
        numbers = ids.long() * self._stride + self._first
        return numbers.remainder_(self._rows).to(ids.dtype)

    def order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids of hot rows and of cold rows, each in the order of their numbers."""
        every = torch.arange(self._rows)
        numbers = self.numbers.cpu() if self.hot else self.hashed(every)
        return self.ids_of_hot_rows.cpu(), torch.argsort(numbers)[self.hot :]


def row_numbers(table: str, hot_ids: torch.Tensor, rows: int) -> RowNumbers:
    """Returns the numbers of rows of a table.

    Args:
        table: Name of the table in its collection.
        hot_ids: Ids of hot rows.
        rows: Rows of the table.
    """
    return RowNumbers(hot_ids, rows, crc32(table.encode()))
