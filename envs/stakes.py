"""What is at stake in each of many games: their objectives (`workload.objective`) as tensors."""

import numpy as np
import torch
from torch import Tensor

from autoshard.envs.deck import Deal, Deck, Ints, Larger
from autoshard.workload.objective import exchange_ms

WAITS = 3  # forward (with backward, where they are one wait), backward, both all-to-alls


class Stakes:
    """Prices devices of all seats, each by the objective of its own game.

    Args:
        seats: games.
    """

    def __init__(self, seats: int) -> None:
        self.apart = torch.zeros(seats)  # 1 where forward and backward are waits of their own
        self.counted = torch.zeros(seats)  # 1 where all-to-alls count
        self._columns = torch.zeros(seats)  # of all devices together
        self._ranks = torch.ones(seats)
        self._slope_ms = torch.zeros(seats)
        self._latency_ms = torch.zeros(seats)
        self._any_counted = False

    def deal(self, seats: Tensor, deals: list[Deal], deck: Deck) -> None:
        """New games on these seats."""
        told = np.zeros((len(deals), 6), np.float32)
        flat: Ints = np.concatenate([deal.pieces for deal in deals])
        rows = np.repeat(np.arange(len(deals)), [len(deal.pieces) for deal in deals])
        columns = np.bincount(rows, deck.columns.numpy()[flat], len(deals))
        for row, deal in enumerate(deals):
            objective = deal.objective
            larger = deal.larger or Larger(len(deal.memory_bytes), int(columns[row]))
            ranks = larger.ranks
            told[row, :3] = objective.computes_apart, ranks, larger.columns
            if objective.link is not None and objective.counts_exchanges and ranks > 1:
                slope = objective.link.slope_ms(deck.batch_size, ranks)
                told[row, 3:] = 1, slope, objective.link.latency_ms
        apart, ranks_of, every, counted, slopes, latencies = torch.from_numpy(told).unbind(1)
        self.apart[seats], self._ranks[seats], self._columns[seats] = apart, ranks_of, every
        self.counted[seats] = counted
        self._slope_ms[seats], self._latency_ms[seats] = slopes, latencies
        self._any_counted = bool(self.counted.any())

    def exchange_ms(self, columns: Tensor, seats: Tensor | slice = slice(None)) -> Tensor:
        """Both all-to-alls of devices with so many columns: [seats, devices]."""
        if not self._any_counted:
            return torch.zeros_like(columns)
        every, ranks, slope, latency = (
            some[seats][:, None]
            for some in (self._columns, self._ranks, self._slope_ms, self._latency_ms)
        )
        return 2 * exchange_ms(columns, every, ranks, slope, latency)

    def even_exchange_ms(self, seats: Tensor) -> Tensor:
        """Both all-to-alls of a device with as many columns as all have in the mean: [seats]."""
        mean = self._columns[seats] / self._ranks[seats]
        return self.exchange_ms(mean[:, None], seats)[:, 0]

    def waits_ms(
        self, forward: Tensor, backward: Tensor, exchange: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What devices spend before each wait: each [seats, devices]."""
        apart = backward * self.apart[:, None]
        return forward + (backward - apart), apart, exchange
