"""Batched environment for placing embedding tables on devices.

Each episode solves one task. Units come in descending order of predicted cost, the most
constrained first. An action assigns the current unit to a device, splits it by columns, or gives
its table another option. All episodes step as one batch; smaller tasks are padded and masked. The
Gymnasium environments and policy inference share this implementation.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.networks.inputs import Memberships
from autoshard.envs.catalog import NUM_SCALARS, TableCatalog, TaskInstance
from autoshard.envs.devices import DEVIATION, PRICED
from autoshard.envs.lookahead import largest_units_fit
from autoshard.envs.offers import EpisodeOffers, Upcoming
from autoshard.envs.options import NO_UNIT, OPTION_KINDS, SPLIT
from autoshard.workload import Piece, Shard, UserError
from autoshard.workload.packing.admission import ANY_PARTS, Occupancy
from autoshard.workload.plans.placements import merged_by_device

# As a share of even_split_ms: splitting cheaper units improves balance too little.
_MIN_SPLIT_COST = 0.02
_CONSTRAINED_MS = 1e6  # constrained units come first, whatever they cost
NOWHERE, BY_OPTION = -1, -2  # in place of the device of a unit
_PARTS = 0  # in _tables: pieces of the table, then their maximum number and minimum width
_SPLIT = OPTION_KINDS.index(SPLIT)
# Columns of catalog.features.
_ALONE, _UNCERTAINTY, _SIZE, _ADDED, _HALF, _WIDTH = range(-NUM_SCALARS, 0)


class BatchedPlacementEnv(EpisodeOffers):
    """Parallel episodes, each with its own task.

    An action is a device or, after these, one of `OPTION_KINDS`: of halves, both take their places
    in the order; blocks of rows go onto their devices at once; copies onto all; another unit of the
    table takes its place in the order. An episode is over when all units are placed, or infeasible:
    no action is allowed for the current unit, or one was taken that was not.

    Args:
        catalog: Units of all tasks.
        num_envs: Number of parallel episodes.
        max_tables: Maximum number of units of a task.
        max_devices: Maximum number of devices of a task.
        max_splits: Maximum number of splits in an episode.
        kinds: Kinds of options that may be taken beside splits.

    Attributes:
        order: The catalog's number of each unit, in the order of placement: [envs, pieces].
        homes: Device of each unit in that order, NOWHERE, or BY_OPTION: [envs, pieces].
        origin: Unit of the task that each unit is, or is a part of: [envs, pieces].
        count: Number of units, which grows with splits: [envs].
        placed: Number of placed units, [envs].
        current: The catalog's number of the unit that is placed next, [envs].
        allowed: Devices with memory for it that the constraints admit, [envs, devices].
        safe: Allowed devices after which the largest remaining units fit, [envs, devices].
        splittable: Whether the current unit may be split, [envs].
        infeasible: Whether the episode has ended without a plan, [envs].
        lower_bound_ms: Estimated step time of an ideal plan, [envs].
        rest: Named amounts of units that are not placed, [envs, amounts].
        unit_features: Features of the current unit, relative to the task: [envs, features].
    """

    def __init__(
        self,
        catalog: TableCatalog,
        num_envs: int,
        max_tables: int,
        max_devices: int,
        max_splits: int = 0,
        kinds: Collection[str] = (),
    ) -> None:
        super().__init__(catalog, num_envs, max_devices, kinds)
        self.num_envs, self.max_tables = num_envs, max_tables
        self.max_splits, self.max_pieces = max_splits, max_tables + max_splits
        self.split_action = max_devices + OPTION_KINDS.index(SPLIT)
        self.num_actions = max_devices + len(OPTION_KINDS)
        self.instances: list[TaskInstance | None] = [None] * num_envs
        described, by_piece = catalog.described.shape[1], (num_envs, self.max_pieces)
        self.order = torch.zeros(by_piece, dtype=torch.int64)
        self.homes = torch.full(by_piece, NOWHERE, dtype=torch.int64)
        self.origin = torch.zeros(by_piece, dtype=torch.int64)
        self.count = torch.zeros(num_envs, dtype=torch.int64)
        self.placed = torch.zeros(num_envs, dtype=torch.int64)
        self.infeasible = torch.zeros(num_envs, dtype=torch.bool)
        self._tables = torch.ones(num_envs, max_tables, 3, dtype=torch.int64)
        self._piece_limit = torch.zeros(num_envs, dtype=torch.int64)
        self._constrained = torch.zeros(num_envs, max_tables, dtype=torch.float64)
        # Bytes of units in their order, and of the largest unit that comes after each.
        self._sizes, self._largest_after = (
            torch.zeros(by_piece, dtype=torch.float64) for _ in range(2)
        )
        self.rest = torch.zeros(num_envs, described)
        self.rest_ms = torch.zeros(num_envs)  # each unit alone, as are all_ms and added_ms
        self.all_ms = torch.ones(num_envs)
        self.added_ms = torch.zeros(num_envs)  # by splits
        self.rest_bytes = torch.zeros(num_envs, dtype=torch.int64)
        self.even_share = torch.ones(num_envs, described)  # named amounts per device
        self.lower_bound_ms = torch.ones(num_envs)
        # Observations are relative to these.
        self.priced_scale = torch.ones(num_envs, 1, 1, PRICED)
        self.feature_scale = torch.ones(num_envs, described + NUM_SCALARS)
        self._env_ids = torch.arange(num_envs)
        self._places = torch.arange(self.max_pieces)
        self._occupancies: dict[int, Occupancy] = {}  # by environment, where a task has constraints

    @property
    def over(self) -> Tensor:
        """Whether each episode has ended, [envs]."""
        return self.infeasible | (self.placed == self.count)

    @property
    def parts(self) -> Tensor:
        """Number of pieces of each unit of the task, [envs, tables]."""
        return self._tables[..., _PARTS]

    @property
    def rest_share(self) -> Tensor:
        """Share of each episode's units that are not placed, [envs]."""
        return 1 - self.placed / self.count

    def start(self, env_ids: Sequence[int], instances: Sequence[TaskInstance]) -> None:
        """Starts new episodes in these environments."""
        self._begin_episodes(env_ids, instances)
        self._prepare_next()

    def _begin_episodes(self, env_ids: Sequence[int], instances: Sequence[TaskInstance]) -> None:
        for instance in instances:
            tables, devices = len(instance.units), len(instance.memory_bytes)
            if tables > self.max_tables or devices > self.max_devices:
                raise UserError(
                    f"a task of {tables} tables on {devices} devices is larger than the "
                    f"environment, which has max_tables={self.max_tables} and "
                    f"max_devices={self.max_devices}"
                )
        new = torch.tensor(env_ids, dtype=torch.int64)
        for env_id, instance in zip(env_ids, instances, strict=True):
            self.instances[env_id] = instance
        self.reset_devices(new, instances)
        self.feature_scale[new, _SIZE] = self.capacity_mean[new]
        self._order_units(new, instances)
        self.begin_options(new, instances)
        self.homes[new] = NOWHERE
        self.placed[new] = 0
        self.infeasible[new] = False
        self._recompute(new)

    def _order_units(self, new: Tensor, instances: Sequence[TaskInstance]) -> None:
        """Orders units by predicted cost, after those that constraints restrict."""
        rows, width = len(instances), self.max_pieces
        order, origin = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
        constrained = np.zeros((rows, self.max_tables))
        max_parts = np.full((rows, self.max_tables), ANY_PARTS)
        min_width = np.zeros((rows, self.max_tables), np.int64)
        alone = self.catalog.alone_ms.numpy()
        for row, (env_id, instance) in enumerate(zip(new.tolist(), instances, strict=True)):
            tables = len(instance.units)
            self._occupancies.pop(env_id, None)
            if (masks := instance.masks) is not None:
                free = self.free[env_id : env_id + 1, : len(instance.memory_bytes)]
                self._occupancies[env_id] = Occupancy(masks, free)  # shares memory with self.free
                constrained[row, :tables] = _CONSTRAINED_MS * masks.freedom(np.arange(tables))
                max_parts[row, :tables] = masks.max_parts[:-1]
                min_width[row, :tables] = masks.min_width[:-1]
            ranked = np.argsort(constrained[row, :tables] - alone[instance.units], kind="stable")
            order[row, :tables], origin[row, :tables] = instance.units[ranked], ranked
        self.count[new] = torch.tensor([len(instance.units) for instance in instances])
        self._piece_limit[new] = self.count[new] + self.max_splits
        self.order[new], self.origin[new] = torch.from_numpy(order), torch.from_numpy(origin)
        self._constrained[new] = torch.from_numpy(constrained)
        max_parts = np.minimum(max_parts, self.num_devices[new].numpy()[:, None])
        tables_of_new = np.stack([np.ones_like(max_parts), max_parts, min_width], axis=2)
        self._tables[new] = torch.from_numpy(tables_of_new)

    def set_oracle(self, oracle: EstimatedCosts) -> None:
        """Replaces the cost model, and prices all placed units again."""
        self.catalog.set_oracle(oracle)
        # The ensemble may have another number of networks.
        self._sums = torch.zeros(self.free.size, *self.catalog.amounts.shape[1:])
        started = [env_id for env_id, instance in enumerate(self.instances) if instance is not None]
        self._recompute(torch.tensor(started, dtype=torch.int64))
        self._prepare_next()

    def _recompute(self, env_ids: Tensor) -> None:
        """Computes sums, scales and costs of these episodes from the devices of their units."""
        catalog, order, homes = self.catalog, self.order[env_ids], self.homes[env_ids]
        inside = self._places < self.count[env_ids][:, None]
        rest = inside & (homes == NOWHERE)
        alone = catalog.alone_ms[order] * inside
        self.rest_ms[env_ids] = (alone * rest).sum(1)
        self.rest_bytes[env_ids] = (catalog.sizes[order] * rest).sum(1)
        self._update_sizes(env_ids)
        found = [self.instances[env_id] for env_id in env_ids.tolist()]
        instances = [instance for instance in found if instance is not None]
        tables = Memberships.of([instance.units for instance in instances])
        totals, work = tables.sums(catalog.amounts), tables.sums(catalog.described)
        self.all_ms[env_ids] = tables.sums(catalog.alone_ms[:, None])[:, 0]
        self.added_ms[env_ids] = alone.sum(1) - self.all_ms[env_ids]
        devices = self.num_devices[env_ids]
        self.even_share[env_ids] = (work / devices[:, None]).clamp_min(1e-9)
        even_ms = self.even_ms(totals / devices[:, None, None], env_ids)
        costliest = tables.highest(catalog.alone_ms)
        exchange = self.even_exchange_ms(env_ids)
        # The cost model prices less than one table for each device as 0.
        self.even_split_ms[env_ids] = torch.where(even_ms > 0, even_ms, costliest) + exchange
        self.feature_scale[env_ids, :-NUM_SCALARS] = self.even_share[env_ids]
        scaled = [_ALONE, _ADDED, _HALF]
        self.feature_scale[env_ids[:, None], scaled] = self.even_split_ms[env_ids, None]
        self.priced_scale[env_ids, ..., :DEVIATION] = self.even_split_ms[env_ids, None, None, None]
        narrowest = tables.highest(catalog.narrowest_ms) if self.max_splits else costliest
        self.lower_bound_ms[env_ids] = torch.maximum(even_ms, narrowest) + exchange
        self.sums[env_ids] = self.empty_sums(env_ids)
        self.held_columns[env_ids], self.described[env_ids] = 0.0, 0.0
        if bool((homes != NOWHERE).any()):  # else episodes begin, mostly many at once
            self.sums[env_ids] += self.sums_of(catalog.amounts, env_ids)
            self.held_columns[env_ids] = self.sums_of(catalog.columns[:, None], env_ids)[..., 0]
            self.add_taken(env_ids)
            self.described[env_ids] = catalog.model.compute.described(self.sums[env_ids])
        self.rest[env_ids] = catalog.described[order].mul(rest[..., None]).sum(1)
        self.reprice(env_ids)
        self.count_loads(env_ids, instances)

    def sums_of(self, amounts: Tensor, env_ids: Tensor) -> Tensor:
        """Returns sums over the units that each device holds, [envs, devices, ...].

        Args:
            amounts: Amounts of the catalog's units, [units, ...].
            env_ids: Environments, [envs].
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
        active: Tensor | None = None,
        starting: Sequence[int] = (),
        instances: Sequence[TaskInstance] = (),
    ) -> None:
        """Applies an action to the current unit of each active episode.

        Args:
            actions: A device, or the number of devices and that of a kind of options: [envs].
            active: Mask of episodes that act, [envs]; by default those that are not over.
            starting: Environments that start a new episode; they are not active.
            instances: Their tasks.
        """
        active = ~self.over if active is None else active
        if starting:
            self._begin_episodes(starting, instances)
        devices = actions.clamp_max(self.max_devices - 1)
        placing = active & self.allowed.gather(1, devices[:, None])[:, 0]
        placing &= actions < self.max_devices
        kinds = actions - self.max_devices
        taking = active & self.may_take_kinds(kinds)
        self.infeasible |= active & ~placing & ~taking
        # Mostly all episodes place a unit; then no rows need be selected.
        rows = slice(None) if bool(placing.all()) else placing.nonzero()[:, 0]
        env_ids, homes, place = self._env_ids[rows], devices[rows], self._place[rows]
        where = env_ids * self.max_devices + homes
        features, sizes = self._features[rows], self._size[rows]
        described = features[:, :-NUM_SCALARS]
        self.homes[env_ids, place] = homes
        self.add_each(where, self._amounts[rows], self._unit_columns[rows], sizes)
        self.keep_prices(where, described)
        self.rest.index_add_(0, env_ids, described, alpha=-1)
        self.rest_ms.index_add_(0, env_ids, features[:, _ALONE], alpha=-1)
        self.rest_bytes.index_add_(0, env_ids, sizes, alpha=-1)
        self.placed += placing
        for env_id, occupancy in self._occupancies.items():
            if placing[env_id]:
                unit = int(self.origin[env_id, self._place[env_id]])
                occupancy.record(unit, int(devices[env_id]))
        if bool(taking.any()):
            splits = kinds == _SPLIT
            if len(cut := (taking & splits).nonzero()[:, 0]):
                self._split(cut)
            if len(others := (taking & ~splits).nonzero()[:, 0]):
                self._take(others, kinds[others])
        self._prepare_next()

    def _take(self, env_ids: Tensor, kinds: Tensor) -> None:
        """Gives the tables of the current units other options."""
        catalog, unit, place = self.catalog, self.current[env_ids], self.placed[env_ids]
        other = self.take(env_ids, unit, kinds)
        again = other != NO_UNIT
        for rest, values in (
            (self.rest, catalog.described),
            (self.rest_ms, catalog.alone_ms),
            (self.rest_bytes, catalog.sizes),
        ):
            rest[env_ids] -= values[unit]
            rest[env_ids[again]] += values[other[again]]
        gone = env_ids[~again]
        self.homes[gone, place[~again]] = BY_OPTION
        self.placed[gone] += 1
        self.order[env_ids[again], place[again]] = other[again]
        if bool(again.any()):
            self._sort(env_ids[again])

    def _split(self, env_ids: Tensor) -> None:
        """Replaces the current units by their halves, and sorts the remaining units again."""
        catalog, unit, place = self.catalog, self.current[env_ids], self.placed[env_ids]
        first, second = catalog.halves[unit].unbind(1)
        alone, described, sizes = catalog.alone_ms, catalog.described, catalog.sizes
        added = alone[first] + alone[second] - alone[unit]
        self.rest[env_ids] += described[first] + described[second] - described[unit]
        self.rest_ms[env_ids] += added
        self.added_ms[env_ids] += added
        self.splits[env_ids] += catalog.slices[unit]
        self.price_common(env_ids)
        self.rest_bytes[env_ids] += sizes[first] + sizes[second] - sizes[unit]
        origin = self.origin[env_ids, place]
        for half, where in ((first, place), (second, self.count[env_ids])):
            self.order[env_ids, where], self.origin[env_ids, where] = half, origin
        self.count[env_ids] += 1
        self._tables[env_ids, origin, _PARTS] += 1
        self._sort(env_ids)

    def _sort(self, env_ids: Tensor) -> None:
        """Sorts units that are not placed."""
        alone, place = self.catalog.alone_ms, self.placed[env_ids]
        order, origins = self.order[env_ids], self.origin[env_ids]
        keys = self._constrained[env_ids].gather(1, origins) - alone[order]
        keys.masked_fill_(self._places < place[:, None], -torch.inf)
        keys.masked_fill_(self._places >= self.count[env_ids][:, None], torch.inf)
        ranked = keys.argsort(dim=1, stable=True)
        self.order[env_ids] = order.gather(1, ranked)
        self.origin[env_ids] = origins.gather(1, ranked)
        self._update_sizes(env_ids)

    def _update_sizes(self, env_ids: Tensor) -> None:
        inside = self._places < self.count[env_ids][:, None]
        sizes = (self.catalog.sizes[self.order[env_ids]] * inside).double()
        self._sizes[env_ids] = sizes
        largest = sizes.flip(1).cummax(1).values.flip(1)
        self._largest_after[env_ids, :-1] = largest[:, 1:]

    def _prepare_next(self) -> None:
        """Selects the next unit of each episode, prices it on each device, and updates masks."""
        catalog = self.catalog
        place = self._place = torch.minimum(self.placed, self.count - 1).clamp_min_(0)
        unit = self.current = self.order.gather(1, place[:, None])[:, 0]
        self._amounts, self._features = catalog.amounts[unit], catalog.features[unit]
        self._unit_columns, self._size = catalog.columns[unit], catalog.sizes[unit]
        self.unit_features = self._features / self.feature_scale
        self.price_with_next(self._amounts, self._unit_columns, self._size)
        self.allowed = self.exists & (self.free_after >= 0)
        for env_id, occupancy in self._occupancies.items():
            unit, size = self.origin[env_id, place[env_id]], self._size[env_id]
            (admitted,) = occupancy.admits(unit[None].numpy(), size[None].numpy())
            self.allowed[env_id, : len(admitted)] &= torch.from_numpy(admitted)
        largest = self._largest_after.gather(1, self.placed[:, None].clamp_max(self.max_pieces - 1))
        self.safe = self.allowed & largest_units_fit(
            self.free_bytes, self._size, largest[:, 0], self._sizes, self.placed
        )
        self.splittable = self._may_split()
        self.offer_splits(self.splittable, self.unit_features[:, _ADDED:], self.current)
        if self.any_options:
            waiting = (self.placed < self.count) & ~self.infeasible
            rest = (self.placed, self._sizes, largest[:, 0], self.rest_bytes)
            upcoming = Upcoming(self.current, self._size, *rest)
            self.offer_options(upcoming, waiting, ~self.safe.any(1))
        may_take = self.may_take.any(1) if self.any_options else self.splittable
        fits_nowhere = ~(self.allowed.any(1) | may_take)
        self.infeasible |= (self.placed < self.count) & fits_nowhere

    @property
    def action_masks(self) -> Tensor:
        """Actions that are allowed, [envs, num_actions]."""
        return torch.cat([self.allowed, self.may_take], dim=1)

    def _may_split(self) -> Tensor:
        """Returns where constraints and `max_splits` admit a split that may help: [envs].

        It may help if the unit is costly, or if no device is safe for the whole unit.
        """
        min_half_width = self.catalog.min_half_width[self.current]
        origin = self.origin.gather(1, self._place[:, None])[:, 0]
        pieces, max_parts, min_width = self._tables[self._env_ids, origin].unbind(1)
        possible = (min_half_width > 0) & (self.count < self._piece_limit) & (pieces < max_parts)
        costly = self.unit_features[:, _ALONE] >= _MIN_SPLIT_COST
        return possible & (costly | ~self.safe.any(1)) & (min_half_width >= min_width)

    def placed_pieces(self, env_id: int) -> list[tuple[Piece, int]]:
        """Returns the placed pieces of an episode and their devices.

        Only the width of a piece is meaningful: pieces of a table that have equal widths are equal.
        Blocks of rows are not among them (`blocks_placed`).
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
        """Returns the shard of each device of an episode; None for an empty device."""
        instance = self.instances[env_id]
        assert instance is not None
        held: list[list[Piece]] = [[] for _ in instance.memory_bytes]
        columns = merged_by_device(self.placed_pieces(env_id))
        for piece, device in (*columns, *self.blocks_placed(env_id)):
            held[device].append(piece)
        return [Shard(tuple(pieces)) if pieces else None for pieces in held]
