"""What runs inside the actor of a rank."""

import gc
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from autoshard.benchmark.backends.base import DeviceBackend, Place
from autoshard.benchmark.core_lock import this_pool
from autoshard.benchmark.process import at_usual_priority

# Whoever started the ranks watches them and ends all if one is lost, so this ends nothing sooner.
_TIMEOUT = timedelta(hours=1)
_PATIENCE_S = 60.0  # for a device that others hold: a pool measures for seconds


class RehearsalRank:
    """A rank of a rehearsal. It alone loads torch.

    Args:
        rank: its number.
        ranks: of all.
        backend: of the kind of its device.
        place: its device, with the memory that this rank has on it.
        claims: whether it claims the device: of ranks that share one, the first does.
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
        """Host and port where the ranks find each other."""
        from autoshard.benchmark.exchange import Rendezvous

        self._rendezvous = Rendezvous()
        return self._rendezvous.host, self._rendezvous.port

    def join(self, host: str, port: int) -> None:
        """Meet the other ranks."""
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
        """Make the model of a task by a plan; the other ranks do so at the same time."""
        from autoshard.benchmark.rehearsal.training import Training

        self._trainings[name] = Training(task, plan, self._backend)
        gc.collect()
        gc.freeze()  # later collections look at what steps make: 1 ms instead of 130

    def train(self, name: str, steps: int) -> Any:
        """So many steps, as each of them went."""
        claim = self._backend.claim(f"a rehearsal in {this_pool()}", _PATIENCE_S)
        with claim if self._claims else nullcontext():
            return self._trainings[name].run(steps)

    def parts(self, name: str) -> Any:
        """What this rank holds of tables."""
        return list(self._trainings[name].parts())

    def forget(self, name: str) -> None:
        """Drop a model."""
        gc.unfreeze()
        del self._trainings[name]
        gc.collect()

    def peak_bytes(self) -> int:
        """The most memory that this process has ever taken: of the GPU, or of the machine."""
        return self._backend.peak_bytes()
