"""The game: tables are placed one by one, the costliest first, or halved before. Many games are
played at once.

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
from autoshard.envs.deck import BESIDE, Deal, Deck, Ints
from autoshard.envs.devices import DEVIATION, KNOWN, EpisodeDevices
from autoshard.envs.foresight import room_is_left
from autoshard.workload import Shard, TableSlice, UserError
from autoshard.workload.admission import ANY_PARTS, Occupancy
from autoshard.workload.plans import dealt_out

_WORTH = 0.02  # of the pace: what costs less alone evens nothing out that counts
_STRICT = 1e6  # ms: what rules leave little room for comes first, whatever it costs
_SLICES = 0  # of a table: its slices, the most that it may have, and how wide they must be
_ALONE, _DOUBT, _SIZE, _ADDED, _HALF, _WIDTH = range(-BESIDE, 0)  # of the deck's facts


class ShardingGame(EpisodeDevices):
    """`seats` games side by side, each with its own task.

    Devices that a game does not have, and those without memory for its next piece, are not
    `allowed`. Devices are `safe` for it if after that the largest pieces to come still find room.
    A game is `over` when all its pieces are placed, or when its next one fits nowhere and cannot
    be halved (or was put where it may not be): then it is `stuck`.

    Args:
        deck: the tables of all deals.
        seats: games played at once.
        max_tables: of any deal.
        max_devices: of any deal.
        halvings: that a game may make: a piece becomes two by columns, which come back into the
            order by what they cost.
    """

    def __init__(
        self, deck: Deck, seats: int, max_tables: int, max_devices: int, halvings: int = 0
    ) -> None:
        super().__init__(deck, seats, max_devices)
        self.seats, self.max_tables = seats, max_tables
        self.halvings, self.max_pieces = halvings, max_tables + halvings
        self.halve_action = max_devices  # in place of a device
        self.deals: list[Deal | None] = [None] * seats
        amounts, described = deck.amounts.shape[1:], deck.described.shape[1]
        by_device, by_piece = (seats, max_devices), (seats, self.max_pieces)
        self.order = torch.zeros(by_piece, dtype=torch.int64)
        self.homes = torch.full(by_piece, -1, dtype=torch.int64)
        self.origin = torch.zeros(by_piece, dtype=torch.int64)  # in the deal
        self.count = torch.zeros(seats, dtype=torch.int64)
        self.placed = torch.zeros(seats, dtype=torch.int64)
        self.current = torch.zeros(seats, dtype=torch.int64)  # the piece to be placed next
        self.stuck = torch.zeros(seats, dtype=torch.bool)
        self.allowed = torch.zeros(by_device, dtype=torch.bool)
        self.safe = torch.zeros(by_device, dtype=torch.bool)
        self.halvable = torch.zeros(seats, dtype=torch.bool)
        self._tables = torch.ones(seats, max_tables, 3, dtype=torch.int64)
        self._most_pieces = torch.zeros(seats, dtype=torch.int64)
        self._strict = torch.zeros(seats, max_tables, dtype=torch.float64)  # what rules put first
        # Of pieces in their order: bytes, and of the largest that comes after.
        self._sizes, self._largest_after = (
            torch.zeros(by_piece, dtype=torch.float64) for _ in range(2)
        )
        self.rest = torch.zeros(seats, described)
        self.rest_ms = torch.zeros(seats)
        self.all_ms = torch.ones(seats)  # of the tables, each alone
        self.added_ms = torch.zeros(seats)  # by halvings
        self.rest_bytes = torch.zeros(seats, dtype=torch.int64)
        self.even = torch.ones(seats, described)
        self.units = torch.ones(seats, 1, 1, KNOWN)  # relative to which `known` is told
        # The same of the deck's facts, and those of the current piece so.
        self.scale = torch.ones(seats, described + BESIDE)
        self.told = torch.zeros(seats, described + BESIDE)
        # Of the current piece: its place in the order, and what the deck knows of it.
        self._place = torch.zeros(seats, dtype=torch.int64)
        self._amounts, self._facts = torch.zeros(seats, *amounts), torch.zeros_like(self.told)
        self._columns, self._size = torch.zeros(seats), torch.zeros(seats, dtype=torch.int64)
        self.pace_ms = torch.ones(seats)
        self.bound_ms = torch.ones(seats)
        self._everyone = torch.arange(seats)
        self._places = torch.arange(self.max_pieces)
        self._held: dict[int, Occupancy] = {}  # of games with rules

    @property
    def over(self) -> Tensor:
        """Whether each game has ended: [seats]."""
        return self.stuck | (self.placed == self.count)

    @property
    def slices(self) -> Tensor:
        """Of each table: [seats, tables]."""
        return self._tables[..., _SLICES]

    def deal(self, seats: Sequence[int], deals: Sequence[Deal]) -> None:
        """Start new games on these seats."""
        self._start(seats, deals)
        self._look_ahead()

    def _start(self, seats: Sequence[int], deals: Sequence[Deal]) -> None:
        for deal in deals:
            tables, devices = len(deal.pieces), len(deal.memory_bytes)
            if tables > self.max_tables or devices > self.max_devices:
                raise UserError(
                    f"a game of {tables} tables on {devices} devices is larger than the "
                    f"{self.max_tables} tables and {self.max_devices} devices it was made for"
                )
        new = torch.tensor(seats, dtype=torch.int64)
        for seat, deal in zip(seats, deals, strict=True):
            self.deals[seat] = deal
        self.scale[new, _SIZE] = self.begin(new, deals)
        self._line_up(new, deals)
        self.homes[new] = -1
        self.placed[new] = 0
        self.stuck[new] = False
        self._reckon(new)

    def _line_up(self, new: Tensor, deals: Sequence[Deal]) -> None:
        """The costliest first; before them what rules leave little room."""
        rows, width = len(deals), self.max_pieces
        order, origin = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
        strict = np.zeros((rows, self.max_tables))
        most = np.full((rows, self.max_tables), ANY_PARTS)
        least = np.zeros((rows, self.max_tables), np.int64)
        alone = self.deck.alone_ms.numpy()
        for row, (seat, deal) in enumerate(zip(new.tolist(), deals, strict=True)):
            tables = len(deal.pieces)
            self._held.pop(seat, None)  # nothing is kept where no game has rules
            if (masks := deal.masks) is not None:
                free = self.free[seat : seat + 1, : len(deal.memory_bytes)].numpy()
                self._held[seat] = Occupancy(masks, free)  # the game itself keeps what is free
                strict[row, :tables] = _STRICT * masks.freedom(np.arange(tables))
                most[row, :tables] = masks.max_parts[:-1]
                least[row, :tables] = masks.min_width[:-1]
            ranked = np.argsort(strict[row, :tables] - alone[deal.pieces], kind="stable")
            order[row, :tables], origin[row, :tables] = deal.pieces[ranked], ranked
        self.count[new] = torch.tensor([len(deal.pieces) for deal in deals])
        self._most_pieces[new] = self.count[new] + self.halvings
        self.order[new], self.origin[new] = torch.from_numpy(order), torch.from_numpy(origin)
        self._strict[new] = torch.from_numpy(strict)
        most = np.minimum(most, self.devices[new].numpy()[:, None])
        self._tables[new] = torch.from_numpy(np.stack([np.ones_like(most), most, least], axis=2))

    def learn(self, oracle: EstimatedCosts) -> None:
        """Believe another cost model from now on, also of what is placed."""
        self.deck.learn(oracle)
        # Another model may have another number of networks.
        self.sums = torch.zeros(*self.free.shape, *self.deck.amounts.shape[1:])
        dealt = [seat for seat, deal in enumerate(self.deals) if deal is not None]
        self._reckon(torch.tensor(dealt, dtype=torch.int64))
        self._look_ahead()

    def _reckon(self, seats: Tensor) -> None:
        """Sums and costs of these games, from which piece is where."""
        deck, order, homes = self.deck, self.order[seats], self.homes[seats]
        inside = self._places < self.count[seats][:, None]
        coming = inside & (homes < 0)
        alone = deck.alone_ms[order] * inside
        self.rest_ms[seats] = (alone * coming).sum(1)
        self.rest_bytes[seats] = (deck.sizes[order] * coming).sum(1)
        self._look_far(seats)
        dealt = [deal for deal in (self.deals[seat] for seat in seats.tolist()) if deal]
        lists = [deal.pieces for deal in dealt]
        tables, devices = Memberships.of(lists), self.devices[seats]
        totals, work = tables.sums(deck.amounts), tables.sums(deck.described)
        self.all_ms[seats] = tables.sums(deck.alone_ms[:, None])[:, 0]
        self.added_ms[seats] = alone.sum(1) - self.all_ms[seats]
        self.even[seats] = (work / devices[:, None]).clamp_min(1e-9)
        pace = deck.price(totals / devices[:, None, None]).total_ms
        least, costliest = (tables.highest(some) for some in (deck.least_ms, deck.alone_ms))
        exchange = self.even_exchange_ms(seats)
        # Half a table a device is no table to the cost model: then the costliest sets the pace.
        self.pace_ms[seats] = torch.where(pace > 0, pace, costliest) + exchange
        self.scale[seats, :-BESIDE] = self.even[seats]
        self.scale[seats[:, None], [_ALONE, _ADDED, _HALF]] = self.pace_ms[seats, None]
        self.units[seats, ..., :DEVIATION] = self.pace_ms[seats, None, None, None]
        least = least if self.halvings else costliest
        self.bound_ms[seats] = torch.maximum(pace, least) + exchange
        self.sums[seats] = self.sums_of(deck.amounts, seats)
        self.content[seats] = deck.model.compute.described(self.sums[seats])
        self.columns[seats] = self.sums_of(deck.columns[:, None], seats)[..., 0]
        self.rest[seats] = deck.described[order].mul(coming[..., None]).sum(1)
        self.price_anew(seats)

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

    def place(
        self,
        actions: Tensor,
        playing: Tensor | None = None,
        joining: Sequence[int] = (),
        deals: Sequence[Deal] = (),
    ) -> None:
        """Put the current piece of each game that is `playing` (by default, not over) on a device,
        by its number, or halve it (`halve_action`). On seats that are `joining`, which do not play,
        new games start.
        """
        playing = ~self.over if playing is None else playing
        if joining:
            self._start(joining, deals)
        halving = playing & (actions == self.halve_action)
        devices = actions.clamp_max(self.max_devices - 1)
        lawful = playing & self.allowed.gather(1, devices[:, None])[:, 0] & ~halving
        cut = halving & self.halvable
        self.stuck |= playing & ~lawful & ~cut
        # Mostly all of them: then nothing need be picked.
        some = slice(None) if bool(lawful.all()) else lawful.nonzero()[:, 0]
        seats, homes, place = self._everyone[some], devices[some], self._place[some]
        where = seats * self.max_devices + homes
        facts, sizes = self._facts[some], self._size[some]
        described = facts[:, :-BESIDE]
        self.homes[seats, place] = homes
        self.settle(where, self._amounts[some], described, self._columns[some], sizes)
        self.rest.index_add_(0, seats, described, alpha=-1)
        self.rest_ms.index_add_(0, seats, facts[:, _ALONE], alpha=-1)
        self.rest_bytes.index_add_(0, seats, sizes, alpha=-1)
        self.placed += lawful
        for seat, held in self._held.items():
            if lawful[seat]:
                held.settle(int(self.origin[seat, self._place[seat]]), int(devices[seat]))
        if bool(cut.any()):
            self._halve(cut.nonzero()[:, 0])
        self._look_ahead()

    def _halve(self, seats: Tensor) -> None:
        """The current pieces of these games become two, which find their places in the order."""
        deck, piece, place = self.deck, self.current[seats], self.placed[seats]
        first, second = deck.halves[piece].unbind(1)
        alone, described, sizes = deck.alone_ms, deck.described, deck.sizes
        added = alone[first] + alone[second] - alone[piece]
        self.rest[seats] += described[first] + described[second] - described[piece]
        self.rest_ms[seats] += added
        self.added_ms[seats] += added
        self.rest_bytes[seats] += sizes[first] + sizes[second] - sizes[piece]
        origin = self.origin[seats, place]
        for half, where in ((first, place), (second, self.count[seats])):
            self.order[seats, where], self.origin[seats, where] = half, origin
        self.count[seats] += 1
        self._tables[seats, origin, _SLICES] += 1
        order, origins = self.order[seats], self.origin[seats]
        keys = self._strict[seats].gather(1, origins) - alone[order]
        keys.masked_fill_(self._places < place[:, None], -torch.inf)
        keys.masked_fill_(self._places >= self.count[seats][:, None], torch.inf)
        ranked = keys.argsort(dim=1, stable=True)
        self.order[seats], self.origin[seats] = order.gather(1, ranked), origins.gather(1, ranked)
        self._look_far(seats)

    def _look_far(self, seats: Tensor) -> None:
        """The bytes of each piece, and of the largest that comes after it."""
        inside = self._places < self.count[seats][:, None]
        sizes = (self.deck.sizes[self.order[seats]] * inside).double()
        self._sizes[seats] = sizes
        largest = sizes.flip(1).cummax(1).values.flip(1)
        self._largest_after[seats, :-1] = largest[:, 1:]

    def _look_ahead(self) -> None:
        """What each device would cost with the current piece, whether it has room for it, and
        whether it may be halved.
        """
        deck = self.deck
        place = self._place = torch.minimum(self.placed, self.count - 1).clamp_min_(0)
        piece = self.current = self.order.gather(1, place[:, None])[:, 0]
        amounts, self._facts = deck.amounts[piece], deck.facts[piece]
        self._amounts, self._columns = amounts, deck.columns[piece]
        self._size, self.told = deck.sizes[piece], self._facts / self.scale
        self.look(amounts, self._columns, self._size)
        self.allowed = self.exists & (self.left_after >= 0)
        for seat, held in self._held.items():
            unit, size = self.origin[seat, place[seat]], self._size[seat]
            (admitted,) = held.admits(unit[None].numpy(), size[None].numpy())
            self.allowed[seat, : len(admitted)] &= torch.from_numpy(admitted)
        largest = self._largest_after.gather(1, self.placed[:, None].clamp_max(self.max_pieces - 1))
        self.safe = self.allowed & room_is_left(
            self.free, self._size, largest[:, 0], self._sizes, self.placed
        )
        self.halvable = self._may_halve()
        fits_nowhere = ~(self.allowed.any(1) | self.halvable)
        self.stuck |= (self.placed < self.count) & fits_nowhere

    def _may_halve(self) -> Tensor:
        """Whether the current piece may be halved: where it can be, the rules and the game have
        room for one more, and it is costly enough or lies badly whole: [seats].
        """
        narrow = self.deck.narrow[self.current]
        origin = self.origin.gather(1, self._place[:, None])[:, 0]
        slices, most, least = self._tables[self._everyone, origin].unbind(1)
        possible = (narrow > 0) & (self.count < self._most_pieces) & (slices < most)
        worth = (self.told[:, _ALONE] >= _WORTH) | ~self.safe.any(1)
        return possible & worth & (narrow >= least)

    def left_share(self) -> Tensor:
        """Share of each game's pieces that are not placed: [seats]."""
        return 1 - self.placed / self.count

    def assignment(self, seat: int) -> Ints:
        """The device of each piece of the deal that is placed whole, in the deal's order; else
        -1.
        """
        deal = self.deals[seat]
        assert deal is not None
        homes = np.full(len(deal.pieces), -1, np.int64)
        count = int(self.count[seat])
        origin = self.origin[seat, :count].numpy()
        whole = (self.slices[seat].numpy()[origin] == 1).nonzero()[0]
        homes[origin[whole]] = self.homes[seat, :count].numpy()[whole]
        return homes

    def placed_slices(self, seat: int) -> list[tuple[TableSlice, int]]:
        """Each slice that lies on a device, and which. Slices of equal width of one table are told
        alike, wherever they begin.
        """
        count = int(self.count[seat])
        order, homes = self.order[seat, :count].tolist(), self.homes[seat, :count].tolist()
        return [
            (piece, home)
            for number, home in zip(order, homes, strict=True)
            if home >= 0
            for piece in self.deck.bundles[number].slices
        ]

    def shards(self, seat: int) -> list[Shard | None]:
        """What each device of a game holds; None for an empty one."""
        deal = self.deals[seat]
        assert deal is not None
        held: list[list[TableSlice]] = [[] for _ in deal.memory_bytes]
        for piece, device in dealt_out(self.placed_slices(seat)):
            held[device].append(piece)
        return [Shard(tuple(slices)) if slices else None for slices in held]
