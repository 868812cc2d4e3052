"""Why a plan takes as long as it does: the slowest device of each phase and its dearest slices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from autoshard.benchmark.plan_cost import PHASES
from autoshard.cost_model.compute import Prices
from autoshard.cost_model.oracle import EstimatedCosts
from autoshard.workload import ShardingPlan, ShardingTask, TableSlice

Floats = npt.NDArray[np.float64]

ALL_PHASES = "all phases"
_DIRECTIONS = 2  # of computing, and of the all-to-all


@dataclass(frozen=True)
class SliceCost:
    """What a slice brings to its device, and which share of the device's milliseconds that is.

    It is the device's cost less its cost without the slice. Tables share what a device takes at
    all, and get in each other's way: so shares need not add up to 1.
    """

    piece: TableSlice
    ms: float
    share: float


@dataclass(frozen=True)
class PhaseCost:
    """A phase of a step: the device that is slowest in it, its slices, the dearest first.

    `phase` is one of `PHASES`, or all of them together.
    """

    phase: str
    device: int
    ms: float
    mean_ms: float
    slices: tuple[SliceCost, ...]


def slowest_by_phase(
    oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask
) -> tuple[PhaseCost, ...]:
    """All phases together, then each that takes any time, as the oracle's tables add up.

    What measuring a whole shard has told beyond its tables is left out: of the shard without one
    of them it says nothing.
    """
    oracle.check(task)
    plan.check_places(task)
    placed = sorted(plan.placed(task), key=lambda one: one[1])
    pieces = [piece for piece, _ in placed]
    homes = np.array([device for _, device in placed])
    costs = _computing(oracle, pieces, homes, plan.num_devices)
    exchanges = _exchanging(oracle, pieces, homes, plan.num_devices)
    of_devices, without = (np.concatenate(both, 1) for both in zip(costs, exchanges, strict=True))
    brought = of_devices[homes] - without  # [slices, phases]
    told = [(ALL_PHASES, of_devices.sum(1), brought.sum(1))]
    told += [(name, of_devices[:, n], brought[:, n]) for n, name in enumerate(PHASES)]
    return tuple(_phase(*each, pieces, homes) for each in told if each[1].any())


def _phase(
    name: str, devices_ms: Floats, brought_ms: Floats, pieces: Sequence[TableSlice], homes: Floats
) -> PhaseCost:
    slowest = int(devices_ms.argmax())
    ms = float(devices_ms[slowest])
    mine = np.flatnonzero(homes == slowest)
    dearest = mine[np.argsort(-brought_ms[mine], kind="stable")]
    slices = tuple(SliceCost(pieces[n], float(brought_ms[n]), float(brought_ms[n]) / ms)
                   for n in dearest)  # fmt: skip
    return PhaseCost(name, slowest, ms, float(devices_ms.mean()), slices)


def _computing(
    oracle: EstimatedCosts, pieces: Sequence[TableSlice], homes: Floats, count: int
) -> tuple[Floats, Floats]:
    """Forward and backward of devices, and of each slice's device without it: [..., 2]."""
    devices, numbers = oracle.devices(pieces, count), torch.arange(len(pieces))
    there = torch.from_numpy(homes)
    devices.fill(there)
    return _both(devices.prices()), _both(devices.without(numbers, there))


def _both(prices: Prices) -> Floats:
    ms = torch.stack([prices.forward_ms, prices.backward_ms], -1)
    return np.asarray(ms.double().numpy())


def _exchanging(
    oracle: EstimatedCosts, pieces: Sequence[TableSlice], homes: Floats, count: int
) -> tuple[Floats, Floats]:
    """The same of the all-to-alls; nothing where they are not known."""
    widths = np.array([piece.output_width for piece in pieces])
    dims = np.bincount(homes, widths, count).astype(int)
    if oracle.exchange(dims.tolist()) is None:
        return np.zeros((count, _DIRECTIONS)), np.zeros((len(pieces), _DIRECTIONS))
    known: dict[tuple[int, int], Floats] = {}  # by device, and columns that it has less
    without = []
    for home, width in zip(homes.tolist(), widths.tolist(), strict=True):
        if (home, width) not in known:
            fewer = dims.copy()
            fewer[home] -= width
            known[home, width] = _exchange(oracle, fewer)[home]
        without.append(known[home, width])
    return _exchange(oracle, dims), np.stack(without)


def _exchange(oracle: EstimatedCosts, dims: npt.NDArray[np.int64]) -> Floats:
    """Milliseconds [devices, 2] of devices with so many columns."""
    found = oracle.exchange(dims.tolist())
    assert found is not None
    return np.array([found.forward_ms, found.backward_ms]).T
