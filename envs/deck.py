"""`Deck`: the tables that tasks are dealt from, and what the game knows of each. `Deal`: a task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model import CostModel, EstimatedCosts, Prices
from autoshard.cost_model.inputs import bundle_amounts
from autoshard.cost_model.scenarios import Scenarios
from autoshard.workload import EmbeddingTable, OperatorOptions, ShardingTask, UserError
from autoshard.workload.terms import Bundle, Piece, Terms, Truths

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Demands:
    """A task's rules as numbers, for each piece of a deal.

    Args:
        lawful: whether it may lie on each device: [pieces, devices].
        conflicts: which two may not share a device: [pieces, pieces]; None if all may.
        freedom: pieces with less of it come first.
    """

    lawful: Truths
    conflicts: Truths | None
    freedom: Ints

    @staticmethod
    def of(task: ShardingTask, bundles: Sequence[Bundle]) -> "Demands | None":
        """What a task demands of these; None if it has no rules."""
        if not task.rules:
            return None
        terms = Terms(task)
        return Demands(terms.lawful(bundles), terms.conflicts(bundles), terms.freedom(bundles))


@dataclass(frozen=True)
class Deal:
    """A task as numbers: which pieces of the deck, the memory of each device, and the rules."""

    pieces: Ints
    memory_bytes: Ints
    demands: Demands | None = None


class Deck:
    """Tables, column slices or bundles of them, with amounts, costs and sizes, looked up once.

    A deck serves one game: when that learns another cost model, the deck does.

    Args:
        oracle: what tables and devices cost.
        pieces: what may be dealt.
    """

    def __init__(self, oracle: EstimatedCosts, pieces: Sequence[Piece]) -> None:
        if not pieces:
            raise UserError("a game needs at least one table")
        self.pieces = tuple(pieces)
        self.bundles = tuple(Bundle.of(piece) for piece in pieces)
        self.operator: OperatorOptions = oracle.model.provenance.operator
        self.batch_size = oracle.batch_size
        memory = self.operator.memory
        sizes = [memory(piece.slices, self.batch_size).total for piece in self.bundles]
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
        self.amounts: Tensor = bundle_amounts(oracle.amounts, self.bundles)
        self.described: Tensor = oracle.model.compute.described(self.amounts)
        alone = self.price(self.amounts)
        self.alone_ms: Tensor = alone.total_ms
        self.doubt: Tensor = alone.deviation

    def in_scenarios(self, count: int) -> tuple[Scenarios, Tensor]:
        """What prices devices in so many scenarios, and the amounts of all pieces in them."""
        if count not in self._in_scenarios:
            slices = [piece for bundle in self.bundles for piece in bundle.slices]
            tables = {piece.table.access_digest: piece.table for piece in slices}
            scenarios = self._oracle.scenarios(list(tables.values()), count)
            amounts = bundle_amounts(scenarios.amounts, self.bundles)
            self._in_scenarios[count] = scenarios, amounts
        return self._in_scenarios[count]

    def price(self, sums: Tensor) -> Prices:
        """What devices with these sums of amounts cost."""
        return self.model.compute.price(sums)
