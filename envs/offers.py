"""Prices the options of the next units in the partial plans of episodes (`EpisodeOffers`)."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.step.common_price import OWN_MS
from autoshard.envs.catalog import TableCatalog
from autoshard.envs.devices import STAGES, powers, root_of
from autoshard.envs.episode_options import COLUMNS, EpisodeOptions
from autoshard.envs.lookahead import largest_units_fit
from autoshard.envs.options import NO_UNIT, OPTION_KINDS, SPLIT
from autoshard.workload.plans.step_price import StepPrice

# What an offered option would do. Milliseconds are relative to `even_split_ms`.
OPTION_PARTS = (
    "may",  # whether it is allowed
    "work",  # what it adds to all devices together, beside the unit whole
    "highest",  # highest cost of a device after it, or of a part that is still to be placed
    "width",  # log width of a half
    "soft_after", "plan_after",  # step with the unit, by a norm over devices and by the slowest
    "common",  # what it adds on all devices alike
    "common_again",  # the same without what only the first option of its kind adds
    "memory",  # of its parts on a device, relative to the mean device
)  # fmt: skip
MAY = OPTION_PARTS.index("may")
_SPLIT = OPTION_KINDS.index(SPLIT)
_OF_HALVES = slice(OPTION_PARTS.index("work"), OPTION_PARTS.index("width") + 1)
_COMMON = slice(OPTION_PARTS.index("common"), OPTION_PARTS.index("common_again") + 1)
_FAR = 1e6  # times even_split_ms: more than any plan takes
_MIN_ROWS_COST = 0.2  # as a share of even_split_ms: blocks of cheaper units improve too little
_MAX_FILL = 0.98  # of the memory that an option leaves, for all other units


class Upcoming(NamedTuple):
    """Units of episodes that are to be placed: all [envs, ...].

    Args:
        unit: The catalog's number of the current unit.
        size: Its memory in bytes.
        placed: Number of units before it.
        sizes: Memory of all units in their order, [envs, units].
        largest: Memory of the largest unit that comes after it.
        rest_bytes: Memory of all units that are not placed.
    """

    unit: Tensor
    size: Tensor
    placed: Tensor
    sizes: Tensor
    largest: Tensor
    rest_bytes: Tensor

    def of(self, env_ids: Tensor) -> "Upcoming":
        """Returns those of some episodes."""
        return Upcoming(*(values[env_ids] for values in self))


class Landing(NamedTuple):
    """Effects of options on devices, by the place that they choose: all [options, ...].

    Args:
        fits: Whether devices have the memory.
        first: First device of the place.
        free: Memory of devices after it in bytes, without that of a unit still to be placed:
            [options, devices].
        effects: Work, highest cost, soft and exact step after it, memory: [options, 5].
    """

    fits: Tensor
    first: Tensor
    free: Tensor
    effects: Tensor


class EpisodeOffers(EpisodeOptions):
    """Parallel episodes whose next units may be given options.

    Attributes:
        offers: What options of the current unit would do, [envs, kinds, OPTION_PARTS].
    """

    def __init__(
        self, catalog: TableCatalog, num_envs: int, max_devices: int, kinds: Collection[str]
    ) -> None:
        super().__init__(catalog, num_envs, max_devices, kinds)
        self.offers = torch.zeros(num_envs, len(OPTION_KINDS), len(OPTION_PARTS))

    @property
    def may_take(self) -> Tensor:
        """Options that the current unit may take, [envs, kinds]."""
        return self.offers[..., MAY] > 0

    def may_take_kinds(self, kinds: Tensor) -> Tensor:
        """Returns whether the current units may take options of these kinds, less than 0 for none:
        [envs].
        """
        if not self.any_options:
            return (kinds == _SPLIT) & (self.offers[:, _SPLIT, MAY] > 0)
        chosen = self.may_take.gather(1, kinds.clamp_min(0)[:, None])[:, 0]
        return chosen & (kinds >= 0)

    def offer_splits(self, splittable: Tensor, halves: Tensor, units: Tensor) -> None:
        """Offers splits of units.

        Args:
            splittable: Whether each unit may be split, [envs].
            halves: Additional cost of both halves, cost and log width of the wider one: [envs, 3].
            units: The units, [envs].
        """
        split = self.offers[:, _SPLIT]
        split[:, MAY] = splittable
        torch.mul(halves, split[:, :1], out=split[:, _OF_HALVES])
        if self.catalog.overhead is not None:
            split[:, _COMMON] = 0.0
            env_ids = splittable.nonzero()[:, 0]
            slices = self.catalog.slices[units[env_ids]]
            split[env_ids, _COMMON] = self._more_common(env_ids, None, slices)

    def offer_options(self, upcoming: Upcoming, waiting: Tensor, lost: Tensor) -> None:
        """Offers options that may help, and after which the rest still fits, as far as is foreseen.

        Args:
            upcoming: Units that are not placed.
            waiting: Episodes that wait for an action, [envs].
            lost: Where no device is safe for the whole unit, [envs].
        """
        self.offers[:, _SPLIT + 1 :] = 0.0
        joined = self.joined_ms.masked_fill(~self.exists, torch.inf)
        least, best = joined.min(1)
        rise_ms = least - self.cost_ms.gather(1, best[:, None])[:, 0]
        possible = self._possible(upcoming.unit, rise_ms, lost) & waiting[:, None]
        env_ids, kinds = possible.nonzero().unbind(1)
        if not len(env_ids):
            return
        here = upcoming.of(env_ids)
        found = self._landing(env_ids, here.unit, kinds, rise_ms[env_ids])
        fits = self._leaves_memory(env_ids, kinds, here, found)
        chosen = here.unit, kinds, found.first
        common = self._more_common(env_ids, chosen, torch.zeros_like(env_ids))
        work, highest, soft, plan, memory = found.effects.unbind(1)
        width, one = torch.zeros_like(work), torch.ones_like(work)
        parts = [one, work, highest, width, soft, plan, *common.unbind(1), memory]
        self.offers[env_ids, kinds] = torch.stack(parts, dim=1) * fits[:, None]
        self.first[env_ids, kinds] = found.first

    def _leaves_memory(
        self, env_ids: Tensor, kinds: Tensor, here: Upcoming, found: Landing
    ) -> Tensor:
        """Returns whether options leave enough memory for all other units: [options].

        What takes less memory is allowed even if it is not enough, as a table in host memory.
        """
        other = self.catalog.options.replaced[self.tasks[env_ids], here.unit, kinds]
        size = torch.where(other == NO_UNIT, 0, self.catalog.sizes[other.clamp_min(0)])
        exists = self.exists[env_ids]
        fits = largest_units_fit(found.free, size, here.largest, here.sizes, here.placed)
        fits = (fits & (found.free >= size[:, None]) & exists).any(1)
        rest_bytes, free_bytes = here.rest_bytes - here.size + size, (found.free * exists).sum(1)
        fits &= rest_bytes <= _MAX_FILL * free_bytes
        spare = (self.free_bytes[env_ids] * exists).sum(1) - here.rest_bytes
        return found.fits & (fits | (free_bytes - rest_bytes > spare))

    def _possible(self, units: Tensor, rise_ms: Tensor, lost: Tensor) -> Tensor:
        """Returns the options of units that may help, [envs, kinds].

        Copies may help where they take less than a device's share of the unit, blocks of rows where
        the unit is costly, and any option where no device is safe.

        Args:
            units: Units, [envs].
            rise_ms: What each unit adds to a device, [envs].
            lost: Whether no device is safe, [envs].
        """
        known, key = self.catalog.options, (self.tasks, units)
        may = known.may[key] & self.kinds_taken
        if not bool(may.any()):
            return may
        own_ms = torch.from_numpy(known.loads[self.tasks.numpy(), units.numpy()][..., OWN_MS])
        costly = rise_ms >= _MIN_ROWS_COST * self.even_split_ms
        cheap = own_ms < (rise_ms / self.num_devices)[:, None]
        return may & ((costly | lost)[:, None] | (cheap & (known.common_bytes[key] > 0)))

    def _landing(self, env_ids: Tensor, units: Tensor, kinds: Tensor, rise_ms: Tensor) -> Landing:
        """Returns what options do to devices, where the step rises least.

        Args:
            env_ids: Episode of each option, [options].
            units: Its unit.
            kinds: Its kind.
            rise_ms: What the unit adds to a device, [options].
        """
        catalog, known = self.catalog, self.catalog.options
        key, scale = (self.tasks[env_ids], units, kinds), self.even_split_ms[env_ids]
        count, replaced = known.blocks[key], known.replaced[key]
        common_bytes = known.common_bytes[key]
        again = replaced != NO_UNIT
        devices, exists = self.numbers, self.exists[env_ids]
        # A place is the devices of all blocks, any device for another unit, or all for copies.
        span = torch.where(again, 1, torch.where(count > 0, count, self.max_devices))
        place = devices // span[:, None]
        sizes, columns = torch.zeros(exists.shape, dtype=torch.int64), torch.zeros(exists.shape)
        now, price = self._with_columns(env_ids, self.column_changes(env_ids, units, kinds))
        joined = now.clone()
        rows = (again | (count > 0)).nonzero()[:, 0]
        if len(rows):
            numbers = self.parts_of(key, rows, devices)
            amounts, sizes[rows], columns[rows] = numbers
            prices = catalog.price(self.sums[env_ids[rows]] + amounts)
            held = self.held_columns[env_ids[rows]] + columns[rows]
            own = StepPrice.rows(price[rows])
            stages = self.stages(own, prices.forward_ms, prices.backward_ms, held)
            joined[rows] = torch.stack(stages, dim=-1)
        now, joined = (each / scale[:, None, None] * exists[..., None] for each in (now, joined))
        free = self.free_bytes[env_ids] - common_bytes[:, None]
        lacks = ((free < sizes) & exists & ~again[:, None]).long()
        lacking = torch.zeros_like(lacks).scatter_add_(1, place, lacks) > 0
        before, after = powers(now), powers(joined)
        rises = torch.zeros_like(before).scatter_add_(
            1, place[..., None].expand_as(before), after - before
        )
        soft = root_of(before.sum(1, keepdim=True) + rises).sum(2)
        there = devices * span[:, None] < self.num_devices[env_ids, None]
        soft = soft.masked_fill(lacking | ~there, torch.inf)
        soft_after, chosen = soft.min(1)
        fits = (soft_after < torch.inf) & ((free >= 0) | ~exists).all(1)
        inside = place == chosen[:, None]
        plan = torch.where(inside[..., None], joined, now)
        held = self.stages_ms[env_ids].sum((1, 2)) / scale
        work = plan.sum((1, 2)) - held - rise_ms / scale
        taken = sizes * inside
        memory = (taken.amax(1) + common_bytes) / self.capacity_mean[env_ids]
        effects = [work, plan.sum(2).amax(1), soft_after.clamp_max(_FAR), plan.amax(1).sum(1)]
        free = free - taken * ~again[:, None]
        return Landing(fits, chosen * span, free, torch.stack([*effects, memory], dim=1))

    def _with_columns(self, env_ids: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns stages of devices, and prices, if all columns change so:
        [options, devices, STAGES] and [options, fields].
        """
        prices = self.prices[env_ids]
        prices[:, COLUMNS] += changes
        now = self.stages_ms[env_ids]
        if self._exchanges:
            now[..., STAGES - 1] = StepPrice.rows(prices).exchange_stage(self.held_columns[env_ids])
        return now, prices

    def _more_common(
        self, env_ids: Tensor, options: tuple[Tensor, Tensor, Tensor] | None, slices: Tensor
    ) -> Tensor:
        """Returns what options or splits add on all devices alike, relative to `even_split_ms`,
        now and if there were such a one already: [options, 2].

        Args:
            env_ids: Episode of each option, [options].
            options: Unit, kind and first device of each; None for splits.
            slices: Slices of outputs that each adds.
        """
        numbers, scale = env_ids.numpy(), self.even_split_ms[env_ids]
        added = 0.0 if options is None else self.added_loads(env_ids, *options)
        splits, loads, found = self.splits.numpy()[numbers], self.loads[numbers], []
        for count in range(3):
            more = splits + count * slices.numpy()
            found.append(self.common_ms_of(numbers, loads + count * added, more))
        both = torch.from_numpy(np.diff(found, axis=0).T).float()
        return both / scale[:, None]
