"""What a player sees: one vector of named parts, relative to the task's own scale.

Work and memory are told as shares of an even share of the task, milliseconds as multiples of the
task's pace (`ShardingGame.pace_ms`, what each device would cost if all work were spread evenly).
So a player who has learned on some numbers of tables and devices, on one machine, can play others.
"""

from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model.network import DIRECTIONS, TERMS
from autoshard.envs.game import ShardingGame
from autoshard.envs.stakes import WAITS

Floats = npt.NDArray[np.float32]
Array = TypeVar("Array", Tensor, Floats)

DESCRIBED = DIRECTIONS + len(TERMS) + 1  # amounts of a table that have a name
TABLE = DESCRIBED + 3  # cost alone, its uncertainty, size
# Of a device beside what it holds. Costs are over the pace, memory over what there is.
DEVICE_PARTS = (
    "cost", "deviation", "joined", "joined_deviation", "used", "left_after", "room", "safe",
    *(f"wait_{number}" for number in range(WAITS)),
    *(f"joined_wait_{number}" for number in range(WAITS)),
    "plan_after", "soft_after",
)  # fmt: skip
DEVICE = DESCRIBED + len(DEVICE_PARTS)
REST = DESCRIBED + 2  # cost alone, share of the memory that is left
HALVING = 5  # whether it may be, what it adds, a half's cost and width, what was added so far
STAKES = 2 + WAITS  # of the objective: what waits are apart, counted; the plan so far, by wait
PROGRESS = 3  # share of pieces placed, number of pieces and of devices
_TABLES, _DEVICES = 5.0, 3.0  # logarithms of about 150 tables and 20 devices: large tasks
_COLUMNS = 6.0  # and of 64 columns, to base 2
_LEAST = 1e-24  # of a sum of such powers
_SOFT = 12.0  # power of the norm of devices that is followed: their maximum sees only one of them


class Layout:
    """Where each part of an observation lies. Arrays are [..., size].

    Parts: `table` [TABLE], the piece being placed; `devices` [max_devices, DEVICE]; `exists` and
    `allowed` [max_devices], 0 or 1; `halving` [HALVING], whether the piece may be halved and what
    comes of it; `rest` [REST], all that is still to be placed; `stakes` [STAKES], what the plan is
    to have little of; `progress` [PROGRESS].
    """

    def __init__(self, max_devices: int) -> None:
        self.max_devices = max_devices
        self.shapes: dict[str, tuple[int, ...]] = {
            "table": (TABLE,),
            "devices": (max_devices, DEVICE),
            "exists": (max_devices,),
            "allowed": (max_devices,),
            "halving": (HALVING,),
            "rest": (REST,),
            "stakes": (STAKES,),
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

    def observe(self, game: ShardingGame) -> Tensor:
        """What the player of each seat sees: [seats, size], new memory."""
        deck, table = game.deck, game.current
        pace, even, room = game.pace_ms[:, None], game.even, game.room
        free, size = game.free.float(), deck.sizes[table].float()[:, None]
        left = (free * game.exists).sum(1).clamp_min(1)
        devices, slowest = game.devices.float(), game.waits_ms.amax(1)
        after = torch.maximum(game.joined_waits_ms, slowest[:, None]).sum(2)
        pieces = [
            torch.cat(
                [
                    deck.described[table] / even,
                    deck.alone_ms[table, None] / pace,
                    deck.doubt[table, None],
                    size / game.mean_room[:, None],
                ],
                dim=1,
            ),
            torch.cat(
                [
                    game.content / even[:, None],
                    torch.stack(
                        [
                            game.cost_ms / pace,
                            game.deviation,
                            game.joined_ms / pace,
                            game.joined_deviation,
                            1 - free / room,
                            ((free - size) / room).clamp_min(-1),
                            room / game.mean_room[:, None],
                            game.safe.float(),
                        ],
                        dim=2,
                    ),
                    game.waits_ms / pace[..., None],
                    game.joined_waits_ms / pace[..., None],
                    torch.stack([after / pace, self._soft_after(game, pace)], dim=2),
                ],
                dim=2,
            )
            .mul_(game.exists[..., None])
            .flatten(1),
            game.exists.float(),
            game.allowed.float(),
            self._halving(game, pace[:, 0]),
            game.rest / (even * devices[:, None]),
            torch.stack([game.rest_ms / game.all_ms, game.rest_bytes / left], dim=1),
            torch.stack([game.stakes.apart, game.stakes.counted], dim=1),
            slowest / pace,
            torch.stack(
                [
                    1 - game.left_share(),
                    game.count.log() / _TABLES,
                    devices.log() / _DEVICES,
                ],
                dim=1,
            ),
        ]
        return torch.cat(pieces, dim=1)

    @staticmethod
    def _soft_after(game: ShardingGame, pace: Tensor) -> Tensor:
        """A norm of what devices spend before each wait, in sum over the waits, where the current
        piece goes to each device: [seats, devices]. It also falls where devices even out that are
        not the slowest.
        """
        now, then = (
            (some / pace[..., None]) ** _SOFT for some in (game.waits_ms, game.joined_waits_ms)
        )
        norms = (now.sum(1, keepdim=True) - now + then).clamp_min(_LEAST) ** (1 / _SOFT)
        return norms.sum(2)

    def _halving(self, game: ShardingGame, pace: Tensor) -> Tensor:
        """What halving the current piece is about: [seats, HALVING]."""
        deck, piece = game.deck, game.current
        first, second = deck.halves[piece].clamp_min(0).unbind(1)
        halves = deck.alone_ms[first] + deck.alone_ms[second]
        may = game.halvable.float()
        return torch.stack(
            [
                may,
                may * (halves - deck.alone_ms[piece]) / pace,
                may * deck.alone_ms[second] / pace,
                may * deck.widths[second].log2() / _COLUMNS,
                game.added_ms / game.all_ms,
            ],
            dim=1,
        )
