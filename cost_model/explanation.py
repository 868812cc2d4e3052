"""Why a plan takes as long as it does: the slowest device of each phase and its dearest slices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from autoshard.cost_model.inputs import sums_of_devices
from autoshard.cost_model.oracle import EstimatedCosts
from autoshard.workload import Objective, Piece, ShardingPlan, ShardingTask
from autoshard.workload.objective import PHASES

Floats = npt.NDArray[np.float64]

ALL_PHASES = "all phases"


@dataclass(frozen=True)
class PieceCost:
    """What a slice brings to its device, and which share of the device's milliseconds that is.

    It is the device's cost less its cost without the slice. Tables share what a device takes at
    all, and get in each other's way: so shares need not add up to 1.
    """

    piece: Piece
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
    pieces: tuple[PieceCost, ...]

    @property
    def is_exchange(self) -> bool:
        """Whether it is an all-to-all, for which columns count and not what is looked up."""
        return self.phase in PHASES[2:]


def slowest_by_phase(
    oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask
) -> tuple[PhaseCost, ...]:
    """All phases together, then each that takes any time, as the oracle's tables add up.

    What measuring a whole shard has told beyond its tables is left out: of the shard without one
    of them it says nothing.
    """
    oracle.check(task)
    plan.check_places(task)
    parts = _Parts(oracle, plan.placed(task), plan.num_devices, task.objective)
    phases = {ALL_PHASES: parts.all_ms.sum(1)}
    phases |= {name: parts.all_ms[:, number] for number, name in enumerate(PHASES)}
    found = []
    for name, devices_ms in phases.items():
        if not devices_ms.any():
            continue
        slowest = int(devices_ms.argmax())
        ms = float(devices_ms[slowest])
        brought = parts.brought_ms(slowest)
        each = brought.sum(1) if name == ALL_PHASES else brought[:, PHASES.index(name)]
        pieces = [
            PieceCost(piece, float(its), float(its) / ms)
            for piece, its in zip(parts.held(slowest), each, strict=True)
        ]
        pieces.sort(key=lambda one: -one.ms)
        found.append(PhaseCost(name, slowest, ms, float(devices_ms.mean()), tuple(pieces)))
    return tuple(found)


class _Parts:
    """What devices take in each phase, and their slices bring."""

    def __init__(
        self,
        oracle: EstimatedCosts,
        placed: Sequence[tuple[Piece, int]],
        count: int,
        objective: Objective,
    ) -> None:
        self._oracle = oracle
        self._objective = objective
        self._pieces = [piece for piece, _ in placed]
        self._homes = np.array([home for _, home in placed])
        self._amounts = oracle.amounts(self._pieces)
        self._sums = sums_of_devices(self._amounts, self._homes, count)
        widths = [piece.output_width for piece in self._pieces]
        self._dims = np.bincount(self._homes, widths, count).astype(int)
        exchanges = self._exchange(self._dims)
        self.all_ms = np.concatenate([self._compute_ms(self._sums), exchanges], 1)

    def held(self, device: int) -> list[Piece]:
        """The slices of a device."""
        return [self._pieces[number] for number in np.flatnonzero(self._homes == device)]

    def brought_ms(self, device: int) -> Floats:
        """What each slice of a device brings to it: [slices, phases]."""
        numbers = np.flatnonzero(self._homes == device)
        computing = self._compute_ms(self._sums[device] - self._amounts[numbers])
        exchanges = np.zeros((len(numbers), 2))  # a device without any may still wait for others
        for number, piece in enumerate(self.held(device)):
            fewer = self._dims.copy()
            fewer[device] -= piece.output_width
            exchanges[number] = self._exchange(fewer)[device]
        return np.asarray(self.all_ms[device] - np.concatenate([computing, exchanges], 1))

    def _compute_ms(self, sums: Tensor) -> Floats:
        """Returns milliseconds forward and backward by sums of amounts: [..., 2]."""
        return np.asarray(self._oracle.model.compute.means(sums.float()).double().numpy())

    def _exchange(self, dims: npt.NDArray[np.int64]) -> Floats:
        """All-to-alls of devices with so many columns [devices, 2]; 0 where they are not known."""
        found = self._oracle.exchange(dims.tolist(), self._objective)
        return np.repeat(np.array(found or [0.0] * len(dims))[:, None], 2, axis=1)
