"""`Deck`: the tables that tasks are dealt from, and what the game knows of each. `Deal`: a task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cost_model import CostModel, EstimatedCosts, Prices
from workload import Device, EmbeddingTable, OperatorOptions, ShardingTask, UserError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Deal:
    """A task as numbers: which tables of the deck, and the memory of each device."""

    tables: Ints
    memory_bytes: Ints


class Deck:
    """Tables with their amounts, costs and sizes, looked up once.

    Args:
        model: what tables and devices cost.
        tables: with unique names.
        batch_size: samples in a batch.
    """

    def __init__(
        self, model: CostModel, tables: Sequence[EmbeddingTable], batch_size: int
    ) -> None:
        if not tables:
            raise UserError("a game needs at least one table")
        self.tables = tuple(tables)
        self.batch_size = batch_size
        self.operator: OperatorOptions = model.provenance.operator
        sizes = [self.operator.stored_bytes(table.rows, table.dim) for table in self.tables]
        self.bytes: Ints = np.array(sizes, np.int64)
        self.sizes = torch.from_numpy(self.bytes)
        self.learn(model)

    @staticmethod
    def of_task(oracle: EstimatedCosts, task: ShardingTask) -> "tuple[Deck, Deal]":
        """The deck of one task's tables, and the deal that is this task."""
        oracle.check(task)
        deck = Deck(oracle.model, task.tables, task.batch_size)
        memory = np.array([device.memory_bytes for device in task.devices], np.int64)
        return deck, Deal(np.arange(len(task.tables)), memory)

    def learn(self, model: CostModel) -> None:
        """Believe another cost model from now on; games go on with their next deals."""
        self.model = model
        oracle = EstimatedCosts(model, self.batch_size)
        self.amounts: Tensor = oracle.amounts([table.whole() for table in self.tables])
        self.described: Tensor = model.compute.described(self.amounts)
        alone = self.price(self.amounts)
        self.alone_ms: Tensor = alone.total_ms
        self.doubt: Tensor = alone.deviation

    def price(self, sums: Tensor) -> Prices:
        """What devices with these sums of amounts cost."""
        return self.model.compute.price(sums)

    def task(self, deal: Deal) -> ShardingTask:
        """The task that was dealt."""
        return ShardingTask(
            tuple(self.tables[number] for number in deal.tables),
            tuple(
                Device(f"device{number}", int(memory))
                for number, memory in enumerate(deal.memory_bytes)
            ),
            self.batch_size,
            self.operator,
        )
