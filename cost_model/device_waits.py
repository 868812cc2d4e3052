"""Devices that are being filled: what each spends before each wait of a step."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model.device_sums import DeviceSums
from autoshard.cost_model.inputs import bundle_amounts
from autoshard.cost_model.network import DIRECTIONS
from autoshard.cost_model.scenarios import Pricing
from autoshard.workload import ShardingTask
from autoshard.workload.step_price import StepPrice
from autoshard.workload.terms import Bundle, Piece

Floats: TypeAlias = npt.NDArray[np.float64]
Whole: TypeAlias = npt.NDArray[np.int64]


class DeviceWaits:
    """Devices that are being filled, as `DeviceSums`, told by the waits of a task.

    Args:
        pricing: prices what devices compute.
        task: of which devices are filled.
        pieces: what is to be placed; pieces are numbers in it.
    """

    def __init__(self, pricing: Pricing, task: ShardingTask, pieces: Sequence[Piece]) -> None:
        self._price = StepPrice.of_task(task)
        self._pricing = pricing
        amounts = bundle_amounts(pricing.amounts, pieces)
        self._devices = DeviceSums(pricing, amounts, len(task.devices))
        self._columns = _columns(pieces)
        self._held = np.zeros(len(task.devices))  # columns of each device

    def extend(self, pieces: Sequence[Piece]) -> int:
        """Add pieces that are on no device yet; returns the number of the first."""
        self._columns = np.concatenate([self._columns, _columns(pieces)])
        return self._devices.extend(bundle_amounts(self._pricing.amounts, pieces))

    def fill(self, homes: Whole) -> None:
        """Put each piece on its device: [pieces]."""
        self._devices.fill(torch.from_numpy(homes))
        np.add.at(self._held, homes, self._columns)

    def put(self, piece: int, device: int) -> None:
        """Put a piece on a device."""
        self._devices.put(piece, device)
        self._held[device] += self._columns[piece]

    def take(self, piece: int, device: int) -> None:
        """Take a piece away from a device."""
        self._devices.take(piece, device)
        self._held[device] -= self._columns[piece]

    def beside(self, first: int = 0) -> Floats:
        """What the pieces from number `first` on bring to each wait beside others, in the mean:
        [pieces, waits].
        """
        alone = self._devices.amounts[first:, :, :DIRECTIONS].mean(1).double().numpy()
        stages = self._price.compute_stages(alone[:, 0], alone[:, 1])
        if self._price.exchanges:
            stages = (*stages, self._columns[first:] * self._price.column_ms())
        return np.stack(stages, axis=-1)

    def costs(self) -> Floats:
        """What each device spends: [devices, waits, scenarios]."""
        return self._stages(self._devices.prices(), self._held)

    def with_each(self, pieces: Whole) -> Floats:
        """What each device would spend with each piece more:
        [pieces, devices, waits, scenarios].
        """
        prices = self._devices.with_each(torch.from_numpy(pieces)).transpose(0, 1)
        return self._stages(prices, self._held + self._columns[pieces][:, None])

    def without(self, pieces: Whole, devices: Whole) -> Floats:
        """What the device of each piece would spend without it: [pieces, waits, scenarios]."""
        prices = self._devices.without(torch.from_numpy(pieces), torch.from_numpy(devices))
        return self._stages(prices, self._held[devices] - self._columns[pieces])

    def exchanged(self, out: Whole, devices: Whole, into: Whole) -> Floats:
        """What `devices` would spend if pieces `out` left them and `into` came:
        [pieces, waits, scenarios].
        """
        numbers = (torch.from_numpy(each) for each in (out, devices, into))
        columns = self._held[devices] - self._columns[out] + self._columns[into]
        return self._stages(self._devices.exchanged(*numbers), columns)

    def _stages(self, prices: Tensor, columns: Floats) -> Floats:
        """Returns what devices spend in each stage [..., stages, scenarios].

        Args:
            prices: Milliseconds of forward and backward, shape [..., scenarios, 2].
            columns: Output columns, shape [...].
        """
        ms = np.asarray(prices.double().numpy())
        stages = self._price.stages_ms(ms[..., 0], ms[..., 1], columns[..., None])
        return np.stack(np.broadcast_arrays(*stages), axis=-2)


def _columns(pieces: Sequence[Piece]) -> Floats:
    """That each piece brings to its device's output."""
    return np.array([float(Bundle.of(piece).columns) for piece in pieces])
