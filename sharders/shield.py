"""Never a dead end where a packing is known: what tight memory needs of whoever places tables."""

from collections.abc import Sequence

from autoshard.envs import ShardingGame
from autoshard.workload.packing import first_fit_decreasing


class Shield:
    """Lets a player place tables as it likes as long as all that are to come can be packed.

    It always knows one packing of them, so there is always a device that it admits.

    Args:
        game: already dealt, nothing placed yet.
        seat: whose game is shielded.
    """

    def __init__(self, game: ShardingGame, seat: int) -> None:
        count, devices = int(game.count[seat]), int(game.devices[seat])
        self._sizes = game.deck.sizes[game.order[seat, :count]].tolist()
        self._free = game.free[seat, :devices].tolist()
        self._packing = first_fit_decreasing(self._sizes, self._free)

    @property
    def holds(self) -> bool:
        """False if no packing was found: then it cannot help."""
        return self._packing is not None

    def choose(self, preferred: Sequence[int]) -> int:
        """The first of the devices, best first, after which the other tables can be packed."""
        assert self._packing is not None
        size, rest = self._sizes[0], self._sizes[1:]
        known = self._packing[0]
        for device in preferred:
            if self._free[device] < size:
                continue
            self._free[device] -= size
            packing = first_fit_decreasing(rest, self._free)
            if packing is not None:
                self._sizes, self._packing = rest, packing
                return device
            self._free[device] += size
        self._free[known] -= size
        self._sizes, self._packing = rest, self._packing[1:]
        return known
