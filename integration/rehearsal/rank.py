"""The actor of a rank."""

import gc
import math
import os
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from statistics import fmean
from typing import TYPE_CHECKING, Any

from autoshard.benchmark.backends.base import DeviceBackend, Place
from autoshard.benchmark.machine.device_lock import this_pool
from autoshard.benchmark.machine.process import at_usual_priority
from autoshard.benchmark.operator.reference import reference_operators
from autoshard.benchmark.rehearsals.times import Loop

if TYPE_CHECKING:  # it loads torch
    from autoshard.integration.rehearsal.collectives import Part

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
        self._name = backend.name_of(place)
        self._trainings: dict[str, Any] = {}
        self._turns: Any = None
        self._drawn_for: Any = None

    def device_name(self) -> str:
        """Returns the name of the device that it got."""
        return self._name

    def free_bytes(self) -> int:
        """Returns the memory that the device has left."""
        return self._backend.free_bytes()

    def make(self) -> tuple[str, str]:
        """Returns hardware, and versions of libraries."""
        from torchrec import __version__

        from autoshard.benchmark.operator import fbgemm

        return self._backend.fingerprint(), f"{fbgemm.library_versions()}, torchrec {__version__}"

    def open_rendezvous(self) -> tuple[str, int]:
        """Returns host and port where the ranks meet."""
        from autoshard.benchmark.operator.exchange import Rendezvous

        self._rendezvous = Rendezvous()
        return self._rendezvous.host, self._rendezvous.port

    def join(self, host: str, port: int, in_turns: bool, clears_caches: bool) -> None:
        """Joins the process group of all ranks, which compute in turns or all at once."""
        import torch.distributed as dist

        from autoshard.integration.rehearsal.collectives import RecordedGroup, TurnsBackend
        from autoshard.integration.rehearsal.phases import Phases
        from autoshard.integration.rehearsal.turns import Turns

        store = dist.TCPStore(host, port, is_master=False)
        rank, ranks = self._rank, self._ranks
        references = reference_operators(self._backend)
        self._watch = self._backend.stopwatch(
            flush=in_turns and clears_caches, references=references
        )
        self._phases = Phases(self._watch, holds=in_turns and not self._backend.is_shared)
        if in_turns:
            self._turns = Turns(
                store,
                rank,
                ranks,
                lambda: self._watch.clear_cache(math.inf),
                self._backend.synchronize,
            )

        def group(options: Any, _: Any) -> RecordedGroup:
            own, size = options.group_rank, options.group_size
            members = list(options.global_ranks_in_group) or list(range(ranks))
            part: Part | None = None
            if size < ranks:  # TorchRec's groups of a node, and of ranks with one place in each
                is_node = members == list(range(members[0], members[0] + size))
                part = "inside" if is_node else "between"
            if in_turns:
                inner: Any = TurnsBackend(self._turns, members)
            else:
                inner = self._backend.process_group(options.store, own, size, _TIMEOUT)
            return RecordedGroup(inner, own, size, self._phases, part)

        devices = ["cpu", "cuda"]
        dist.Backend.register_backend("recorded", group, extended_api=True, devices=devices)
        dist.init_process_group("recorded", store=store, rank=rank, world_size=ranks)

    def prepare(self, name: str, task: Any, plan: Any, loop: Loop, hot: bool) -> None:
        """Builds the model of a task by a plan, at the same time as the other ranks.

        `hot` as for `draw_batch`.
        """
        from autoshard.integration.rehearsal.training import Training, draw_batches

        self._set_nodes(plan, task)

        self._backend.reset_peak()
        drawn_for = (task.tables, task.batch_size, hot)
        if self._drawn_for != drawn_for:  # batches are the same for all plans of a task
            self._batches = draw_batches(task, self._backend.device, hot)
            self._drawn_for = drawn_for
        self._trainings[name] = Training(
            task, plan, self._backend, self._phases, self._batches, loop
        )
        gc.collect()
        gc.freeze()  # later collections walk objects of steps only: 1 ms instead of 130

    def _set_nodes(self, plan: Any, task: Any) -> None:
        """Tells TorchRec the nodes of tables that are by rows within one: those of the plan."""
        from torchrec.distributed import comm

        from autoshard.workload import ShardingPlan

        comm._INTRA_PG_2D = comm._CROSS_PG_2D = None  # of replica groups, which are told their own
        size = self._ranks // task.nodes
        if isinstance(plan, ShardingPlan):
            size = min((n for n in plan.row_wise.values() if n < self._ranks), default=size)
        if os.environ.get("LOCAL_WORLD_SIZE") != str(size):
            comm._INTRA_PG = comm._CROSS_PG = None  # which it keeps, whatever the nodes are
        os.environ["LOCAL_WORLD_SIZE"] = str(size)

    def train(self, name: str, steps: int) -> Any:
        """Returns the results of so many steps."""
        claim = self._backend.claim(f"a rehearsal in {this_pool()}", _PATIENCE_S)
        training, turns = self._trainings[name], self._turns
        with claim if self._claims else nullcontext():
            if turns is None and not self._backend.is_shared:
                return self._launched(training, steps)
            if turns is None:
                return [self._step(training) for _ in range(steps)]
            turns.begin()
            found = [self._step(training) for _ in range(steps)]
            turns.end()  # not after an error: other ranks wait for it, and all are ended
            return found

    def _step(self, training: Any) -> Any:
        """Returns a step with the reference beside it, which other ranks run when they step."""
        import torch.distributed as dist

        if self._turns is None:
            dist.barrier()  # all at the same time, as the step
        reference_ms = self._reference_ms()
        return replace(training.step(at_once=True)(), reference_ms=reference_ms)

    def _launched(self, training: Any, steps: int) -> Any:
        """Returns steps that are launched one after another, as in training, and read at the end.

        Nothing waits for the device in between. The reference runs before the first and after the
        last.
        """
        beside = [self._reference_ms()]
        launched = [training.step(at_once=False) for _ in range(steps)]
        found = [read() for read in launched]
        beside.append(self._reference_ms())
        known = [reference_ms for reference_ms in beside if reference_ms is not None]
        return [replace(step, reference_ms=fmean(known) if known else None) for step in found]

    def _reference_ms(self) -> float | None:
        """Returns the time of the reference operator now, forward and backward; None without."""
        beside = self._watch.reference()
        return None if beside is None else beside.forward_ms + beside.backward_ms

    def parts(self, name: str) -> Any:
        """Returns the parts of tables on this rank."""
        return list(self._trainings[name].parts())

    def forget(self, name: str) -> None:
        """Deletes a model."""
        gc.unfreeze()
        del self._trainings[name]
        gc.collect()
        self._backend.flush(0)  # of GPUs: other ranks on it may need more for the next model

    def peak_bytes(self) -> int:
        """Returns the peak memory of this process: of the GPU, or of the machine."""
        return self._backend.peak_bytes()
