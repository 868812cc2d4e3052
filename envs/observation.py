"""Observations: one vector of named parts, relative to the scale of the task.

Work and memory are shares of an even share, and milliseconds are multiples of `even_split_ms`. A
policy thus transfers to other numbers of tables and devices, and to other hardware.
"""

from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model.networks.network import DIRECTIONS, TERMS
from autoshard.envs.batched_env import BatchedPlacementEnv
from autoshard.envs.devices import STAGES, powers, root_of
from autoshard.envs.offers import OPTION_PARTS
from autoshard.envs.options import OPTION_KINDS

Floats = npt.NDArray[np.float32]
Array = TypeVar("Array", Tensor, Floats)

DESCRIBED = DIRECTIONS + len(TERMS) + 1  # amounts of a table that have a name
TABLE = DESCRIBED + 3  # those; cost alone, its uncertainty, memory
DEVICE_PARTS = (
    *(f"stage_{number}" for number in range(STAGES)), "cost", "deviation",
    *(f"joined_stage_{number}" for number in range(STAGES)), "joined", "joined_deviation",
    "used", "free_after", "capacity_share", "safe", "plan_after", "soft_after",
)  # fmt: skip
DEVICE = DESCRIBED + len(DEVICE_PARTS)  # amounts that the device holds, and those
REST = DESCRIBED + 2  # amounts; share of the cost, share of the free memory
OBJECTIVE = 2 + STAGES  # separate stages?, all-to-alls?; time of the partial plan by stage
# Share of units placed, log number of units and of devices, additional cost by splits so far.
PROGRESS = 4
_LOG_TABLES, _LOG_DEVICES = 5.0, 3.0  # logarithms for a large task: about 150 tables and 20 devices


class Layout:
    """Named parts of an observation, and their shapes.

    `table` [TABLE]: the current unit. `devices` [max_devices, DEVICE]: each device, now and with
    the current unit. `exists`, `allowed` [max_devices]: masks. `options`
    [OPTION_KINDS, OPTION_PARTS]: what each option would do. `rest` [REST]: units that are not
    placed. `objective` [OBJECTIVE]: stages of the objective, and the partial plan. `progress`
    [PROGRESS].

    Args:
        max_devices: Number of devices, with padding.
    """

    def __init__(self, max_devices: int) -> None:
        self.max_devices = max_devices
        self.shapes: dict[str, tuple[int, ...]] = {
            "table": (TABLE,),
            "devices": (max_devices, DEVICE),
            "exists": (max_devices,),
            "allowed": (max_devices,),
            "options": (len(OPTION_KINDS), len(OPTION_PARTS)),
            "rest": (REST,),
            "objective": (OBJECTIVE,),
            "progress": (PROGRESS,),
        }

    @property
    def size(self) -> int:
        """Length of an observation."""
        return sum(prod(shape) for shape in self.shapes.values())

    def split(self, observations: Array) -> dict[str, Array]:
        """Returns views of the parts of observations [..., size], each [..., *shape]."""
        parts, start = {}, 0
        for name, shape in self.shapes.items():
            flat = observations[..., start : start + prod(shape)]
            parts[name] = flat.reshape(*observations.shape[:-1], *shape)
            start += prod(shape)
        return parts

    def observe(self, episodes: BatchedPlacementEnv) -> Tensor:
        """Returns the observations of all episodes, [envs, size], in new memory."""
        return torch.cat([part.flatten(1) for part in self.parts(episodes).values()], dim=1)

    def parts(self, episodes: BatchedPlacementEnv) -> dict[str, Tensor]:
        """Returns the observations of all episodes by part, each [envs, *shape]."""
        unit = episodes.unit_features
        num_devices, priced = episodes.num_devices.float(), episodes.priced / episodes.priced_scale
        now, joined = priced.unbind(2)
        slowest = now[..., :STAGES].amax(1)
        plan_after = torch.maximum(joined[..., :STAGES], slowest[:, None]).sum(2)
        free = episodes.free_bytes.float()
        memory = [
            1 - free / episodes.capacity_divisor,
            (episodes.free_after / episodes.capacity_divisor).clamp_min(-1),
            episodes.capacity_share,
            episodes.safe.float(),
            plan_after,
            _soft_plan_after(priced[..., :STAGES]),
        ]
        described = episodes.described / episodes.even_share[:, None]
        devices = torch.cat([described, now, joined, torch.stack(memory, dim=2)], dim=2)
        free_bytes = (free * episodes.exists).sum(1).clamp_min(1)
        rest = [episodes.rest_ms / episodes.all_ms, episodes.rest_bytes / free_bytes]
        rest_described = episodes.rest / (episodes.even_share * num_devices[:, None])
        price = episodes.price
        progress = [
            1 - episodes.rest_share,
            episodes.count.log() / _LOG_TABLES,
            num_devices.log() / _LOG_DEVICES,
            episodes.added_ms / episodes.all_ms,
        ]
        return {
            "table": unit[:, :TABLE],
            "devices": devices.mul_(episodes.exists[..., None]),
            "exists": episodes.exists.float(),
            "allowed": episodes.allowed.float(),
            "options": episodes.offers,
            "rest": torch.cat([rest_described, torch.stack(rest, 1)], dim=1),
            "objective": torch.cat([price.separate, (price.exchanges > 0).float(), slowest], dim=1),
            "progress": torch.stack(progress, dim=1),
        }


def _soft_plan_after(stages: Tensor) -> Tensor:
    """Returns the step time with the current unit on each device, by norms over devices:
    [envs, devices].

    Args:
        stages: Times now and with the unit, relative: [envs, devices, 2, STAGES].
    """
    now, joined = powers(stages).unbind(2)
    sums = now.sum(1, keepdim=True) - now + joined
    return root_of(sums).sum(2)
