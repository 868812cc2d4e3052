"""Devices that are being filled: what each costs, and would cost with one table more or less."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

_AT_ONCE = 256  # items added up together: in scenarios all of them would take much memory

Answer = TypeVar("Answer", covariant=True)


class Pricing(Protocol[Answer]):
    """What prices shards by sums of their amounts [..., amounts of one table's shape]."""

    def price(self, sums: Tensor) -> Answer:
        """The prices."""
        ...


class DeviceSums(Generic[Answer]):
    """Slices on devices, priced without looking at a slice twice.

    Slices are embedded once. Then each device is a sum of amounts, and any change of its content
    one addition; all changes of one kind are priced together.

    Args:
        pricing: prices them.
        amounts: of what is to be placed [items, members, amounts]; items are numbers in it.
        num_devices: devices, empty at first.
    """

    def __init__(self, pricing: Pricing[Answer], amounts: Tensor, num_devices: int) -> None:
        self._pricing = pricing
        self.amounts = amounts
        # In double precision, so that what was put and taken again leaves nothing behind.
        self._sums = torch.zeros(num_devices, *amounts.shape[1:], dtype=torch.float64)

    def extend(self, amounts: Tensor) -> int:
        """Add items that are on no device yet; returns the number of the first."""
        first = len(self.amounts)
        self.amounts = torch.cat([self.amounts, amounts])
        return first

    def fill(self, devices: Tensor) -> None:
        """Put each item on its device: [items]."""
        parts = (torch.split(each, _AT_ONCE) for each in (devices, self.amounts))
        for homes, amounts in zip(*parts, strict=True):
            self._sums.index_add_(0, homes, amounts.double())

    def put(self, item: int, device: int) -> None:
        """Put a slice on a device."""
        self._sums[device] += self.amounts[item]

    def take(self, item: int, device: int) -> None:
        """Take a slice away from a device."""
        self._sums[device] -= self.amounts[item]

    @property
    def sums(self) -> Tensor:
        """Sums of amounts of each device [devices, members, amounts]."""
        return self._sums.float()

    def prices(self) -> Answer:
        """What each device costs: [devices]."""
        return self._pricing.price(self.sums)

    def alone(self) -> Answer:
        """What each item costs on a device of its own: [items]."""
        return self._pricing.price(self.amounts)

    def with_each(self, items: Sequence[int] | Tensor) -> Answer:
        """What each device would cost with each item more: [devices, items]."""
        return self._pricing.price(self.sums[:, None] + self.amounts[items])

    def without(self, items: Sequence[int] | Tensor, devices: Tensor) -> Answer:
        """What the device of each item would cost without it: [items]."""
        return self._pricing.price((self._sums[devices] - self.amounts[items]).float())

    def exchanged(self, out: Tensor, devices: Tensor, into: Tensor) -> Answer:
        """What `devices` would cost if items `out` left them and `into` came: their shape."""
        return self._pricing.price(
            (self._sums[devices] - self.amounts[out] + self.amounts[into]).float()
        )
