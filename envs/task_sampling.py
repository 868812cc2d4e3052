"""Who deals: objects that draw tasks from a deck."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from autoshard.cost_model.inputs import Memberships
from autoshard.envs.catalog import Ints, TableCatalog, TaskInstance
from autoshard.workload import FieldError, Link, Objective
from autoshard.workload.first_fit import all_fit, all_fit_split
from autoshard.workload.step_price import StepPrice

Floats = npt.NDArray[np.float64]

_LOOSER = 1.05  # factor on all memory until the tables can be packed
_ONE_BYTE_S = Link(1.0)
_MIN_MS = 1e-6


class TaskSampler(Protocol):
    """Draws the next tasks. No task has more than `most_tables` and `most_devices`."""

    @property
    def max_tables(self) -> int:
        """Tables of the largest task."""
        ...

    @property
    def max_devices(self) -> int:
        """Devices of the largest task."""
        ...

    def __call__(self, catalog: TableCatalog, rng: np.random.Generator) -> TaskInstance:
        """A task of the deck's tables."""
        ...

    def sample(
        self, catalog: TableCatalog, rng: np.random.Generator, count: int
    ) -> list[TaskInstance]:
        """So many tasks: quicker than one by one."""
        ...


@dataclass(frozen=True)
class RandomTaskSampler:
    """Tasks of a random number of random tables on a random number of devices.

    Ranges are inclusive. Every task can be solved: where first fit decreasing finds no packing of
    the tables, all devices get more memory until it does.

    Args:
        num_tables: fewest and most tables.
        num_devices: fewest and most devices.
        fill: loosest and tightest share of all memory that the tables take.
        unevenness: devices' memories are drawn from 1 - unevenness to 1 of the largest.
        among: only tables whose names begin like that are dealt; by default all.
        split: tables may be larger than any device; such a task can be solved with tables halved.
        exchange_share: all-to-alls go over a link of such a speed that they would take this share
            of the step, the least and the most, if each device did its equal part; None: over an
            unknown one.
        objective: what plans are judged by, where no such share is asked for.
    """

    num_tables: tuple[int, int] = (60, 60)
    num_devices: tuple[int, int] = (4, 4)
    fill: tuple[float, float] = (0.1, 0.8)
    unevenness: float = 0.0
    among: str = ""
    split: bool = False
    exchange_share: tuple[float, float] | None = None
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        for name in ("num_tables", "num_devices"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise FieldError(name, f"must be from 1 up, the least first, got {low} to {high}")
        if not 0 < self.fill[0] <= self.fill[1] <= 1:
            raise FieldError("fill", f"must lie between 0 and 1, got {self.fill}")
        if not 0 <= self.unevenness < 1:
            raise FieldError("unevenness", f"must lie between 0 and 1, got {self.unevenness}")
        share = self.exchange_share
        if share is not None and not 0 < share[0] <= share[1] < 1:
            raise FieldError("exchange_share", f"must lie between 0 and 1, got {share}")

    @property
    def max_tables(self) -> int:
        """Tables of the largest task."""
        return self.num_tables[1]

    @property
    def max_devices(self) -> int:
        """Devices of the largest task."""
        return self.num_devices[1]

    def __call__(self, catalog: TableCatalog, rng: np.random.Generator) -> TaskInstance:
        """A task of the deck's tables; of all of them if it has fewer than asked for."""
        return self.sample(catalog, rng, 1)[0]

    def sample(
        self, catalog: TableCatalog, rng: np.random.Generator, count: int
    ) -> list[TaskInstance]:
        """So many tasks: quicker than one by one."""
        pool = catalog.called(self.among)
        most = min(self.max_tables, len(pool))
        tables = rng.integers(min(self.num_tables[0], most), most + 1, count)
        devices = rng.integers(self.num_devices[0], self.num_devices[1] + 1, count)
        order = rng.permuted(np.broadcast_to(pool, (count, len(pool))), axis=1)[:, :most]
        dealt = np.arange(most) < tables[:, None]
        rooms = self._rooms(catalog, rng, order, dealt, devices)
        units = [row[:some] for row, some in zip(order, tables.tolist(), strict=True)]
        objectives = self._objectives(catalog, rng, units, devices)
        return [
            TaskInstance(some, room[:number], objective=objective)
            for some, room, number, objective in zip(
                units, rooms, devices.tolist(), objectives, strict=True
            )
        ]

    def _rooms(
        self,
        catalog: TableCatalog,
        rng: np.random.Generator,
        order: Ints,
        dealt: npt.NDArray[np.bool_],
        devices: Ints,
    ) -> Ints:
        """Memory of each device: [tasks, most devices], 0 for those that a task does not have."""
        exists = np.arange(self.max_devices) < devices[:, None]
        shares = (1 - self.unevenness * rng.random(exists.shape)) * exists
        sizes = catalog.bytes[order] * dealt
        total = sizes.sum(1) / rng.uniform(*self.fill, len(order))
        even = shares / shares.sum(1, keepdims=True)
        rooms: Ints = np.ceil(total[:, None] * even).astype(np.int64)
        left = np.arange(len(order))
        while True:
            fits = all_fit(sizes[left], rooms[left])
            too_large = ~fits & (sizes[left].max(1) > rooms[left].max(1))
            if self.split and too_large.any():
                some = left[too_large]
                fixed, column, widths = (
                    values[order[some]] * dealt[some] for values in catalog.by_width
                )
                fits[too_large] = all_fit_split(fixed, column, widths, rooms[some])
            left = left[~fits]
            if not len(left):
                return rooms
            rooms[left] = np.ceil(rooms[left] * _LOOSER).astype(np.int64)

    def _objectives(
        self, catalog: TableCatalog, rng: np.random.Generator, units: Sequence[Ints], devices: Ints
    ) -> list[Objective]:
        """With a link of each task's own, if all-to-alls are to take a share of the step."""
        if self.exchange_share is None:
            return [self.objective] * len(units)
        ranks = torch.from_numpy(devices).float()[:, None, None]
        equal = Memberships.of(units).sums(catalog.amounts) / ranks
        computed_ms = catalog.price(equal).total_ms.double().numpy()
        shares = rng.uniform(*self.exchange_share, len(units))
        found = []
        for some, number, computed, share in zip(units, devices, computed_ms, shares, strict=True):
            columns = float(catalog.columns[some].sum())
            slow = StepPrice.of(Objective(link=_ONE_BYTE_S), catalog.batch_size, number, columns)
            exchange_ms = slow.exchange_stage(np.array([columns / number]))
            asked_ms = max(computed, _MIN_MS) * share / (1 - share)
            speed = float(exchange_ms[0]) / asked_ms
            found.append(Objective(link=Link(speed) if speed > 0 else None))
        return found


@dataclass(frozen=True)
class MixedTaskSampler:
    """Tasks of several generators, with equal odds."""

    parts: tuple[TaskSampler, ...]

    @property
    def max_tables(self) -> int:
        """Tables of the largest task."""
        return max(part.max_tables for part in self.parts)

    @property
    def max_devices(self) -> int:
        """Devices of the largest task."""
        return max(part.max_devices for part in self.parts)

    def __call__(self, catalog: TableCatalog, rng: np.random.Generator) -> TaskInstance:
        """A task of one of them."""
        return self.parts[rng.integers(len(self.parts))](catalog, rng)

    def sample(
        self, catalog: TableCatalog, rng: np.random.Generator, count: int
    ) -> list[TaskInstance]:
        """So many tasks, in an order that does not tell whose they are."""
        whose = rng.integers(len(self.parts), size=count)
        found = [
            iter(part.sample(catalog, rng, int((whose == number).sum())) if number in whose else ())
            for number, part in enumerate(self.parts)
        ]
        return [next(found[number]) for number in whose.tolist()]
