"""Devices of episodes side by side: what they hold, have free and cost, with the next unit too.

The arrays of `cost_model.placement_state`, for many tasks at once and in single precision. Nothing
is priced twice: `look` prices every device with the next unit, `settle` keeps what was priced.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from autoshard.envs.catalog import Ints, Larger, TableCatalog, TaskInstance
from autoshard.workload.step_price import StepPrice

STAGES = 3  # forward (with backward, where they are one), backward, both all-to-alls
KNOWN = STAGES + 2  # of a device: each stage, all compute and all-to-alls, their uncertainty
COST, DEVIATION = STAGES, STAGES + 1
_NOW, _JOINED = 0, 1  # as it is, and with the next unit
_ABSENT = -1  # memory of a device that an episode does not have


class EpisodeDevices:
    """Devices of several episodes; each episode has a task, and may have fewer devices.

    Args:
        deck: The units of all tasks.
        envs: Episodes side by side.
        max_devices: Most devices of a task.
    """

    def __init__(self, catalog: TableCatalog, envs: int, max_devices: int) -> None:
        by_device = envs, max_devices
        self.catalog, self.max_devices = catalog, max_devices
        self.exists = torch.zeros(by_device, dtype=torch.bool)
        self.capacity = torch.zeros(by_device, dtype=torch.int64)
        self.free = torch.zeros(by_device, dtype=torch.int64)
        self.left_after = torch.zeros(by_device, dtype=torch.int64)  # bytes, with the next unit
        self.devices = torch.ones(envs, dtype=torch.int64)
        self.room = torch.ones(by_device)  # the capacity again, to divide by
        self.room_share = torch.ones(by_device)  # of that of the mean device
        self.prices = torch.zeros(envs, len(fields(StepPrice)))  # a row an episode
        self.price = StepPrice.rows(self.prices)
        self.sums = torch.zeros(*by_device, *catalog.amounts.shape[1:])
        self.content = torch.zeros(*by_device, catalog.described.shape[1])
        self.columns = torch.zeros(by_device)
        self.known = torch.zeros(*by_device, 2, KNOWN)
        self._exchanges = False  # whether all-to-alls count in any episode
        self._pairs = torch.zeros(0, 2, dtype=torch.int64)

    @property
    def stages_ms(self) -> Tensor:
        """What each device spends in each stage: [envs, devices, STAGES]."""
        return self.known[:, :, _NOW, :STAGES]

    @property
    def joined_stages_ms(self) -> Tensor:
        """The same with the next unit."""
        return self.known[:, :, _JOINED, :STAGES]

    @property
    def cost_ms(self) -> Tensor:
        """What each device spends in all: [envs, devices]."""
        return self.known[:, :, _NOW, COST]

    @property
    def joined_ms(self) -> Tensor:
        """The same with the next unit."""
        return self.known[:, :, _JOINED, COST]

    @property
    def deviation(self) -> Tensor:
        """The relative uncertainty of that: [envs, devices]."""
        return self.known[:, :, _NOW, DEVIATION]

    @property
    def joined_deviation(self) -> Tensor:
        """The same with the next unit."""
        return self.known[:, :, _JOINED, DEVIATION]

    @property
    def plan_ms(self) -> Tensor:
        """Time of a step by each episode's objective, as far as its plan goes: [envs]."""
        return self.stages_ms.amax(1).sum(1)

    def begin(self, new: Tensor, instances: Sequence[TaskInstance]) -> Tensor:
        """Gives these episodes the empty devices of their tasks; returns the mean memory of a
        device: [new].
        """
        capacity = np.full((len(instances), self.max_devices), _ABSENT, np.int64)
        for row, instance in enumerate(instances):
            capacity[row, : len(instance.memory_bytes)] = instance.memory_bytes
        self.capacity[new] = torch.from_numpy(capacity)
        self.free[new] = self.capacity[new]
        self.exists[new] = self.capacity[new] != _ABSENT
        self.devices[new] = self.exists[new].sum(1)
        self.room[new] = self.capacity[new].float().clamp_min(1)
        mean_room = (self.room[new] * self.exists[new]).sum(1) / self.devices[new]
        self.room_share[new] = self.room[new] / mean_room[:, None]
        self._pairs = self.exists.nonzero()
        self._set_prices(new, instances)
        return mean_room

    def _set_prices(self, new: Tensor, instances: Sequence[TaskInstance]) -> None:
        flat: Ints = np.concatenate([instance.units for instance in instances])
        rows = np.repeat(np.arange(len(instances)), [len(instance.units) for instance in instances])
        columns = np.bincount(rows, self.catalog.columns.numpy()[flat], len(instances))
        found = []
        for instance, own in zip(instances, columns.tolist(), strict=True):
            larger = instance.larger or Larger(len(instance.memory_bytes), own)
            price = StepPrice.of(
                instance.objective, self.catalog.batch_size, larger.ranks, larger.columns
            )
            found.append(price.row)
        self.prices[new] = torch.tensor(found, dtype=self.prices.dtype)
        self._exchanges = bool(self.price.exchanges.any())

    def even_exchange_ms(self, envs: Tensor) -> Tensor:
        """All-to-alls of a device with as many columns as all have in the mean: [envs]."""
        even = StepPrice.rows(self.prices[envs])
        columns: Tensor = even.columns / even.ranks
        return even.exchange_stage(columns)[:, 0]

    def stages(self, forward: Tensor, backward: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
        """Returns what devices spend in each stage, each [envs, devices].

        Args:
            forward: Milliseconds of forward compute of all episodes' devices.
            backward: Milliseconds of backward compute.
            columns: Output columns.
        """
        compute = self.price.compute_stages(forward, backward)
        if not self._exchanges:
            return (*compute, torch.zeros_like(columns))
        return (*compute, self.price.exchange_stage(columns) * self.exists)

    def price_anew(self, envs: Tensor) -> None:
        """Prices the devices of these episodes from their sums."""
        forward, backward, deviation = (torch.zeros(self.exists.shape) for _ in range(3))
        if bool(self.columns[envs].any()):
            prices = self.catalog.price(self.sums)
            forward, backward = prices.forward_ms, prices.backward_ms
            deviation = prices.deviation
        stages = torch.stack(self.stages(forward, backward, self.columns), dim=-1)
        self.known[envs, :, _NOW, :STAGES] = stages[envs]
        self.known[envs, :, _NOW, COST] = self.stages_ms[envs].sum(2)
        self.known[envs, :, _NOW, DEVIATION] = deviation[envs]

    def look(self, amounts: Tensor, columns: Tensor, sizes: Tensor) -> None:
        """Prices every device with the next unit of its episode.

        Args:
            amounts: What the unit of each episode brings.
            columns: Its output columns, [envs].
            sizes: Its bytes, [envs].
        """
        if len(self._pairs) == self.exists.numel():
            joined = self.catalog.price(self.sums + amounts[:, None])
            forward, backward, deviation = joined.forward_ms, joined.backward_ms, joined.deviation
        else:  # what does not exist is not priced
            envs, devices = self._pairs.unbind(1)
            joined = self.catalog.price(self.sums[envs, devices] + amounts[envs])
            prices = torch.zeros(3, *self.exists.shape)
            found = (joined.forward_ms, joined.backward_ms, joined.deviation)
            prices[:, envs, devices] = torch.stack(found)
            forward, backward, deviation = prices.unbind(0)
        stages = self.stages(forward, backward, self.columns + columns[:, None])
        all_of_it = forward + backward + stages[-1]
        torch.stack([*stages, all_of_it, deviation], dim=-1, out=self.known[:, :, _JOINED])
        self.left_after = self.free - sizes[:, None]

    def settle(
        self, where: Tensor, amounts: Tensor, described: Tensor, columns: Tensor, sizes: Tensor
    ) -> None:
        """Puts units that were looked at on devices.

        Args:
            where: Devices, numbered over all episodes, different ones.
            amounts: What the unit of each brings.
            described: Those amounts that have names.
            columns: Output columns.
            sizes: Bytes.
        """
        self.sums.flatten(0, 1).index_add_(0, where, amounts)
        self.content.flatten(0, 1).index_add_(0, where, described)
        self.columns.view(-1).index_add_(0, where, columns)
        self.free.view(-1).index_add_(0, where, sizes, alpha=-1)
        known = self.known.flatten(0, 1)
        known[where, _NOW] = known[where, _JOINED]
