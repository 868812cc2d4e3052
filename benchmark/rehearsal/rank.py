"""The actor of a rank."""

import gc
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from autoshard.benchmark.backends.base import DeviceBackend, Place
from autoshard.benchmark.core_lock import this_pool
from autoshard.benchmark.process import at_usual_priority

_TIMEOUT = timedelta(hours=1)  # `RankGroup` ends all ranks if one is lost, so this need not
_PATIENCE_S = 60.0  # for a device that others hold: a pool measures for seconds


class RehearsalRank:
    """A rank of a rehearsal. It alone loads torch.

    Args:
        rank: Number of the rank.
        ranks: Number of ranks.
        backend: Backend of its device.
        place: Its device, with the memory of this rank.
        claims: Whether it claims the device: of ranks that share one, the first does.
    """

    def __init__(
        self, rank: int, ranks: int, backend: DeviceBackend, place: Place, claims: bool
    ) -> None:
        at_usual_priority()
        self._rank, self._ranks = rank, ranks
        self._backend, self._claims = backend, claims
        backend.bind(place)
        self._trainings: dict[str, Any] = {}

    def open_rendezvous(self) -> tuple[str, int]:
        """Returns host and port where the ranks meet."""
        from autoshard.benchmark.exchange import Rendezvous

        self._rendezvous = Rendezvous()
        return self._rendezvous.host, self._rendezvous.port

    def join(self, host: str, port: int) -> None:
        """Joins the process group of all ranks."""
        import torch.distributed as dist

        store = dist.TCPStore(host, port, is_master=False)
        dist.init_process_group(
            self._backend.collectives,
            store=store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=_TIMEOUT,
        )

    def prepare(self, name: str, task: Any, plan: Any) -> None:
        """Builds the model of a task by a plan, at the same time as the other ranks."""
        from autoshard.benchmark.rehearsal.training import Training

        self._trainings[name] = Training(task, plan, self._backend)
        gc.collect()
        gc.freeze()  # later collections walk objects of steps only: 1 ms instead of 130

    def train(self, name: str, steps: int) -> Any:
        """Returns the results of so many steps."""
        claim = self._backend.claim(f"a rehearsal in {this_pool()}", _PATIENCE_S)
        with claim if self._claims else nullcontext():
            return self._trainings[name].run(steps)

    def parts(self, name: str) -> Any:
        """Returns the parts of tables on this rank."""
        return list(self._trainings[name].parts())

    def forget(self, name: str) -> None:
        """Deletes a model."""
        gc.unfreeze()
        del self._trainings[name]
        gc.collect()

    def peak_bytes(self) -> int:
        """Returns the peak memory of this process: of the GPU, or of the machine."""
        return self._backend.peak_bytes()
