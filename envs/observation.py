"""What a player sees: one vector of named parts, relative to the task's own scale.

Work and memory are told as shares of an even share of the task, milliseconds as multiples of
`BatchedPlacementEnv.even_split_ms`, what each device would cost if work were spread evenly.
So a player who has learned on some numbers of tables and devices, on one machine, can play others.
"""

from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model.network import DIRECTIONS, TERMS
from autoshard.envs.batched_env import BatchedPlacementEnv
from autoshard.envs.devices import STAGES

Floats = npt.NDArray[np.float32]
Array = TypeVar("Array", Tensor, Floats)

DESCRIBED = DIRECTIONS + len(TERMS) + 1  # amounts of a table that have a name
TABLE = DESCRIBED + 3  # cost alone, its uncertainty, size
# Of a device beside what it holds. Costs are over the pace, memory over what there is.
DEVICE_PARTS = (
    *(f"stage_{number}" for number in range(STAGES)), "cost", "deviation",
    *(f"joined_stage_{number}" for number in range(STAGES)), "joined", "joined_deviation",
    "used", "left_after", "room", "safe", "plan_after", "soft_after",
)  # fmt: skip
DEVICE = DESCRIBED + len(DEVICE_PARTS)
REST = DESCRIBED + 2  # cost alone, share of the memory that is left
SPLIT_PARTS = 5  # whether it may be, what it adds, a half's cost and width, what was added so far
OBJECTIVE = 2 + STAGES  # which stages are apart and count; the plan so far, by stage
PROGRESS = 3  # share of units placed, number of units and of devices
_TABLES, _DEVICES = 5.0, 3.0  # logarithms of about 150 tables and 20 devices: large tasks
_LEAST = 1e-24  # of a sum of such powers
_SOFT = 12.0  # power of the norm of devices that is followed: their maximum sees only one of them


class Layout:
    """Where each part of an observation lies. Arrays are [..., size].

    Parts: `table` [TABLE], the unit being placed; `devices` [max_devices, DEVICE]; `exists` and
    `allowed` [max_devices], 0 or 1; `halving` [HALVING], whether the unit may be halved and what
    comes of it; `rest` [REST], all that is still to be placed; `objective` [OBJECTIVE], what the
    plan minimises; `progress` [PROGRESS].
    """

    def __init__(self, max_devices: int) -> None:
        self.max_devices = max_devices
        self.shapes: dict[str, tuple[int, ...]] = {
            "table": (TABLE,),
            "devices": (max_devices, DEVICE),
            "exists": (max_devices,),
            "allowed": (max_devices,),
            "split": (SPLIT_PARTS,),
            "rest": (REST,),
            "objective": (OBJECTIVE,),
            "progress": (PROGRESS,),
        }

    @property
    def size(self) -> int:
        """Numbers in an observation."""
        return sum(prod(shape) for shape in self.shapes.values())

    def split(self, observations: Array) -> dict[str, Array]:
        """Views of the parts."""
        parts, start = {}, 0
        for name, shape in self.shapes.items():
            flat = observations[..., start : start + prod(shape)]
            parts[name] = flat.reshape(*observations.shape[:-1], *shape)
            start += prod(shape)
        return parts

    def observe(self, episodes: BatchedPlacementEnv) -> Tensor:
        """What the player of each seat sees: [seats, size], new memory."""
        return torch.cat([part.flatten(1) for part in self.parts(episodes).values()], dim=1)

    def parts(self, episodes: BatchedPlacementEnv) -> dict[str, Tensor]:
        """The same by its parts."""
        told = episodes.told
        devices, known = episodes.devices.float(), episodes.known / episodes.known_scale
        now, then = known.unbind(2)
        slowest = now[..., :STAGES].amax(1)
        after = torch.maximum(then[..., :STAGES], slowest[:, None]).sum(2)
        free = episodes.free.float()
        left, after_it = free / episodes.room, episodes.left_after / episodes.room
        of_devices = [
            episodes.content / episodes.even[:, None],
            now,
            then,
            torch.stack(
                [
                    1 - left,
                    after_it.clamp_min(-1),
                    episodes.room_share,
                    episodes.safe.float(),
                    after,
                    _soft(known[..., :STAGES]),
                ],
                dim=2,
            ),
        ]
        may, still_free = episodes.splittable[:, None].float(), (free * episodes.exists).sum(1)
        rest = torch.stack(
            [episodes.rest_ms / episodes.all_ms, episodes.rest_bytes / still_free.clamp_min(1)], 1
        )
        progress = [
            1 - episodes.left_share(),
            episodes.count.log() / _TABLES,
            devices.log() / _DEVICES,
        ]
        return {
            "table": told[:, :TABLE],
            "devices": torch.cat(of_devices, dim=2).mul_(episodes.exists[..., None]),
            "exists": episodes.exists.float(),
            "allowed": episodes.allowed.float(),
            "split": torch.cat(
                [may, may * told[:, TABLE:], (episodes.added_ms / episodes.all_ms)[:, None]], dim=1
            ),
            "rest": torch.cat([episodes.rest / (episodes.even * devices[:, None]), rest], dim=1),
            "objective": torch.cat(
                [episodes.price.separate, (episodes.price.exchanges > 0).float(), slowest], dim=1
            ),
            "progress": torch.stack(progress, dim=1),
        }


def _soft(waits: Tensor) -> Tensor:
    """A norm of what devices spend before each wait, in sum over the waits, where the current unit
    goes to each device: [seats, devices]. It also falls where devices even out that are not the
    slowest.

    Args:
        waits: now and then, over the pace: [seats, devices, 2, STAGES].
    """
    squares = waits * waits
    fourths = squares * squares
    now, then = (fourths * fourths * fourths).unbind(2)  # to the power _SOFT
    sums = now.sum(1, keepdim=True) - now + then
    return (sums.clamp_min(_LEAST) ** (1 / _SOFT)).sum(2)
