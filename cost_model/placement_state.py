"""Plans that are being made or changed, as arrays: what devices hold, have free and cost.

A unit brings amounts to its device that add up, so any change of a device is one addition, and
all changes of a kind are priced together.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model.inputs import sums_of_devices, unit_amounts
from autoshard.cost_model.network import DIRECTIONS
from autoshard.cost_model.scenarios import Pricing
from autoshard.workload import ShardingTask
from autoshard.workload.admission import Ints, Occupancy, RuleMasks, Truths
from autoshard.workload.step_price import StepPrice
from autoshard.workload.units import Placeable, PlacementUnit, bytes_of_units

Floats: TypeAlias = npt.NDArray[np.float64]


class UnitCatalog:
    """Pieces of a task and what is known of each; it grows as pieces are split.

    Args:
        pricing: What units bring to their device, and what that costs.
        task: Of the units.
        masks: The task's rules.
        units: Slices, or units of several tables.

    Attributes:
        amounts: What each unit brings to its device, [units, members, amounts].
        bytes: Of each unit on its device, [units].
        columns: Output columns of each, [units].
        origins: The unit of the task that each is of, [units].
    """

    def __init__(
        self, pricing: Pricing, task: ShardingTask, masks: RuleMasks, units: Sequence[Placeable]
    ) -> None:
        self.task, self.masks, self.pricing = task, masks, pricing
        self.units: list[PlacementUnit] = []
        self.amounts = torch.empty(0)
        self.bytes, self.origins = np.empty(0, np.int64), np.empty(0, np.int64)
        self.columns = np.empty(0)
        self.extend(units)

    def extend(self, units: Sequence[Placeable]) -> int:
        """Adds units; returns the number of the first."""
        first, new = len(self.units), [PlacementUnit.of(unit) for unit in units]
        self.units += new
        amounts = unit_amounts(self.pricing.amounts, new)
        sizes = bytes_of_units(self.task.operator, self.task.batch_size, new)
        self.amounts = torch.cat([self.amounts, amounts]) if first else amounts
        self.bytes = np.concatenate([self.bytes, sizes])
        self.origins = np.concatenate([self.origins, self.masks.numbers(new)])
        columns = np.array([float(piece.columns) for piece in new])
        self.columns = np.concatenate([self.columns, columns])
        return first


class PlacementState(Occupancy):
    """Devices of a task with the units that they hold, in one plan or in several side by side.

    Costs are told by the stages of a step that count (`StepPrice`): S scenarios, W stages.

    Args:
        catalog: The units, which are numbers in it.
        plans: How many there are.
    """

    def __init__(self, catalog: UnitCatalog, plans: int = 1) -> None:
        task = catalog.task
        super().__init__(catalog.masks, np.tile(task.usable_bytes, (plans, 1)))
        self.catalog, self.price = catalog, StepPrice.of_task(task)
        # In double precision, so that what is put and taken again leaves nothing behind; flat.
        shape = (plans * len(task.devices), *catalog.amounts.shape[1:])
        self._sums = torch.zeros(shape, dtype=torch.float64)
        self.columns = np.zeros((plans, len(task.devices)))

    def fill(self, homes: Ints) -> None:
        """Puts each unit of the catalog on its device of the only plan: [units]."""
        catalog = self.catalog
        self._sums += sums_of_devices(catalog.amounts, homes, len(self._sums))
        np.add.at(self.columns[0], homes, catalog.columns)
        np.subtract.at(self.free[0], homes, catalog.bytes)
        for origin, device in zip(catalog.origins.tolist(), homes.tolist(), strict=True):
            self.settle(origin, device)

    def add(self, unit: int, device: int) -> None:
        """Adds what a unit brings to a device of the only plan, beside what `enter` notes."""
        self._sums[device] += self.catalog.amounts[unit]
        self.columns[0, device] += self.catalog.columns[unit]

    def put(self, unit: int, device: int) -> None:
        """Puts a unit on a device of the only plan."""
        catalog = self.catalog
        self.add(unit, device)
        self.enter(int(catalog.origins[unit]), int(catalog.bytes[unit]), device)

    def take(self, unit: int, device: int) -> None:
        """Takes a unit off its device."""
        catalog = self.catalog
        self._sums[device] -= catalog.amounts[unit]
        self.columns[0, device] -= catalog.columns[unit]
        self.leave(int(catalog.origins[unit]), int(catalog.bytes[unit]), device)

    def put_each(self, plans: Ints, units: Ints, devices: Ints) -> None:
        """Puts a unit on a device in each of these plans, which are different ones."""
        catalog, places = self.catalog, plans * self.free.shape[1] + devices
        self._sums.index_add_(0, torch.from_numpy(places), catalog.amounts[units].double())
        self.columns[plans, devices] += catalog.columns[units]
        self.enter_each(plans, catalog.origins[units], catalog.bytes[units], devices)

    def admits_units(self, units: Ints) -> Truths:
        """Returns whether each device may take a unit more, one a plan: [plans, devices]; or, for
        the only plan, of any number of units: [units, devices].
        """
        return self.admits(self.catalog.origins[units], self.catalog.bytes[units])

    def admits_swaps(self, devices: Ints, leaving: Ints, entering: Ints) -> Truths:
        """Returns whether devices may take units in place of others; all arguments broadcast."""
        origins, sizes = self.catalog.origins, self.catalog.bytes
        return self.admits_exchange(
            devices, origins[leaving], sizes[leaving], origins[entering], sizes[entering]
        )

    def beside(self, first: int = 0) -> Floats:
        """Returns about what units, from number `first` on, add to each stage of a device, in the
        mean of scenarios: [units, W].
        """
        alone = self.catalog.amounts[first:, :, :DIRECTIONS].mean(1).double().numpy()
        stages = self.price.compute_stages(alone[:, 0], alone[:, 1])
        if self.price.exchanges:
            stages = (*stages, self.catalog.columns[first:] * self.price.column_ms())
        return np.stack(stages, axis=-1)

    def costs(self) -> Floats:
        """Returns what each device of the only plan spends: [devices, W, S]."""
        return self.stages(self._priced(self._sums), self.columns[0])

    def compute_joined(self, units: Ints) -> Tensor:
        """Returns milliseconds of compute of each device with each unit more: [units, devices,
        S, 2].
        """
        return self._priced(self._sums.float() + self.catalog.amounts[units][:, None])

    def joined(self, units: Ints) -> Floats:
        """Returns what each device would spend with each unit more: [units, devices, W, S]."""
        columns = self.columns[0] + self.catalog.columns[units][:, None]
        return self.stages(self.compute_joined(units), columns)

    def joined_at(self, places: Ints, units: Ints) -> Floats:
        """Returns milliseconds of compute where devices take a unit more: [places, 2].

        Args:
            places: Devices, numbered over all plans.
            units: The unit of each.
        """
        sums = self._sums[places] + self.catalog.amounts[units]
        return np.asarray(self._priced(sums)[:, 0].double().numpy())

    def without(self, units: Ints, devices: Ints) -> Floats:
        """Returns what the device of each unit would spend without it: [units, W, S]."""
        catalog = self.catalog
        columns = self.columns[0, devices] - catalog.columns[units]
        return self.stages(self._priced(self._sums[devices] - catalog.amounts[units]), columns)

    def exchanged(self, out: Ints, devices: Ints, into: Ints) -> Floats:
        """Returns what devices would spend if some units left them and others came: [..., W, S].

        Args:
            out: The unit that leaves each device.
            devices: Numbers of devices.
            into: The unit that comes.
        """
        catalog = self.catalog
        sums = self._sums[devices] - catalog.amounts[out] + catalog.amounts[into]
        columns = self.columns[0, devices] - catalog.columns[out] + catalog.columns[into]
        return self.stages(self._priced(sums), columns)

    def _priced(self, sums: Tensor) -> Tensor:
        return self.catalog.pricing.price(sums.float())

    def stages(self, prices: Tensor, columns: Floats) -> Floats:
        """Returns what devices spend in each stage: [..., W, S].

        Args:
            prices: Milliseconds of forward and backward, [..., S, 2].
            columns: Output columns, [...].
        """
        ms = np.asarray(prices.double().numpy())
        stages = self.price.compute_stages(ms[..., 0], ms[..., 1])
        if self.price.exchanges:
            stages = (*stages, self.price.sending_stage(columns[..., None]))
        return np.stack(np.broadcast_arrays(*stages), axis=-2)
