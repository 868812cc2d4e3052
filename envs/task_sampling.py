"""Samplers, which draw random tasks from a catalog of tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from autoshard.cost_model.networks.inputs import Memberships
from autoshard.envs.catalog import TableCatalog, TaskInstance
from autoshard.workload import FieldError, Link, Objective
from autoshard.workload.arrays import Ints
from autoshard.workload.packing.first_fit import all_fit, all_fit_split
from autoshard.workload.plans.step_price import StepPrice

_MEMORY_FACTOR = 1.05  # memory of a task grows by this factor until the tables can be packed
_ONE_BYTE_S = Link(1.0)
_MIN_MS = 1e-6


class TaskSampler(Protocol):
    """Distribution of tasks with at most `max_tables` tables and `max_devices` devices."""

    @property
    def max_tables(self) -> int:
        """Maximum number of tables of a task."""
        ...

    @property
    def max_devices(self) -> int:
        """Maximum number of devices of a task."""
        ...

    def sample(
        self, catalog: TableCatalog, rng: np.random.Generator, count: int
    ) -> list[TaskInstance]:
        """Returns `count` tasks; many at once take less time than one by one."""
        ...


@dataclass(frozen=True)
class RandomTaskSampler:
    """Tasks of a random number of random tables on a random number of devices.

    Ranges are inclusive. Every task can be solved: where first fit decreasing does not pack the
    tables, the memory of all devices grows until it does.

    Args:
        num_tables: Minimum and maximum number of tables.
        num_devices: Minimum and maximum number of devices.
        fill: Minimum and maximum share of all memory that the tables need.
        unevenness: Memory of devices is drawn from 1 - unevenness to 1 of the largest.
        prefix: Prefix of the names of tables to draw from; by default all tables.
        split: Whether a table may be larger than any device, if its halves can be packed.
        exchange_share: Minimum and maximum share of all-to-alls in the step time of a perfectly
            even plan, which determines the bandwidth of the link. None: as the objective says.
        objective: Objective of the tasks where `exchange_share` is None.
        mixed: Whether devices are of two of the kinds that the catalog prices, if it has several.
    """

    num_tables: tuple[int, int] = (60, 60)
    num_devices: tuple[int, int] = (4, 4)
    fill: tuple[float, float] = (0.1, 0.8)
    unevenness: float = 0.0
    prefix: str = ""
    split: bool = False
    exchange_share: tuple[float, float] | None = None
    objective: Objective = field(default_factory=Objective)
    mixed: bool = False

    def __post_init__(self) -> None:
        for name in ("num_tables", "num_devices"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise FieldError(name, f"must be from 1 up, minimum first, got {low} to {high}")
        if not 0 < self.fill[0] <= self.fill[1] <= 1:
            raise FieldError("fill", f"must lie between 0 and 1, got {self.fill}")
        if not 0 <= self.unevenness < 1:
            raise FieldError("unevenness", f"must lie between 0 and 1, got {self.unevenness}")
        share = self.exchange_share
        if share is not None and not 0 < share[0] <= share[1] < 1:
            raise FieldError("exchange_share", f"must lie between 0 and 1, got {share}")

    @property
    def max_tables(self) -> int:
        """Maximum number of tables of a task."""
        return self.num_tables[1]

    @property
    def max_devices(self) -> int:
        """Maximum number of devices of a task."""
        return self.num_devices[1]

    def sample(
        self, catalog: TableCatalog, rng: np.random.Generator, count: int
    ) -> list[TaskInstance]:
        """Returns `count` tasks, of all tables of the catalog if it has fewer than `num_tables`."""
        pool = catalog.with_prefix(self.prefix)
        largest = min(self.max_tables, len(pool))
        tables = rng.integers(min(self.num_tables[0], largest), largest + 1, count)
        devices = rng.integers(self.num_devices[0], self.num_devices[1] + 1, count)
        order = rng.permuted(np.broadcast_to(pool, (count, len(pool))), axis=1)[:, :largest]
        drawn = np.arange(largest) < tables[:, None]
        memory = self._memory(catalog, rng, order, drawn, devices)
        units = [row[:length] for row, length in zip(order, tables.tolist(), strict=True)]
        objectives = self._objectives(catalog, rng, units, devices)
        kinds = tuple(catalog.oracle.of_kinds())
        hardware = [self._hardware(kinds, rng, number) for number in devices.tolist()]
        return [
            TaskInstance(
                units[n], memory[n, : devices[n]], objective=objectives[n], hardware=hardware[n]
            )
            for n in range(count)
        ]

    def _hardware(
        self, kinds: Sequence[str], rng: np.random.Generator, devices: int
    ) -> tuple[str, ...]:
        """Returns the hardware of each device, at least one of each of two kinds; or no names."""
        if not self.mixed or len(kinds) < 2 or devices < 2:
            return ()
        two = rng.choice(len(kinds), 2, replace=False)
        of_second = rng.permutation(devices) < rng.integers(1, devices)
        return tuple(kinds[number] for number in two[of_second.astype(int)])

    def _memory(
        self,
        catalog: TableCatalog,
        rng: np.random.Generator,
        order: Ints,
        drawn: npt.NDArray[np.bool_],
        devices: Ints,
    ) -> Ints:
        """Returns the memory of each device in bytes, 0 for padding: [tasks, max_devices]."""
        exists = np.arange(self.max_devices) < devices[:, None]
        shares = (1 - self.unevenness * rng.random(exists.shape)) * exists
        sizes = catalog.bytes[order] * drawn
        total = sizes.sum(1) / rng.uniform(*self.fill, len(order))
        memory: Ints = np.ceil(total[:, None] * (shares / shares.sum(1, keepdims=True))).astype(
            np.int64
        )
        unsolved = np.arange(len(order))
        while True:
            fits = all_fit(sizes[unsolved], memory[unsolved])
            too_large = ~fits & (sizes[unsolved].max(1) > memory[unsolved].max(1))
            if self.split and too_large.any():
                rows = unsolved[too_large]
                constant, column, width = (
                    values[order[rows]] * drawn[rows] for values in catalog.linear_bytes
                )
                fits[too_large] = all_fit_split(constant, column, width, memory[rows])
            unsolved = unsolved[~fits]
            if not len(unsolved):
                return memory
            memory[unsolved] = np.ceil(memory[unsolved] * _MEMORY_FACTOR).astype(np.int64)

    def _objectives(
        self, catalog: TableCatalog, rng: np.random.Generator, units: Sequence[Ints], devices: Ints
    ) -> list[Objective]:
        if self.exchange_share is None:
            return [self.objective] * len(units)
        ranks = torch.from_numpy(devices).float()[:, None, None]
        even = Memberships.of(units).sums(catalog.amounts) / ranks
        computed_ms = catalog.price(even).total_ms.double().numpy()
        shares = rng.uniform(*self.exchange_share, len(units))
        found = []
        for own, number, computed, share in zip(units, devices, computed_ms, shares, strict=True):
            columns = float(catalog.columns[own].sum())
            slow = StepPrice.of(Objective(link=_ONE_BYTE_S), catalog.batch_size, number, columns)
            exchange_ms = slow.exchange_stage(np.array([columns / number]))
            requested_ms = max(computed, _MIN_MS) * share / (1 - share)
            speed = float(exchange_ms[0]) / requested_ms
            found.append(Objective(link=Link(speed) if speed > 0 else None))
        return found


@dataclass(frozen=True)
class MixedTaskSampler:
    """Mixture of task samplers with equal probabilities."""

    parts: tuple[TaskSampler, ...]

    @property
    def max_tables(self) -> int:
        """Maximum number of tables of a task."""
        return max(part.max_tables for part in self.parts)

    @property
    def max_devices(self) -> int:
        """Maximum number of devices of a task."""
        return max(part.max_devices for part in self.parts)

    def sample(
        self, catalog: TableCatalog, rng: np.random.Generator, count: int
    ) -> list[TaskInstance]:
        """Returns `count` tasks in random order of their samplers."""
        chosen = rng.integers(len(self.parts), size=count)
        found = [
            iter(part.sample(catalog, rng, int((chosen == n).sum())) if n in chosen else ())
            for n, part in enumerate(self.parts)
        ]
        return [next(found[n]) for n in chosen.tolist()]
