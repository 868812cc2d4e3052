"""What a search may do: the memory that is left, the task's rules, and how much may move."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autoshard.workload import ShardingPlan, ShardingTask, TableSlice
from autoshard.workload.terms import Bundle, Terms, Truths, bytes_of_bundles

Whole = npt.NDArray[np.int64]

GONE = -1  # the device of items that are on none: split, or only looked at


class Near:
    """Of what lies where a plan has it, a search may move so many bytes.

    Args:
        plan: that is in use.
        most_bytes: of weights and optimizer state.
    """

    def __init__(self, plan: ShardingPlan, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._placements = plan.by_table()

    def home(self, piece: TableSlice) -> int:
        """The device that has a slice of one of the plan's slices."""
        return next(
            placement.device
            for placement in self._placements[piece.table.name]
            if placement.start <= piece.start < placement.start + placement.width
        )


class Admission:
    """Items on devices, and where memory, rules and what may move admit them.

    Args:
        task: whose memory and rules count.
        items: what is placed.
        homes: the device of each.
        near: a plan to stay near, if any.
    """

    def __init__(
        self, task: ShardingTask, items: Sequence[Bundle], homes: Whole, near: Near | None = None
    ) -> None:
        self._task = task
        self._terms = Terms(task)
        self._near = near
        self.items = list(items)
        self.homes = homes
        self.bytes = self._bytes_of(items)
        self._lawful = self._terms.lawful(items)
        self._conflicts = self._terms.conflicts(items)
        self._moving = self._moving_of(items)
        self.free = task.room_bytes
        np.subtract.at(self.free, homes, self.bytes)

    def extend(self, items: Sequence[Bundle]) -> None:
        """Look at more items, which are on no device yet."""
        if self._conflicts is not None:
            more = self._terms.conflicts(items, [*self.items, *items])
            assert more is not None
            above = np.concatenate([self._conflicts, more[:, : len(self.items)].T], axis=1)
            self._conflicts = np.concatenate([above, more])
        self.items += items
        self.homes = np.concatenate([self.homes, np.full(len(items), GONE)])
        self.bytes = np.concatenate([self.bytes, self._bytes_of(items)])
        self._lawful = np.concatenate([self._lawful, self._terms.lawful(items)])
        self._moving = np.concatenate([self._moving, self._moving_of(items)])

    def leave(self, item: int) -> int:
        """Take an item off its device; returns that one."""
        device = int(self.homes[item])
        self.free[device] += self.bytes[item]
        self.homes[item] = GONE
        return device

    def enter(self, item: int, device: int) -> None:
        """Put an item on a device."""
        self.free[device] -= self.bytes[item]
        self.homes[item] = device

    def admitted(self, items: Whole) -> Truths:
        """Whether each item may go to each device: [items, devices]."""
        found = self._lawful[items] & (self.bytes[items][:, None] <= self.free[None])
        if self._conflicts is not None:
            found &= self._rivals(items, np.arange(len(self.free))) == 0
        if self._near is not None:
            moved = self._moved_without(items)[:, None] + self._moving[items]
            found &= moved <= self._near.most_bytes
        return found

    def may_swap(self, here: int, mine: Whole, others: Whole) -> Truths:
        """Whether each of mine, all of them here, may change places with each of the others:
        [mine, others].
        """
        homes = self.homes[others]
        grown = self.bytes[others][None] - self.bytes[mine][:, None]
        found = (grown <= self.free[here]) & (-grown <= self.free[homes][None])
        if self._task.rules:
            found &= self._lawful[mine][:, homes] & self._lawful[others][:, here]
        if self._conflicts is not None:
            each_other = self._conflicts[np.ix_(mine, others)]
            found &= self._rivals(mine, np.arange(len(self.free)))[:, homes] == each_other
            found &= self._rivals(others, np.array([here]))[:, 0] == each_other
        if self._near is not None:
            others_stay = self._moving[others, homes]
            moved = self._moved_without(mine)[:, None] - others_stay + self._moving[others, here]
            found &= moved + self._moving[mine][:, homes] <= self._near.most_bytes
        return np.asarray(found)

    def to_halve(self, items: Sequence[int]) -> list[int]:
        """Those of the items that may be halved."""
        present = (item for item, home in zip(self.items, self.homes, strict=True) if home != GONE)
        slices = Counter(item.name for item in present)
        return [n for n in items if self._terms.may_halve(item := self.items[n], slices[item.name])]

    def _bytes_of(self, items: Sequence[Bundle]) -> Whole:
        return bytes_of_bundles(self._task.operator, self._task.batch_size, items)

    def _rivals(self, items: Whole, devices: Whole) -> Whole:
        """How many items are on each of the devices that each of these may not share it with:
        [items, devices].
        """
        assert self._conflicts is not None
        present = np.flatnonzero(np.isin(self.homes, devices))
        there = (self.homes[present][:, None] == devices).astype(np.float32)
        return np.asarray(self._conflicts[np.ix_(items, present)].astype(np.float32) @ there)

    def _moving_of(self, items: Sequence[Bundle]) -> Whole:
        """Bytes that each item moves by going to each device: [items, devices]."""
        devices = np.arange(len(self._task.devices))
        if self._near is None:
            return np.zeros((len(items), len(devices)), np.int64)
        stored = self._task.operator.stored_bytes
        sizes = [sum(stored(s.table.rows, s.width) for s in item.slices) for item in items]
        homes = [self._near.home(item.slices[0]) for item in items]
        elsewhere = np.array(homes)[:, None] != devices
        return np.asarray(np.array(sizes, np.int64)[:, None] * elsewhere)

    def _moved_without(self, items: Whole) -> Whole:
        """Bytes that are elsewhere than the plan has them, each item left out: [items]."""
        moved = np.where(
            self.homes == GONE, 0, self._moving[np.arange(len(self.homes)), self.homes]
        )
        return np.asarray(moved.sum() - moved[items])
