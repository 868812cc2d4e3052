"""The game: tables are placed one by one, the costliest first. Many games are played at once.

Every face of the game (Gymnasium's single and vector environments, the policy at work) plays this
one. Games of different sizes stand side by side in arrays as wide as the largest; what a smaller
game lacks is masked.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.inputs import Memberships
from autoshard.envs.deck import Deal, Deck, Ints
from autoshard.envs.ruling import Ruling
from autoshard.workload import Shard, UserError

_ABSENT = -1  # memory of a device that a game does not have
_AMPLE = 2**62  # bytes: more than any device has
_FORESEEN = 4  # of the largest tables to come that `safe` looks for room for


class ShardingGame:
    """`seats` games side by side, each with its own task.

    Devices that a game does not have, and those without memory for its next table, are not
    `allowed`. Devices are `safe` for it if after that the largest tables to come still find room.
    A game is `over` when all its tables are placed, or when its next one fits nowhere (or was put
    where it may not be): then it is `stuck`.

    Args:
        deck: the tables of all deals.
        seats: games played at once.
        max_tables: of any deal.
        max_devices: of any deal.
    """

    def __init__(self, deck: Deck, seats: int, max_tables: int, max_devices: int) -> None:
        self.deck = deck
        self.seats, self.max_tables, self.max_devices = seats, max_tables, max_devices
        self.deals: list[Deal | None] = [None] * seats
        amounts, described = deck.amounts.shape[1:], deck.described.shape[1]
        by_device = (seats, max_devices)
        self.order = torch.zeros(seats, max_tables, dtype=torch.int64)
        self.homes = torch.full((seats, max_tables), -1, dtype=torch.int64)
        self.count = torch.zeros(seats, dtype=torch.int64)
        self.placed = torch.zeros(seats, dtype=torch.int64)
        self.current = torch.zeros(seats, dtype=torch.int64)  # the table to be placed next
        self.stuck = torch.zeros(seats, dtype=torch.bool)
        self.exists = torch.zeros(by_device, dtype=torch.bool)
        self.capacity = torch.zeros(by_device, dtype=torch.int64)
        self.free = torch.zeros(by_device, dtype=torch.int64)
        self.devices = torch.ones(seats, dtype=torch.int64)
        self.room = torch.ones(by_device)  # the capacity again, to divide by
        self.mean_room = torch.ones(seats)
        self.sums = torch.zeros(*by_device, *amounts)
        self.content = torch.zeros(*by_device, described)
        self.cost_ms = torch.zeros(by_device)
        self.deviation = torch.zeros(by_device)
        self.joined_ms = torch.zeros(by_device)
        self.joined_deviation = torch.zeros(by_device)
        self.allowed = torch.zeros(by_device, dtype=torch.bool)
        self.safe = torch.zeros(by_device, dtype=torch.bool)
        # Bytes of the tables in their order, and of the largest one that comes after each.
        self._sizes = torch.zeros(seats, max_tables, dtype=torch.float64)
        self._largest_after = torch.zeros(seats, max_tables, dtype=torch.float64)
        self.rest = torch.zeros(seats, described)
        self.rest_ms = torch.zeros(seats)
        self.all_ms = torch.ones(seats)
        self.rest_bytes = torch.zeros(seats, dtype=torch.int64)
        self.even = torch.ones(seats, described)
        self.pace_ms = torch.ones(seats)
        self.bound_ms = torch.ones(seats)
        self._everyone = torch.arange(seats)
        self._places = torch.arange(max_tables)
        self._itself = torch.eye(max_devices)
        self._pairs = torch.zeros(0, 2, dtype=torch.int64)
        self._ruled: dict[int, Ruling] = {}

    @property
    def over(self) -> Tensor:
        """Whether each game has ended: [seats]."""
        return self.stuck | (self.placed == self.count)

    def deal(self, seats: Sequence[int], deals: Sequence[Deal]) -> None:
        """Start new games on these seats."""
        order = np.zeros((len(deals), self.max_tables), np.int64)
        count = np.zeros(len(deals), np.int64)
        capacity = np.full((len(deals), self.max_devices), _ABSENT, np.int64)
        for row, (seat, deal) in enumerate(zip(seats, deals, strict=True)):
            tables, devices = len(deal.pieces), len(deal.memory_bytes)
            if tables > self.max_tables or devices > self.max_devices:
                raise UserError(
                    f"a game of {tables} tables on {devices} devices is larger than the "
                    f"{self.max_tables} tables and {self.max_devices} devices it was made for"
                )
            ranked = self._ranked(deal)
            order[row, :tables] = deal.pieces[ranked]
            self._demand(seat, deal, ranked)
            count[row] = tables
            capacity[row, :devices] = deal.memory_bytes
            self.deals[seat] = deal
        new = torch.tensor(seats, dtype=torch.int64)
        self.order[new] = torch.from_numpy(order)
        self.count[new] = torch.from_numpy(count)
        self.capacity[new] = torch.from_numpy(capacity)
        self.exists[new] = self.capacity[new] != _ABSENT
        self.devices[new] = self.exists[new].sum(1)
        self.room[new] = self.capacity[new].float().clamp_min(1)
        self.mean_room[new] = (self.room[new] * self.exists[new]).sum(1) / self.devices[new]
        self._pairs = self.exists.nonzero()
        self.homes[new] = -1
        self.placed[new] = 0
        self.stuck[new] = False
        self.free[new] = self.capacity[new]
        self._reckon(new)

    def _ranked(self, deal: Deal) -> Ints:
        """Places in the deal: the costliest first; before them what rules leave little room."""
        costs = -self.deck.alone_ms[deal.pieces].numpy()
        if deal.demands is None:
            return np.argsort(costs, kind="stable")
        return np.lexsort((costs, deal.demands.freedom))

    def _demand(self, seat: int, deal: Deal, ranked: Ints) -> None:
        """Hold this game to its rules, or to none. Nothing is kept where no game has any."""
        self._ruled.pop(seat, None)
        if deal.demands is not None:
            self._ruled[seat] = Ruling(deal.demands, ranked)

    def learn(self, oracle: EstimatedCosts) -> None:
        """Believe another cost model from now on, also of what is placed."""
        self.deck.learn(oracle)
        # Another model may have another number of networks.
        self.sums = torch.zeros(*self.free.shape, *self.deck.amounts.shape[1:])
        dealt = [seat for seat, deal in enumerate(self.deals) if deal is not None]
        self._reckon(torch.tensor(dealt, dtype=torch.int64))

    def _reckon(self, seats: Tensor) -> None:
        """Sums and costs of these games, from which table is where."""
        deck, order, homes = self.deck, self.order[seats], self.homes[seats]
        inside = self._places < self.count[seats][:, None]
        coming = inside & (homes < 0)
        alone, sizes = deck.alone_ms[order] * inside, deck.sizes[order] * inside
        self._sizes[seats] = sizes.double()
        coming_sizes = sizes.double().roll(-1, 1)
        coming_sizes[:, -1] = 0
        self._largest_after[seats] = coming_sizes.flip(1).cummax(1).values.flip(1)
        self.all_ms[seats] = alone.sum(1)
        self.rest_ms[seats] = (alone * coming).sum(1)
        self.rest_bytes[seats] = (sizes * coming).sum(1)
        lists = [deal.pieces for deal in (self.deals[seat] for seat in seats.tolist()) if deal]
        totals, devices = Memberships.of(lists).sums(deck.amounts), self.devices[seats]
        work = deck.model.compute.described(totals)
        self.even[seats] = (work / devices[:, None]).clamp_min(1e-9)
        pace, costliest = deck.price(totals / devices[:, None, None]).total_ms, alone.amax(1)
        # Half a table a device is no table to the cost model: then the costliest sets the pace.
        self.pace_ms[seats] = torch.where(pace > 0, pace, costliest)
        self.bound_ms[seats] = torch.maximum(pace, costliest)
        self.sums[seats] = self.sums_of(deck.amounts, seats)
        self.content[seats] = deck.model.compute.described(self.sums[seats])
        self.rest[seats] = work - self.content[seats].sum(1)
        if bool((homes >= 0).any()):
            prices = deck.price(self.sums[seats])
            self.cost_ms[seats], self.deviation[seats] = prices.total_ms, prices.deviation
        else:
            self.cost_ms[seats] = self.deviation[seats] = 0
        self._look_ahead()

    def sums_of(self, amounts: Tensor, seats: Tensor) -> Tensor:
        """Amounts of the deck's pieces [pieces, ...], added up over what each device of these games
        holds: [seats, devices, ...].
        """
        order, homes = self.order[seats], self.homes[seats]
        sums = torch.zeros(len(seats) * self.max_devices, *amounts.shape[1:])
        rows, places = (homes >= 0).nonzero().unbind(1)
        where = rows * self.max_devices + homes[rows, places]
        sums.index_add_(0, where, amounts[order[rows, places]])
        return sums.reshape(len(seats), self.max_devices, *amounts.shape[1:])

    def place(self, devices: Tensor, playing: Tensor | None = None) -> None:
        """Put the current table of each game that is `playing` (by default, not over) on a device.

        `devices` are numbers, one a seat.
        """
        playing = ~self.over if playing is None else playing
        lawful = playing & self.allowed.gather(1, devices[:, None])[:, 0]
        self.stuck |= playing & ~lawful
        seats = lawful.nonzero()[:, 0]
        homes, table = devices[seats], self.current[seats]
        where = seats * self.max_devices + homes
        described, sizes = self.deck.described[table], self.deck.sizes[table]
        self.homes[seats, self.placed[seats]] = homes
        self.sums.flatten(0, 1).index_add_(0, where, self.deck.amounts[table])
        self.content.flatten(0, 1).index_add_(0, where, described)
        self.cost_ms.view(-1)[where] = self.joined_ms.view(-1)[where]
        self.deviation.view(-1)[where] = self.joined_deviation.view(-1)[where]
        self.free.view(-1).index_add_(0, where, sizes, alpha=-1)
        self.rest.index_add_(0, seats, described, alpha=-1)
        self.rest_ms.index_add_(0, seats, self.deck.alone_ms[table], alpha=-1)
        self.rest_bytes.index_add_(0, seats, sizes, alpha=-1)
        self.placed += lawful
        self._look_ahead()

    def _look_ahead(self) -> None:
        """What each device would cost with the current table, and whether it has room for it."""
        next_place = torch.minimum(self.placed, self.count - 1).clamp_min_(0)
        table = self.current = self.order.gather(1, next_place[:, None])[:, 0]
        amounts = self.deck.amounts[table]
        if len(self._pairs) == self.exists.numel():
            joined = self.deck.price(self.sums + amounts[:, None])
            self.joined_ms, self.joined_deviation = joined.total_ms, joined.deviation
        else:  # what does not exist is not priced
            seats, devices = self._pairs.unbind(1)
            joined = self.deck.price(self.sums[seats, devices] + amounts[seats])
            self.joined_ms[seats, devices] = joined.total_ms
            self.joined_deviation[seats, devices] = joined.deviation
        self.allowed = self.exists & (self.free >= self.deck.sizes[table][:, None])
        for seat, ruling in self._ruled.items():
            admitted = ruling.admitted(int(next_place[seat]), self.homes[seat])
            self.allowed[seat, : len(admitted)] &= admitted
        self.stuck |= (self.placed < self.count) & ~self.allowed.any(1)
        self.safe = self.allowed & self._room_is_left(table)

    def _room_is_left(self, table: Tensor) -> Tensor:
        """Whether the largest tables to come fit in if the current one goes there, each where it
        fits most tightly: [seats, devices].
        """
        size = self.deck.sizes[table].double()
        least = self.free.masked_fill(~self.exists, _AMPLE).amin(1)
        largest = self._largest_after[self._everyone, self.placed.clamp_max(self.max_tables - 1)]
        fits = torch.ones_like(self.allowed)
        tight = (least < size + _FORESEEN * largest).nonzero()[:, 0]
        if not len(tight):
            return fits
        to_come = self._sizes[tight] * (self._places > self.placed[tight, None])
        foreseen = to_come.topk(min(_FORESEEN, self.max_tables), dim=1).values
        free = torch.where(self.exists, self.free, -1)[tight].double()
        after = free[:, None] - self._itself * size[tight, None, None]
        found = torch.ones_like(fits[tight])
        for needed in foreseen[:, :, None, None].unbind(1):
            tightest, where = after.masked_fill(after < needed, torch.inf).min(2, keepdim=True)
            found &= tightest[..., 0].isfinite()
            after = after.scatter_add(2, where, -needed.expand_as(where))
        fits[tight] = found
        return fits

    def left_share(self) -> Tensor:
        """Share of each game's tables that are not placed: [seats]."""
        return 1 - self.placed / self.count

    def assignment(self, seat: int) -> Ints:
        """The device of each piece of the deal, in the deal's order; -1 where it has none."""
        deal = self.deals[seat]
        assert deal is not None
        count = len(deal.pieces)
        homes = np.full(len(self.deck.pieces), -1, np.int64)
        homes[self.order[seat, :count].numpy()] = self.homes[seat, :count].numpy()
        return homes[deal.pieces]

    def shards(self, seat: int) -> list[Shard | None]:
        """What each device of a game holds; None for an empty one."""
        deal = self.deals[seat]
        assert deal is not None
        homes = self.assignment(seat)
        held = [deal.pieces[homes == device] for device in range(len(deal.memory_bytes))]
        return [
            Shard(tuple(piece for number in numbers for piece in self.deck.bundles[number].slices))
            if len(numbers)
            else None
            for numbers in held
        ]
