"""`Deck`: the tables that tasks are dealt from, and what the game knows of each. `Deal`: a task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model import CostModel, EstimatedCosts, Prices
from autoshard.cost_model.scenarios import Scenarios
from autoshard.workload import EmbeddingTable, OperatorOptions, TableSlice, UserError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Deal:
    """A task as numbers: which pieces of the deck, and the memory of each device."""

    pieces: Ints
    memory_bytes: Ints


class Deck:
    """Tables, or column slices of them, with their amounts, costs and sizes, looked up once.

    A deck serves one game: when that learns another cost model, the deck does.

    Args:
        oracle: what tables and devices cost.
        pieces: what may be dealt.
    """

    def __init__(self, oracle: EstimatedCosts, pieces: Sequence[TableSlice]) -> None:
        if not pieces:
            raise UserError("a game needs at least one table")
        self.pieces = tuple(pieces)
        self.operator: OperatorOptions = oracle.model.provenance.operator
        self.batch_size = oracle.batch_size
        memory = self.operator.memory
        sizes = [memory((piece,), self.batch_size).total for piece in pieces]
        self.bytes: Ints = np.array(sizes, np.int64)
        self.sizes = torch.from_numpy(self.bytes)
        self.learn(oracle)

    @staticmethod
    def of_tables(model: CostModel, tables: Sequence[EmbeddingTable], batch_size: int) -> "Deck":
        """A deck of whole tables."""
        return Deck(EstimatedCosts(model, batch_size), [table.whole() for table in tables])

    def learn(self, oracle: EstimatedCosts) -> None:
        """Believe another cost model from now on; called by the game."""
        self.model = oracle.model
        self._oracle = oracle
        self._in_scenarios: dict[int, tuple[Scenarios, Tensor]] = {}
        self.amounts: Tensor = oracle.amounts(self.pieces)
        self.described: Tensor = oracle.model.compute.described(self.amounts)
        alone = self.price(self.amounts)
        self.alone_ms: Tensor = alone.total_ms
        self.doubt: Tensor = alone.deviation

    def in_scenarios(self, count: int) -> tuple[Scenarios, Tensor]:
        """What prices devices in so many scenarios, and the amounts of all pieces in them."""
        if count not in self._in_scenarios:
            tables = {piece.table.access_digest: piece.table for piece in self.pieces}
            scenarios = self._oracle.scenarios(list(tables.values()), count)
            self._in_scenarios[count] = scenarios, scenarios.amounts(self.pieces)
        return self._in_scenarios[count]

    def price(self, sums: Tensor) -> Prices:
        """What devices with these sums of amounts cost."""
        return self.model.compute.price(sums)
