"""Steps of a local search: moves, swaps, splits and other options, priced as a batch."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from autoshard.sharders.search.move_budget import GONE
from autoshard.sharders.search.search_state import Change, SearchState
from autoshard.workload.arrays import Bools, Floats, Ints
from autoshard.workload.packing.table_options import TableOptions
from autoshard.workload.ways.option import COLUMN_WISE, ShardingOption

_MIN_GAIN = 1e-5  # relative: smaller ones are not worth a step
_MIN_SPLIT_GAIN = 0.01  # relative; a split adds lookups on two devices
_LEADING = 0.98  # of the slowest device: such devices hold up the step together
_MIN_OPTION_GAIN = 1e-3  # relative
_MOVES = 256  # priced at a step, those with the best estimates
_SWAPS = 64  # priced at a step, those with the best estimates; more find nothing better
_TRIES = 3  # steps to another option that are tried, from the best, until one helps
_FLIPPED = 16  # tables whose options may change at a step
_MIN_FLIPPED = 0.2  # of what the mean device takes
_FLIP_POWER = 3.0  # of the norm that ranks these steps
_FLIP_LIMIT = 1.001  # by that norm: steps that are worse never helped
_MIN_MS = 1e-12


class Choices(NamedTuple):
    """Candidate steps of one kind.

    Args:
        after_ms: Objective after each step; infinite where it is not admitted.
        change: Returns the step of a number.
    """

    after_ms: Floats
    change: Callable[[int], Change]


_NONE = Choices(np.empty(0), lambda number: Change((), ((number, GONE),)))


class PlanSearch(SearchState):
    """A plan with its candidate steps."""

    def descend(
        self,
        split: bool,
        time_is_up: Callable[[], bool] = lambda: False,
        options: TableOptions | None = None,
    ) -> None:
        """Applies the best move, else the best swap, split, or option, until none helps.

        Args:
            split: Whether tables may be split.
            time_is_up: Returns whether to stop.
            options: Options that tables may take; by default they keep theirs.
        """
        for _ in range(20 * len(self._homes)):
            if time_is_up() or not (
                self._apply_best(self.moves(), _MIN_GAIN)
                or self._apply_best(self.swaps(), _MIN_GAIN)
                or (split and self._apply_best(self.splits(first_is_paid=True), self._split_gain))
                or (
                    options is not None
                    and self._apply_best(self.other_options(options), _MIN_OPTION_GAIN)
                )
            ):
                return

    @property
    def _split_gain(self) -> float:
        """The least gain of a split, relative. Where several devices are the slowest, each has to
        be relieved before the step gets shorter, so that a split brings its share of that.
        """
        means = self._means[:, self._longest[0]]
        return _MIN_SPLIT_GAIN / int((means >= _LEADING * means.max()).sum())

    def _apply_best(self, choices: Choices, min_gain: float) -> bool:
        """Applies the best step if it improves the objective; returns whether it does."""
        if not len(choices.after_ms):
            return False
        best = int(np.argmin(choices.after_ms))
        if choices.after_ms[best] > self.objective() * (1 - min_gain):
            return False
        self._apply(choices.change(best))
        return True

    def kick(self, rng: np.random.Generator) -> None:
        """Moves three random pieces to random devices that admit them."""
        for item in rng.permutation(self._movable)[:3].tolist():
            fitting = np.flatnonzero(self._admitted(np.array([item]))[0])
            if len(fitting):
                self._apply(Change((item,), ((item, int(rng.choice(fitting))),)))

    def split_costliest(self, rank: int) -> bool:
        """Splits a piece of the slowest device; one half moves to the device that is fastest there.

        Args:
            rank: Rank of the piece by its cost in the longest stage, from 0.

        Returns:
            False if there is no such piece, or no device admits the half.
        """
        slowest, stage = self.slowest[0], self._longest[0]
        mine = self._splittable(self._on([slowest]))
        if rank >= len(mine):
            return False
        item = sorted(mine, key=lambda number: -self._weight[number, stage])[rank]
        stays, goes = (int(half[0]) for half in self._halves([item]))
        admitted = self._admitted(np.array([goes]))[0]
        admitted[slowest] = False
        if not admitted.any():
            return False
        device = int(np.where(admitted, self._means[:, stage], np.inf).argmin())
        self._apply(Change((item,), ((stays, slowest), (goes, device))))
        return True

    def moves(self) -> Choices:
        """Returns moves of a piece away from a device that is the slowest of a stage."""
        items = self._on(self.slowest)
        if not len(items):
            return _NONE
        pairs = self._promising_moves(items)
        rows, into = np.divmod(pairs, len(self._costs))
        out, homes = items[rows], self._homes[items]
        without = self._devices.without(items, homes)[rows]
        removed = self._powers[homes[rows]] + self._powers[into]
        after = self._after(removed, without, self._devices.joined_each(out, into))

        def change(number: int) -> Change:
            item, device = int(out[number]), int(into[number])
            return Change((item,), ((item, device),))

        return Choices(after, change)

    def _promising_moves(self, items: Ints) -> Ints:
        """Returns the admitted moves with the best objectives if costs were additive.

        Each is the number of one of these items times the number of devices, plus that of a device.
        """
        may_move = self._admitted(items)
        may_move[np.arange(len(items)), self._homes[items]] = False
        pairs = np.flatnonzero(may_move)
        if len(pairs) <= _MOVES:
            return pairs
        rows, into = np.divmod(pairs, len(self._costs))
        largest, weight = np.maximum(self._means.max(0), _MIN_MS), self._weight[items]
        powers, here = (self._means / largest) ** self._power, self._homes[items]
        # Of fused tables, a device may take less than one of them does by its share of the work.
        rest = np.maximum(self._means[here] - weight, 0.0)
        left = (rest / largest) ** self._power - powers[here]
        joined = ((self._means[into] + weight[rows]) / largest) ** self._power - powers[into]
        sums = powers.sum(0) + left[rows] + joined
        estimate = (largest * np.maximum(sums, _MIN_MS) ** (1 / self._power)).sum(1)
        return np.sort(pairs[np.argpartition(estimate, _MOVES)[:_MOVES]])

    def swaps(self) -> Choices:
        """Returns the most promising swaps with a device that is the slowest of a stage."""
        out, into = self._promising()
        if not len(out):
            return _NONE
        here, there = self._homes[out], self._homes[into]
        after_here = self._devices.exchanged(out, here, into)
        after_there = self._devices.exchanged(into, there, out)
        after = self._after(self._powers[here] + self._powers[there], after_here, after_there)

        def change(number: int) -> Change:
            leaves, enters = int(out[number]), int(into[number])
            homes = (leaves, int(there[number])), (enters, int(here[number]))
            return Change((leaves, enters), homes)

        return Choices(after, change)

    def _promising(self) -> tuple[Ints, Ints]:
        """Returns pairs of admitted swaps with the best step times if costs were additive."""
        places = self._movable
        pairs, estimates = [], []
        for device in self.slowest:
            here = self._homes[places] == device
            mine, others = places[here], places[~here]
            estimates.append(self._additive_ms(device, mine, others).ravel())
            pairs.append(np.stack(np.meshgrid(mine, others, indexing="ij")).reshape(2, -1))
        estimate = np.concatenate(estimates)
        if not len(estimate):
            return estimate.astype(np.int64), estimate.astype(np.int64)
        count = min(_SWAPS, len(estimate))
        chosen = np.sort(np.argpartition(estimate, count - 1)[:count])
        out, into = np.concatenate(pairs, 1)[:, chosen[estimate[chosen] < np.inf]]
        return out, into

    def _additive_ms(self, device: int, mine: Ints, others: Ints) -> Floats:
        """Estimates the step time after each swap, as if costs were additive: [mine, others].

        Args:
            device: Device of `mine`.
            mine: Items on that device.
            others: Items on other devices.
        """
        homes, found = self._homes[others], np.zeros((len(mine), len(others)))
        for weight, means in zip(self._weight.T, self._means.T, strict=True):  # of each stage
            gain = weight[mine][:, None] - weight[others]
            slowest = np.maximum(means[device] - gain, means[homes] + gain)
            leader = means.argmax()
            if leader != device:
                others_ms = np.where(homes == leader, 0.0, means[leader])
                np.maximum(slowest, others_ms, out=slowest)
            found += slowest
        found[~self._may_swap(device, mine, others)] = np.inf
        return found

    def splits(self, first_is_paid: bool = False) -> Choices:
        """Returns splits of a piece of a device that is the slowest of a stage; one half moves.

        Args:
            first_is_paid: Whether what a first split adds is left out, because others share it.
        """
        wide = self._splittable(self._on(self.slowest))
        if not wide or len(self._costs) == 1:
            return _NONE
        homes = self._homes[wide]
        staying, going = self._halves(wide)
        kept = self._devices.exchanged(np.array(wide), homes, staying)
        joined = self._devices.joined(going)
        removed = self._powers[homes][:, None] + self._powers
        splits = self._splits + self._slices[self._owners[wide]]
        bearing_ms = self._bearing_ms(splits) - (self.first_split_ms if first_is_paid else 0.0)
        after = self._after(removed, kept[:, None], joined, common_ms=bearing_ms[:, None])
        after[np.arange(len(wide)), homes] = np.inf
        after[~self._admitted(going)] = np.inf

        def change(number: int) -> Change:
            place, device = divmod(number, len(self._costs))
            stays = (int(staying[place]), int(homes[place]))
            return Change((wide[place],), (stays, (int(going[place]), device)))

        return Choices(after.ravel(), change)

    def other_options(self, options: TableOptions) -> Choices:
        """Returns other options of heavy tables that the slowest devices hold, or all devices."""
        here = set(self._owners[np.isin(self._homes, self.slowest)].tolist())
        changes = self._flips(
            [n for n in self._heaviest() if n in here or self._options[n] != COLUMN_WISE], options
        )
        if not changes:
            return _NONE
        return Choices(self.price(changes), changes.__getitem__)

    def flip_options(
        self,
        options: TableOptions,
        split: bool,
        time_is_up: Callable[[], bool] = lambda: False,
        tries: int = _TRIES,
    ) -> None:
        """Gives one table another option and descends, as long as that helps.

        Whether an option helps shows only once other tables have moved: steps are therefore ranked
        by a norm that is closer to the mean of devices.

        Args:
            options: Options that tables may take.
            split: Whether tables may be split.
            time_is_up: Returns whether to stop.
            tries: How many of the best steps are tried, until one helps.
        """
        while True:
            best, before_ms = self.state(), self.objective()
            for change in self._ranked_flips(options)[:tries]:
                if time_is_up():
                    return
                self._apply(change)
                self.descend(split, time_is_up)
                if self.objective() < before_ms * (1 - _MIN_OPTION_GAIN):
                    break
                self.restore(best)
            else:
                return

    def _ranked_flips(self, options: TableOptions) -> list[Change]:
        power = self._power
        self.sharpen(_FLIP_POWER)
        limit_ms = self.objective() * _FLIP_LIMIT
        numbers = self._heaviest()
        changes = self._flips(numbers, options, slices=True)
        after_ms = self.price(changes) if changes else np.empty(0)
        self.sharpen(power)
        order = np.argsort(after_ms, kind="stable")
        return [changes[n] for n in order.tolist() if after_ms[n] < limit_ms]

    def _heaviest(self) -> list[int]:
        """Returns the units of single tables that are most for a device, and those by other
        options.
        """
        wholes = self._whole_units
        weights = self._weight[wholes].sum(1)
        heavy = np.argsort(-weights, kind="stable")[:_FLIPPED]
        heavy = heavy[weights[heavy] > _MIN_FLIPPED * self._means.sum(1).mean()]
        others = (n for n, option in enumerate(self._options) if option != COLUMN_WISE)
        numbers = dict.fromkeys([*heavy.tolist(), *islice(others, _FLIPPED)])
        return [n for n in numbers if len(self._masks.units[n].pieces) == 1]

    def _flips(
        self, numbers: Sequence[int], options: TableOptions, slices: bool = False
    ) -> list[Change]:
        """Returns the steps that give one of these units another option; with `slices`, or
        another number of slices of columns.
        """
        flips = [
            (number, option)
            for number in numbers
            for option in options.of(self.table_of(number))
            if option != self._options[number] or (slices and option.by_columns)
        ]
        self._know_pinned(flips)
        self._know_slices([flip for flip in flips if flip[1].by_columns])
        return [change for flip in flips for change in self.changes_to(*flip)]

    def _know_slices(self, options: Sequence[tuple[int, ShardingOption]]) -> None:
        """Adds slices of columns of units by these options as items, all at once."""
        items = self._wholes(options)
        for _ in range(len(self._costs).bit_length() - 1):
            wide = [item for item in items.tolist() if self._masks.may_split(self._units[item])]
            if not wide:
                return
            items = np.concatenate(self._halves(wide))

    def changes_to(self, number: int, option: ShardingOption) -> list[Change]:
        """Returns the steps that give a table another option.

        Args:
            number: Number of the table's unit.
            option: The option; in columns, the table is whole or in slices, on devices that have
                little to do without it.
        """
        held, loads = self._without(number)
        leave, flip = tuple(held.tolist()), (number, option)
        if not option.by_columns:
            return [Change(leave, self._pinned(number, option), flip)]
        slices, found = self._wholes([flip]), list[Change]()
        while True:
            if len(slices) != len(held) or option != self._options[number]:
                found += self._spread(slices, loads, leave, flip)
            units = self._units
            if 2 * len(slices) > len(loads) or not all(
                self._masks.may_split(units[item], len(slices) + n)
                for n, item in enumerate(slices.tolist())
            ):
                return found
            slices = np.concatenate(self._halves(slices.tolist()))

    def wholes(self, table: str, count: int) -> list[Change]:
        """Returns the steps that put a table whole on one of the devices that do least without it.

        Args:
            table: Name of the table; there is no step for one that others have to be with.
            count: Maximum number of devices.
        """
        if table not in self._names:
            return []
        number = self._names.index(table)
        held, loads = self._without(number)
        (item,), leave = self._wholes([(number, COLUMN_WISE)]).tolist(), tuple(held.tolist())
        homes = np.argsort(loads, kind="stable")[:count].tolist()
        return [Change(leave, ((item, home),), (number, COLUMN_WISE)) for home in homes]

    def _without(self, number: int) -> tuple[Ints, Floats]:
        """Returns the items of a unit, and what devices do without them, in ms."""
        held = np.flatnonzero((self._owners == number) & (self._homes != GONE))
        loads = self._means.sum(1)
        np.subtract.at(loads, self._homes[held], self._weight[held].sum(1))
        return held, loads

    def _spread(
        self, slices: Ints, loads: Floats, leave: tuple[int, ...], flip: tuple[int, ShardingOption]
    ) -> list[Change]:
        """Returns the step that puts equal slices of a table on the devices that do least."""
        admitted = self._admitted(slices[:1])[0]
        homes = np.argsort(np.where(admitted, loads, np.inf), kind="stable")[: len(slices)]
        if not admitted[homes].all():
            return []
        return [Change(leave, tuple(zip(slices.tolist(), homes.tolist(), strict=True)), flip)]

    def _may_swap(self, here: int, mine: Ints, others: Ints) -> Bools:
        """Returns whether each item of device `here` may be swapped with each of the others:
        [mine, others].
        """
        devices, mine_, others_ = self._devices, mine[:, None], others[None]
        found = devices.admits_swaps(np.array(here), mine_, others_)
        found = found & devices.admits_swaps(self._homes[others_], others_, mine_)
        if self._budget is not None:
            found &= self._budget.admits_swaps(here, mine, others, self._homes)
        return found

    def _splittable(self, items: Ints) -> list[int]:
        """Returns the items that may be split."""
        parts = np.bincount(self._owners[self._movable], minlength=len(self._masks.units))
        units, owners = self._units, self._owners
        return [n for n in items.tolist() if self._masks.may_split(units[n], int(parts[owners[n]]))]
