"""The state of plans that are being built or changed: contents, free memory and costs of devices.

Units add amounts to their device, so each change is one addition, and many are priced at once.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.networks.inputs import sums_of_devices, unit_amounts
from autoshard.cost_model.networks.network import DIRECTIONS
from autoshard.cost_model.uncertainty.scenarios import Pricing
from autoshard.workload import ShardingTask
from autoshard.workload.arrays import Bools, Floats, Ints
from autoshard.workload.packing.admission import NOTHING, Occupancy, RuleMasks
from autoshard.workload.packing.units import Placeable, PlacementUnit, bytes_of_units
from autoshard.workload.plans.step_price import StepPrice


class UnitCatalog:
    """Placement units of a task with their amounts and sizes; it grows as pieces are split.

    Args:
        pricing: Prices sums of amounts.
        task: Task of the units.
        masks: Rules of the task.
        units: Pieces or placement units.

    Attributes:
        amounts: What each unit adds to its device, [units, members, amounts].
        bytes: Memory of each unit on its device, [units].
        columns: Output columns of each unit, [units].
        origins: Number of the task's unit that each belongs to, [units]; `NOTHING` where pinned.
    """

    def __init__(
        self, pricing: Pricing, task: ShardingTask, masks: RuleMasks, units: Sequence[Placeable]
    ) -> None:
        self.task, self.masks, self.pricing = task, masks, pricing
        self.amounts = torch.empty(0)
        self.bytes, self.origins = np.empty(0, np.int64), np.empty(0, np.int64)
        self.columns = np.empty(0)
        self.extend(units)

    def extend(self, units: Sequence[Placeable], pinned: bool = False) -> int:
        """Adds units; returns the number of the first.

        Args:
            units: Pieces or placement units.
            pinned: Whether they have their devices, so that no rule of their own applies to them,
                as blocks of rows.
        """
        first, new = len(self.bytes), [PlacementUnit.of(unit) for unit in units]
        amounts = unit_amounts(self.pricing.amounts, new)
        sizes = bytes_of_units(self.task.operator, self.task.batch_size, new)
        self.amounts = torch.cat([self.amounts, amounts]) if first else amounts
        self.bytes = np.concatenate([self.bytes, sizes])
        origins = np.full(len(new), NOTHING) if pinned else self.masks.numbers(new)
        self.origins = np.concatenate([self.origins, origins])
        columns = np.array([float(piece.columns) for piece in new])
        self.columns = np.concatenate([self.columns, columns])
        return first


class PlacementState(Occupancy):
    """The contents of devices in one plan or in several: amounts, output columns, free memory.

    Args:
        free: Free bytes of each device, [plans, devices]; updated in place.
        amounts: Shape of a unit's amounts, [members, amounts].
        masks: Rules of the task, or None.
        dtype: Type of the sums.

    Attributes:
        columns: Output columns of each device, [plans, devices].
        held_columns: The same memory as a tensor.
        free_bytes: `free` as a tensor, in the same memory.
    """

    def __init__(
        self,
        free: Ints,
        amounts: Sequence[int],
        masks: RuleMasks | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(masks, free)
        self.columns: Floats = torch.zeros(free.shape, dtype=dtype).numpy()
        self.held_columns, self.free_bytes = torch.from_numpy(self.columns), torch.from_numpy(free)
        # Sums of amounts of each device, numbered over all plans: [plans * devices, ...].
        self._sums = torch.zeros(free.size, *amounts, dtype=dtype)

    def add_each(self, places: Tensor, amounts: Tensor, columns: Tensor, sizes: Tensor) -> None:
        """Adds units to devices, without looking at rules.

        Args:
            places: Distinct devices, numbered over all plans: [units].
            amounts: Amounts of each unit, [units, ...].
            columns: Output columns of each unit.
            sizes: Bytes of each unit.
        """
        self._sums.index_add_(0, places, amounts)
        self.held_columns.view(-1).index_add_(0, places, columns)
        self.free_bytes.view(-1).index_add_(0, places, sizes, alpha=-1)


class TaskPlacement(PlacementState):
    """Plans of one task with their costs, for greedy placement and searches.

    Costs are per stage of a step (`StepPrice`): S scenarios, W stages. Sums are in double
    precision, so that adding and removing a unit changes nothing.

    Args:
        catalog: Units, which are referred to by number.
        plans: Number of plans.
    """

    def __init__(self, catalog: UnitCatalog, plans: int = 1) -> None:
        free = np.tile(catalog.task.usable_bytes, (plans, 1))
        super().__init__(free, catalog.amounts.shape[1:], catalog.masks)
        self.catalog, self.price = catalog, StepPrice.of_task(catalog.task)
        kinds = catalog.pricing.of_devices(catalog.task.hardware)
        if not isinstance(kinds, float):
            self._sums += kinds.repeat(plans, 1, 1)

    def fill(self, homes: Ints) -> None:
        """Places all units of the catalog in the only plan; `homes` has their devices, [units]."""
        catalog = self.catalog
        self._sums += sums_of_devices(catalog.amounts, homes, len(self._sums))
        np.add.at(self.columns[0], homes, catalog.columns)
        np.subtract.at(self.free[0], homes, catalog.bytes)
        for origin, device in zip(catalog.origins.tolist(), homes.tolist(), strict=True):
            self.record(origin, device)

    def add(self, unit: int, device: int) -> None:
        """Adds a unit's amounts and columns to a device of the only plan; `enter` does the rest."""
        self._sums[device] += self.catalog.amounts[unit]
        self.columns[0, device] += self.catalog.columns[unit]

    def put(self, unit: int, device: int) -> None:
        """Places a unit on a device of the only plan."""
        catalog = self.catalog
        self.add(unit, device)
        self.enter(int(catalog.origins[unit]), int(catalog.bytes[unit]), device)

    def take(self, unit: int, device: int) -> None:
        """Removes a unit from its device."""
        catalog = self.catalog
        self._sums[device] -= catalog.amounts[unit]
        self.columns[0, device] -= catalog.columns[unit]
        self.leave(int(catalog.origins[unit]), int(catalog.bytes[unit]), device)

    def put_each(self, plans: Ints, units: Ints, devices: Ints) -> None:
        """Places one unit in each of these plans, which are distinct."""
        catalog, places = self.catalog, plans * self.free.shape[1] + devices
        where, columns, sizes = (
            torch.from_numpy(each)
            for each in (places, catalog.columns[units], catalog.bytes[units])
        )
        self.add_each(where, catalog.amounts[units].double(), columns, sizes)
        self.record_each(plans, catalog.origins[units], devices)

    def admits_units(self, units: Ints) -> Bools:
        """Returns whether each device may take a unit more.

        The shape is [plans, devices] for one unit per plan, or [units, devices] for any number of
        units and the only plan.
        """
        return self.admits(self.catalog.origins[units], self.catalog.bytes[units])

    def admits_swaps(self, devices: Ints, leaving: Ints, entering: Ints) -> Bools:
        """Returns whether devices may take units in place of others; arguments broadcast."""
        origins, sizes = self.catalog.origins, self.catalog.bytes
        return self.admits_exchange(
            devices, origins[leaving], sizes[leaving], origins[entering], sizes[entering]
        )

    def beside(self, first: int = 0) -> Floats:
        """Returns about what units from number `first` on add to each stage of a device, [units,
        W].

        It is the mean over scenarios.
        """
        alone = self.catalog.amounts[first:, :, :DIRECTIONS].mean(1).double().numpy()
        stages = self.price.compute_stages(alone[:, 0], alone[:, 1])
        if self.price.exchanges:
            stages = (*stages, self.catalog.columns[first:] * self.price.column_ms())
        return np.stack(stages, axis=-1)

    def costs(self) -> Floats:
        """Returns the stage times of each device of the only plan, [devices, W, S]."""
        return self.stages(self._priced(self._sums), self.columns[0])

    def compute_joined(self, units: Ints) -> Tensor:
        """Returns compute ms of each device with each unit more, [units, devices, S, 2]."""
        return self._priced(self._sums.float() + self.catalog.amounts[units][:, None])

    def joined(self, units: Ints) -> Floats:
        """Returns stage times of each device with each unit more, [units, devices, W, S]."""
        columns = self.columns[0] + self.catalog.columns[units][:, None]
        return self.stages(self.compute_joined(units), columns)

    def joined_each(self, units: Ints, devices: Ints) -> Floats:
        """Returns stage times of devices of the only plan, each with a unit more, [units, W, S]."""
        catalog = self.catalog
        columns = self.columns[0, devices] + catalog.columns[units]
        return self.stages(self._priced(self._sums[devices] + catalog.amounts[units]), columns)

    def joined_at(self, places: Ints, units: Ints) -> Floats:
        """Returns compute ms where devices take a unit more, [places, 2].

        Args:
            places: Devices, numbered over all plans.
            units: The unit of each.
        """
        sums = self._sums[places] + self.catalog.amounts[units]
        return np.asarray(self._priced(sums)[:, 0].double().numpy())

    def without(self, units: Ints, devices: Ints) -> Floats:
        """Returns stage times of the device of each unit without that unit, [units, W, S]."""
        catalog = self.catalog
        columns = self.columns[0, devices] - catalog.columns[units]
        return self.stages(self._priced(self._sums[devices] - catalog.amounts[units]), columns)

    def exchanged(self, out: Ints, devices: Ints, into: Ints) -> Floats:
        """Returns stage times of devices if units are exchanged, [..., W, S].

        Args:
            out: The unit that leaves each device.
            devices: Numbers of devices.
            into: The unit that enters it.
        """
        catalog = self.catalog
        places, left, entered = (torch.from_numpy(each) for each in (devices, out, into))
        sums = self._sums[places] - catalog.amounts[left] + catalog.amounts[entered]
        columns = self.columns[0, devices] - catalog.columns[out] + catalog.columns[into]
        return self.stages(self._priced(sums), columns)

    def changed(self, devices: Ints, amounts: Tensor, columns: Floats) -> Floats:
        """Returns stage times of devices of the only plan with so much more on each, [n, W, S].

        Args:
            devices: Numbers of devices, [n].
            amounts: What comes less what goes, [n, members, amounts].
            columns: Columns that come less those that go, [n].
        """
        more = self.columns[0, devices] + columns
        return self.stages(self._priced(self._sums[devices] + amounts), more)

    def _priced(self, sums: Tensor) -> Tensor:
        return self.catalog.pricing.price(sums.float())

    def stages(self, prices: Tensor, columns: Floats) -> Floats:
        """Returns stage times of devices, [..., W, S].

        Args:
            prices: Milliseconds of forward and backward, [..., S, 2].
            columns: Output columns, [...].
        """
        ms = np.asarray(prices.double().numpy())
        stages = self.price.compute_stages(ms[..., 0], ms[..., 1])
        if self.price.exchanges:
            stages = (*stages, self.price.sending_stage(columns[..., None]))
        return np.stack(np.broadcast_arrays(*stages), axis=-2)
