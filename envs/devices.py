"""Devices of episodes: what they hold, have free and cost, also with the next unit.

`price_with_next` prices each device with the next unit of its episode, and `keep_prices` keeps
these prices, so that nothing is priced twice.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.pricing.placement_state import PlacementState
from autoshard.envs.catalog import FullTask, TableCatalog, TaskInstance
from autoshard.workload.plans.step_price import StepPrice

STAGES = 3  # forward (with backward, where they share a stage), backward, both all-to-alls
COST, DEVIATION = STAGES, STAGES + 1  # total of compute and all-to-alls; relative uncertainty
PRICED = STAGES + 2  # entries for each device: its stages, COST and DEVIATION
_NOW, _JOINED = 0, 1  # as the device is, and with the next unit
_POWER = 12.0  # of norms over devices
_MIN_SUM = 1e-24  # minimum sum of such powers
_ABSENT = -1  # memory of a device that an episode does not have


class EpisodeDevices(PlacementState):
    """Devices of parallel episodes, each of which has its own task and number of devices.

    Sums are in single precision.

    Args:
        catalog: Units of all tasks.
        num_envs: Number of parallel episodes.
        max_devices: Maximum number of devices of a task.

    Attributes:
        exists: Mask of devices that the episode has, [envs, devices], as all below.
        capacity: Memory in bytes, -1 where there is no device.
        capacity_mean: Memory of the mean device in bytes, [envs].
        free_after: Memory in bytes that is not used once the next unit is placed there.
        described: Sums of amounts that have a name, [envs, devices, amounts].
        priced: Stages in ms, total in ms and relative uncertainty, now and with the next unit:
            [envs, devices, 2, PRICED].
    """

    def __init__(self, catalog: TableCatalog, num_envs: int, max_devices: int) -> None:
        by_device = num_envs, max_devices
        free = np.full(by_device, _ABSENT, np.int64)
        super().__init__(free, catalog.amounts.shape[1:], dtype=torch.float32)
        self.catalog, self.max_devices = catalog, max_devices
        self.exists = torch.zeros(by_device, dtype=torch.bool)
        self.capacity = torch.zeros(by_device, dtype=torch.int64)
        self.free_after = torch.zeros(by_device, dtype=torch.int64)
        self.num_devices = torch.ones(num_envs, dtype=torch.int64)
        self.capacity_divisor = torch.ones(by_device)  # the capacity as a float, at least 1
        self.capacity_mean = torch.ones(num_envs)
        self.capacity_share = torch.ones(by_device)  # relative to the mean device of the episode
        self.prices = torch.zeros(num_envs, len(fields(StepPrice)))
        self.price = StepPrice.rows(self.prices)
        self.described = torch.zeros(*by_device, catalog.described.shape[1])
        self.priced = torch.zeros(*by_device, 2, PRICED)
        self._kinds: Tensor | float = 0.0  # amounts of empty devices, as `sums`; 0 if all are equal
        self._exchanges = False  # whether all-to-alls count in any episode
        self._pairs = torch.zeros(0, 2, dtype=torch.int64)  # episode and device, where one exists

    @property
    def sums(self) -> Tensor:
        """Sums of amounts of each device, [envs, devices, ...]."""
        return self._sums.view(*self.free.shape, *self._sums.shape[1:])

    @property
    def stages_ms(self) -> Tensor:
        """Time of each device in each stage, [envs, devices, STAGES]."""
        return self.priced[:, :, _NOW, :STAGES]

    @property
    def cost_ms(self) -> Tensor:
        """Time of each device in all phases, [envs, devices]."""
        return self.priced[:, :, _NOW, COST]

    @property
    def joined_ms(self) -> Tensor:
        """Time of each device in all phases with the next unit, [envs, devices]."""
        return self.priced[:, :, _JOINED, COST]

    @property
    def plan_ms(self) -> Tensor:
        """Step time of each episode's partial plan, by the task's objective: [envs]."""
        return self.stages_ms.amax(1).sum(1)

    def reset_devices(self, new: Tensor, instances: Sequence[TaskInstance]) -> None:
        """Gives episodes the empty devices of their tasks."""
        capacity = np.full((len(instances), self.max_devices), _ABSENT, np.int64)
        for row, instance in enumerate(instances):
            capacity[row, : len(instance.memory_bytes)] = instance.memory_bytes
        self.free[new.numpy()] = capacity
        self.capacity[new] = torch.from_numpy(capacity)
        self.exists[new] = self.capacity[new] != _ABSENT
        self.num_devices[new] = self.exists[new].sum(1)
        self.capacity_divisor[new] = self.capacity[new].float().clamp_min(1)
        total = (self.capacity_divisor[new] * self.exists[new]).sum(1)
        self.capacity_mean[new] = mean = total / self.num_devices[new]
        self.capacity_share[new] = self.capacity_divisor[new] / mean[:, None]
        self._pairs = self.exists.nonzero()
        units = np.concatenate([instance.units for instance in instances])
        rows = np.repeat(np.arange(len(instances)), [len(instance.units) for instance in instances])
        columns = np.bincount(rows, self.catalog.columns.numpy()[units], len(instances))
        prices = []
        for instance, own in zip(instances, columns.tolist(), strict=True):
            larger = instance.larger or FullTask(len(instance.memory_bytes), own)
            batch_size = self.catalog.batch_size
            price = StepPrice.of(instance.objective, batch_size, larger.ranks, larger.columns)
            prices.append(price.row)
        self.prices[new] = torch.tensor(prices, dtype=self.prices.dtype)
        self._exchanges = bool(self.price.exchanges.any())
        self._mark_kinds(new, instances)

    def _mark_kinds(self, new: Tensor, instances: Sequence[TaskInstance]) -> None:
        """Notes what kinds of devices new episodes have, where a task names them."""
        for env_id, instance in zip(new.tolist(), instances, strict=True):
            marks = self.catalog.oracle.of_devices(instance.hardware)
            if isinstance(marks, float) and isinstance(self._kinds, float):
                continue
            if isinstance(self._kinds, float):
                self._kinds = torch.zeros_like(self.sums)
            self._kinds[env_id, : len(instance.memory_bytes)] = marks

    def empty_sums(self, env_ids: Tensor) -> Tensor | float:
        """Returns the amounts with which devices' sums begin, [envs, devices, ...] or 0."""
        return self._kinds if isinstance(self._kinds, float) else self._kinds[env_ids]

    def even_ms(self, sums: Tensor, env_ids: Tensor) -> Tensor:
        """Returns the compute ms of a device that has an even share of the work: [envs].

        Where devices differ, all work is spread so that they take equally long.

        Args:
            sums: Amounts of all units over the number of devices, [envs, ...].
            env_ids: Environments.
        """
        empty = self.empty_sums(env_ids)
        if isinstance(empty, float):
            return self.catalog.price(sums).total_ms
        ms, exists = self.catalog.price(sums[:, None] + empty).total_ms, self.exists[env_ids]
        speeds = (1 / ms * exists).nan_to_num(0.0, 0.0).sum(1)  # infinite if it has hardly a table
        return torch.where(speeds > 0, self.num_devices[env_ids] / speeds, 0.0)

    def even_exchange_ms(self, env_ids: Tensor) -> Tensor:
        """Returns the time in all-to-alls of a device with the mean number of columns: [envs]."""
        even = StepPrice.rows(self.prices[env_ids])
        columns: Tensor = even.columns / even.ranks
        return even.exchange_stage(columns)[:, 0]

    def stages(
        self, price: StepPrice, forward: Tensor, backward: Tensor, columns: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the time of devices in each stage in ms, STAGES times [episodes, devices].

        Args:
            price: Prices of the episodes.
            forward: Forward compute of their devices in ms.
            backward: Backward compute in ms.
            columns: Output columns.
        """
        compute = price.compute_stages(forward, backward)
        if not self._exchanges:
            return (*compute, torch.zeros_like(columns))
        return (*compute, price.exchange_stage(columns))

    def reprice(self, env_ids: Tensor) -> None:
        """Prices the devices of these episodes from their sums."""
        columns = self.held_columns[env_ids]
        forward, backward, deviation = (torch.zeros(columns.shape) for _ in range(3))
        if bool(columns.any()):
            prices = self.catalog.price(self.sums[env_ids])
            forward, backward, deviation = prices.forward_ms, prices.backward_ms, prices.deviation
        price, exists = StepPrice.rows(self.prices[env_ids]), self.exists[env_ids]
        stages = torch.stack(self.stages(price, forward, backward, columns), dim=-1)
        stages *= exists[..., None]
        found = [stages, stages.sum(2, keepdim=True), deviation[..., None]]
        self.priced[env_ids, :, _NOW] = torch.cat(found, dim=2)

    def price_with_next(self, amounts: Tensor, columns: Tensor, sizes: Tensor) -> None:
        """Prices every device with the next unit of its episode.

        Args:
            amounts: Amounts of each episode's unit, [envs, ...].
            columns: Output columns of the unit, [envs].
            sizes: Memory of the unit in bytes, [envs].
        """
        if len(self._pairs) == self.exists.numel():
            joined = self.catalog.price(self.sums + amounts[:, None])
            forward, backward, deviation = joined.forward_ms, joined.backward_ms, joined.deviation
        else:  # price only devices that exist
            env_ids, devices = self._pairs.unbind(1)
            joined = self.catalog.price(self.sums[env_ids, devices] + amounts[env_ids])
            prices = torch.zeros(3, *self.exists.shape)
            found = (joined.forward_ms, joined.backward_ms, joined.deviation)
            prices[:, env_ids, devices] = torch.stack(found)
            forward, backward, deviation = prices.unbind(0)
        stages = self.stages(self.price, forward, backward, self.held_columns + columns[:, None])
        if self._exchanges:
            stages[-1].mul_(self.exists)
        total = forward + backward + stages[-1]
        torch.stack([*stages, total, deviation], dim=-1, out=self.priced[:, :, _JOINED])
        self.free_after = self.free_bytes - sizes[:, None]

    def keep_prices(self, where: Tensor, described: Tensor) -> None:
        """Keeps what `price_with_next` found for units that `add_each` adds.

        Args:
            where: Devices, numbered over all episodes, [units].
            described: Amounts that have a name, [units, amounts].
        """
        self.described.flatten(0, 1).index_add_(0, where, described)
        priced = self.priced.flatten(0, 1)
        priced[where, _NOW] = priced[where, _JOINED]


def powers(values: Tensor) -> Tensor:
    """Returns the powers whose sums are those of norms over devices; of relative values near 1.

    Unlike the maximum, a norm also falls where devices that are not the slowest become even.
    """
    squares = values * values
    fourths = squares * squares
    return fourths * fourths * fourths


def root_of(sums: Tensor) -> Tensor:
    """Returns the norms, given sums of powers."""
    return sums.clamp_min(_MIN_SUM) ** (1 / _POWER)
