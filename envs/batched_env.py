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
from autoshard.envs.catalog import BESIDE, Ints, TableCatalog, TaskInstance
from autoshard.envs.devices import DEVIATION, KNOWN, EpisodeDevices
from autoshard.envs.lookahead import room_is_left
from autoshard.workload import Piece, Shard, UserError
from autoshard.workload.admission import ANY_PARTS, Occupancy
from autoshard.workload.plans import merged_by_device

_WORTH = 0.02  # of the pace: what costs less alone evens nothing out that counts
_STRICT = 1e6  # ms: what rules leave little room for comes first, whatever it costs
_PARTS = 0  # of a table: its slices, the most that it may have, and how wide they must be
_ALONE, _DOUBT, _SIZE, _ADDED, _HALF, _WIDTH = range(-BESIDE, 0)  # of the deck's facts


class BatchedPlacementEnv(EpisodeDevices):
    """`num_envs` games side by side, each with its own task.

    Devices that a game does not have, and those without memory for its next unit, are not
    `allowed`. Devices are `safe` for it if after that the largest units to come still find room.
    A game is `over` when all its units are placed, or when its next one fits nowhere and cannot
    be halved (or was put where it may not be): then it is `stuck`.

    Args:
        deck: the tables of all deals.
        num_envs: games played at once.
        max_tables: of any deal.
        max_devices: of any deal.
        halvings: that a game may make: a unit becomes two by columns, which come back into the
            order by what they cost.
    """

    def __init__(
        self,
        catalog: TableCatalog,
        num_envs: int,
        max_tables: int,
        max_devices: int,
        max_splits: int = 0,
    ) -> None:
        super().__init__(catalog, num_envs, max_devices)
        self.num_envs, self.max_tables = num_envs, max_tables
        self.max_splits, self.max_pieces = max_splits, max_tables + max_splits
        self.split_action = max_devices  # in place of a device
        self.instances: list[TaskInstance | None] = [None] * num_envs
        amounts, described = catalog.amounts.shape[1:], catalog.described.shape[1]
        by_device, by_piece = (num_envs, max_devices), (num_envs, self.max_pieces)
        self.order = torch.zeros(by_piece, dtype=torch.int64)
        self.homes = torch.full(by_piece, -1, dtype=torch.int64)
        self.origin = torch.zeros(by_piece, dtype=torch.int64)  # in the deal
        self.count = torch.zeros(num_envs, dtype=torch.int64)
        self.placed = torch.zeros(num_envs, dtype=torch.int64)
        self.current = torch.zeros(num_envs, dtype=torch.int64)  # the unit to be placed next
        self.infeasible = torch.zeros(num_envs, dtype=torch.bool)
        self.allowed = torch.zeros(by_device, dtype=torch.bool)
        self.safe = torch.zeros(by_device, dtype=torch.bool)
        self.splittable = torch.zeros(num_envs, dtype=torch.bool)
        self._tables = torch.ones(num_envs, max_tables, 3, dtype=torch.int64)
        self._piece_limit = torch.zeros(num_envs, dtype=torch.int64)
        self._strict = torch.zeros(
            num_envs, max_tables, dtype=torch.float64
        )  # what rules put first
        # Of units in their order: bytes, and of the largest that comes after.
        self._sizes, self._largest_after = (
            torch.zeros(by_piece, dtype=torch.float64) for _ in range(2)
        )
        self.rest = torch.zeros(num_envs, described)
        self.rest_ms = torch.zeros(num_envs)
        self.all_ms = torch.ones(num_envs)  # of the tables, each alone
        self.added_ms = torch.zeros(num_envs)  # by halvings
        self.rest_bytes = torch.zeros(num_envs, dtype=torch.int64)
        self.even = torch.ones(num_envs, described)
        self.known_scale = torch.ones(num_envs, 1, 1, KNOWN)  # relative to which `known` is told
        # The same of the deck's facts, and those of the current unit so.
        self.scale = torch.ones(num_envs, described + BESIDE)
        self.told = torch.zeros(num_envs, described + BESIDE)
        # Of the current unit: its place in the order, and what the deck knows of it.
        self._place = torch.zeros(num_envs, dtype=torch.int64)
        self._amounts, self._facts = torch.zeros(num_envs, *amounts), torch.zeros_like(self.told)
        self._columns, self._size = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.int64)
        self.even_split_ms = torch.ones(num_envs)
        self.lower_bound_ms = torch.ones(num_envs)
        self._everyone = torch.arange(num_envs)
        self._places = torch.arange(self.max_pieces)
        self._held: dict[int, Occupancy] = {}  # of games with rules

    @property
    def over(self) -> Tensor:
        """Whether each game has ended: [seats]."""
        return self.infeasible | (self.placed == self.count)

    @property
    def parts(self) -> Tensor:
        """Of each table: [seats, tables]."""
        return self._tables[..., _PARTS]

    def start(self, env_ids: Sequence[int], instances: Sequence[TaskInstance]) -> None:
        """Start new games on these seats."""
        self._begin_episodes(env_ids, instances)
        self._look_ahead()

    def _begin_episodes(self, env_ids: Sequence[int], instances: Sequence[TaskInstance]) -> None:
        for instance in instances:
            tables, devices = len(instance.units), len(instance.memory_bytes)
            if tables > self.max_tables or devices > self.max_devices:
                raise UserError(
                    f"a game of {tables} tables on {devices} devices is larger than the "
                    f"{self.max_tables} tables and {self.max_devices} devices it was made for"
                )
        new = torch.tensor(env_ids, dtype=torch.int64)
        for env_id, instance in zip(env_ids, instances, strict=True):
            self.instances[env_id] = instance
        self.scale[new, _SIZE] = self.begin(new, instances)
        self._line_up(new, instances)
        self.homes[new] = -1
        self.placed[new] = 0
        self.infeasible[new] = False
        self._reckon(new)

    def _line_up(self, new: Tensor, instances: Sequence[TaskInstance]) -> None:
        """The costliest first; before them what rules leave little room."""
        rows, width = len(instances), self.max_pieces
        order, origin = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
        strict = np.zeros((rows, self.max_tables))
        most = np.full((rows, self.max_tables), ANY_PARTS)
        least = np.zeros((rows, self.max_tables), np.int64)
        alone = self.catalog.alone_ms.numpy()
        for row, (env_id, instance) in enumerate(zip(new.tolist(), instances, strict=True)):
            tables = len(instance.units)
            self._held.pop(env_id, None)  # nothing is kept where no game has rules
            if (masks := instance.masks) is not None:
                free = self.free[env_id : env_id + 1, : len(instance.memory_bytes)].numpy()
                self._held[env_id] = Occupancy(masks, free)  # the game itself keeps what is free
                strict[row, :tables] = _STRICT * masks.freedom(np.arange(tables))
                most[row, :tables] = masks.max_parts[:-1]
                least[row, :tables] = masks.min_width[:-1]
            ranked = np.argsort(strict[row, :tables] - alone[instance.units], kind="stable")
            order[row, :tables], origin[row, :tables] = instance.units[ranked], ranked
        self.count[new] = torch.tensor([len(instance.units) for instance in instances])
        self._piece_limit[new] = self.count[new] + self.max_splits
        self.order[new], self.origin[new] = torch.from_numpy(order), torch.from_numpy(origin)
        self._strict[new] = torch.from_numpy(strict)
        most = np.minimum(most, self.devices[new].numpy()[:, None])
        self._tables[new] = torch.from_numpy(np.stack([np.ones_like(most), most, least], axis=2))

    def learn(self, oracle: EstimatedCosts) -> None:
        """Believe another cost model from now on, also of what is placed."""
        self.catalog.learn(oracle)
        # Another model may have another number of networks.
        self.sums = torch.zeros(*self.free.shape, *self.catalog.amounts.shape[1:])
        dealt = [env_id for env_id, instance in enumerate(self.instances) if instance is not None]
        self._reckon(torch.tensor(dealt, dtype=torch.int64))
        self._look_ahead()

    def _reckon(self, env_ids: Tensor) -> None:
        """Sums and costs of these games, from which unit is where."""
        catalog, order, homes = self.catalog, self.order[env_ids], self.homes[env_ids]
        inside = self._places < self.count[env_ids][:, None]
        coming = inside & (homes < 0)
        alone = catalog.alone_ms[order] * inside
        self.rest_ms[env_ids] = (alone * coming).sum(1)
        self.rest_bytes[env_ids] = (catalog.sizes[order] * coming).sum(1)
        self._look_far(env_ids)
        dealt = [
            instance
            for instance in (self.instances[env_id] for env_id in env_ids.tolist())
            if instance
        ]
        lists = [instance.units for instance in dealt]
        tables, devices = Memberships.of(lists), self.devices[env_ids]
        totals, work = tables.sums(catalog.amounts), tables.sums(catalog.described)
        self.all_ms[env_ids] = tables.sums(catalog.alone_ms[:, None])[:, 0]
        self.added_ms[env_ids] = alone.sum(1) - self.all_ms[env_ids]
        self.even[env_ids] = (work / devices[:, None]).clamp_min(1e-9)
        pace = catalog.price(totals / devices[:, None, None]).total_ms
        least, costliest = (
            tables.highest(some) for some in (catalog.narrowest_ms, catalog.alone_ms)
        )
        exchange = self.even_exchange_ms(env_ids)
        # Half a table a device is no table to the cost model: then the costliest sets the pace.
        self.even_split_ms[env_ids] = torch.where(pace > 0, pace, costliest) + exchange
        self.scale[env_ids, :-BESIDE] = self.even[env_ids]
        self.scale[env_ids[:, None], [_ALONE, _ADDED, _HALF]] = self.even_split_ms[env_ids, None]
        self.known_scale[env_ids, ..., :DEVIATION] = self.even_split_ms[env_ids, None, None, None]
        least = least if self.max_splits else costliest
        self.lower_bound_ms[env_ids] = torch.maximum(pace, least) + exchange
        self.sums[env_ids] = self.sums_of(catalog.amounts, env_ids)
        self.content[env_ids] = catalog.model.compute.described(self.sums[env_ids])
        self.columns[env_ids] = self.sums_of(catalog.columns[:, None], env_ids)[..., 0]
        self.rest[env_ids] = catalog.described[order].mul(coming[..., None]).sum(1)
        self.price_anew(env_ids)

    def sums_of(self, amounts: Tensor, env_ids: Tensor) -> Tensor:
        """Amounts of the deck's units [units, ...], added up over what each device of these games
        holds: [seats, devices, ...].
        """
        order, homes = self.order[env_ids], self.homes[env_ids]
        sums = torch.zeros(len(env_ids) * self.max_devices, *amounts.shape[1:])
        rows, places = (homes >= 0).nonzero().unbind(1)
        where = rows * self.max_devices + homes[rows, places]
        sums.index_add_(0, where, amounts[order[rows, places]])
        return sums.reshape(len(env_ids), self.max_devices, *amounts.shape[1:])

    def place(
        self,
        actions: Tensor,
        playing: Tensor | None = None,
        joining: Sequence[int] = (),
        instances: Sequence[TaskInstance] = (),
    ) -> None:
        """Put the current unit of each game that is `playing` (by default, not over) on a device,
        by its number, or halve it (`halve_action`). On seats that are `joining`, which do not play,
        new games start.
        """
        playing = ~self.over if playing is None else playing
        if joining:
            self._begin_episodes(joining, instances)
        splitting = playing & (actions == self.split_action)
        devices = actions.clamp_max(self.max_devices - 1)
        lawful = playing & self.allowed.gather(1, devices[:, None])[:, 0] & ~splitting
        cut = splitting & self.splittable
        self.infeasible |= playing & ~lawful & ~cut
        # Mostly all of them: then nothing need be picked.
        some = slice(None) if bool(lawful.all()) else lawful.nonzero()[:, 0]
        env_ids, homes, place = self._everyone[some], devices[some], self._place[some]
        where = env_ids * self.max_devices + homes
        facts, sizes = self._facts[some], self._size[some]
        described = facts[:, :-BESIDE]
        self.homes[env_ids, place] = homes
        self.settle(where, self._amounts[some], described, self._columns[some], sizes)
        self.rest.index_add_(0, env_ids, described, alpha=-1)
        self.rest_ms.index_add_(0, env_ids, facts[:, _ALONE], alpha=-1)
        self.rest_bytes.index_add_(0, env_ids, sizes, alpha=-1)
        self.placed += lawful
        for env_id, held in self._held.items():
            if lawful[env_id]:
                held.settle(int(self.origin[env_id, self._place[env_id]]), int(devices[env_id]))
        if bool(cut.any()):
            self._split(cut.nonzero()[:, 0])
        self._look_ahead()

    def _split(self, env_ids: Tensor) -> None:
        """The current units of these games become two, which find their places in the order."""
        catalog, unit, place = self.catalog, self.current[env_ids], self.placed[env_ids]
        first, second = catalog.halves[unit].unbind(1)
        alone, described, sizes = catalog.alone_ms, catalog.described, catalog.sizes
        added = alone[first] + alone[second] - alone[unit]
        self.rest[env_ids] += described[first] + described[second] - described[unit]
        self.rest_ms[env_ids] += added
        self.added_ms[env_ids] += added
        self.rest_bytes[env_ids] += sizes[first] + sizes[second] - sizes[unit]
        origin = self.origin[env_ids, place]
        for half, where in ((first, place), (second, self.count[env_ids])):
            self.order[env_ids, where], self.origin[env_ids, where] = half, origin
        self.count[env_ids] += 1
        self._tables[env_ids, origin, _PARTS] += 1
        order, origins = self.order[env_ids], self.origin[env_ids]
        keys = self._strict[env_ids].gather(1, origins) - alone[order]
        keys.masked_fill_(self._places < place[:, None], -torch.inf)
        keys.masked_fill_(self._places >= self.count[env_ids][:, None], torch.inf)
        ranked = keys.argsort(dim=1, stable=True)
        self.order[env_ids], self.origin[env_ids] = (
            order.gather(1, ranked),
            origins.gather(1, ranked),
        )
        self._look_far(env_ids)

    def _look_far(self, env_ids: Tensor) -> None:
        """The bytes of each unit, and of the largest that comes after it."""
        inside = self._places < self.count[env_ids][:, None]
        sizes = (self.catalog.sizes[self.order[env_ids]] * inside).double()
        self._sizes[env_ids] = sizes
        largest = sizes.flip(1).cummax(1).values.flip(1)
        self._largest_after[env_ids, :-1] = largest[:, 1:]

    def _look_ahead(self) -> None:
        """What each device would cost with the current unit, whether it has room for it, and
        whether it may be halved.
        """
        catalog = self.catalog
        place = self._place = torch.minimum(self.placed, self.count - 1).clamp_min_(0)
        unit = self.current = self.order.gather(1, place[:, None])[:, 0]
        amounts, self._facts = catalog.amounts[unit], catalog.facts[unit]
        self._amounts, self._columns = amounts, catalog.columns[unit]
        self._size, self.told = catalog.sizes[unit], self._facts / self.scale
        self.look(amounts, self._columns, self._size)
        self.allowed = self.exists & (self.left_after >= 0)
        for env_id, held in self._held.items():
            unit, size = self.origin[env_id, place[env_id]], self._size[env_id]
            (admitted,) = held.admits(unit[None].numpy(), size[None].numpy())
            self.allowed[env_id, : len(admitted)] &= torch.from_numpy(admitted)
        largest = self._largest_after.gather(1, self.placed[:, None].clamp_max(self.max_pieces - 1))
        self.safe = self.allowed & room_is_left(
            self.free, self._size, largest[:, 0], self._sizes, self.placed
        )
        self.splittable = self._may_split()
        fits_nowhere = ~(self.allowed.any(1) | self.splittable)
        self.infeasible |= (self.placed < self.count) & fits_nowhere

    def _may_split(self) -> Tensor:
        """Whether the current unit may be halved: where it can be, the rules and the game have
        room for one more, and it is costly enough or lies badly whole: [seats].
        """
        narrow = self.catalog.narrow[self.current]
        origin = self.origin.gather(1, self._place[:, None])[:, 0]
        pieces, most, least = self._tables[self._everyone, origin].unbind(1)
        possible = (narrow > 0) & (self.count < self._piece_limit) & (pieces < most)
        worth = (self.told[:, _ALONE] >= _WORTH) | ~self.safe.any(1)
        return possible & worth & (narrow >= least)

    def left_share(self) -> Tensor:
        """Share of each game's units that are not placed: [seats]."""
        return 1 - self.placed / self.count

    def assignment(self, env_id: int) -> Ints:
        """The device of each unit of the deal that is placed whole, in the deal's order; else
        -1.
        """
        instance = self.instances[env_id]
        assert instance is not None
        homes = np.full(len(instance.units), -1, np.int64)
        count = int(self.count[env_id])
        origin = self.origin[env_id, :count].numpy()
        whole = (self.parts[env_id].numpy()[origin] == 1).nonzero()[0]
        homes[origin[whole]] = self.homes[env_id, :count].numpy()[whole]
        return homes

    def placed_pieces(self, env_id: int) -> list[tuple[Piece, int]]:
        """Each slice that lies on a device, and which. Slices of equal width of one table are told
        alike, wherever they begin.
        """
        count = int(self.count[env_id])
        order, homes = self.order[env_id, :count].tolist(), self.homes[env_id, :count].tolist()
        return [
            (piece, home)
            for number, home in zip(order, homes, strict=True)
            if home >= 0
            for piece in self.catalog.units[number].pieces
        ]

    def shards(self, env_id: int) -> list[Shard | None]:
        """What each device of a game holds; None for an empty one."""
        instance = self.instances[env_id]
        assert instance is not None
        held: list[list[Piece]] = [[] for _ in instance.memory_bytes]
        for piece, device in merged_by_device(self.placed_pieces(env_id)):
            held[device].append(piece)
        return [Shard(tuple(pieces)) if pieces else None for pieces in held]
