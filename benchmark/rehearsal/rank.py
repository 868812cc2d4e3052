"""What runs inside the actor of a rank."""

import gc
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from autoshard.benchmark.core_lock import claimed, this_pool
from autoshard.benchmark.memory import keep_freed_memory
from autoshard.benchmark.priority import at_usual_priority

# Whoever started the ranks watches them and ends all if one is lost, so this ends nothing sooner.
_TIMEOUT = timedelta(hours=1)
_KEPT_SHARE = 24  # of a core's memory
_PATIENCE_S = 60.0  # of one who waits for a core: a pool of other devices measures for seconds


class RehearsalRank:
    """A rank of a rehearsal, on a GPU or pinned to a core. It alone loads torch.

    Args:
        rank: its number.
        ranks: of all.
        core: to pin itself to; None on the GPU that Ray assigned.
        claims: whether it claims that core: of the ranks that share one, the first does.
        memory_bytes: that it has on a core, some of which it keeps where steps free it, as the
            benchmark does and allocators for training do: fresh pages would be a fifth of a step.
    """

    def __init__(
        self, rank: int, ranks: int, core: int | None, claims: bool, memory_bytes: int
    ) -> None:
        at_usual_priority()
        import torch

        self._rank, self._ranks = rank, ranks
        self._device = torch.device("cuda:0" if core is None else "cpu")
        self._core = core if claims else None
        if core is not None:
            os.sched_setaffinity(0, {core})
            torch.set_num_threads(1)
            keep_freed_memory(memory_bytes // _KEPT_SHARE)
        self._trainings: dict[str, Any] = {}

    def open_meeting_point(self) -> tuple[str, int]:
        """Host and port where the ranks find each other."""
        from autoshard.benchmark.exchange import MeetingPoint

        self._meeting_point = MeetingPoint()
        return self._meeting_point.host, self._meeting_point.port

    def join(self, host: str, port: int) -> None:
        """Meet the other ranks."""
        import torch
        import torch.distributed as dist

        store = dist.TCPStore(host, port, is_master=False)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=_TIMEOUT,
        )

    def prepare(self, name: str, task: Any, plan: Any) -> None:
        """Make the model of a task by a plan; the other ranks do so at the same time."""
        from autoshard.benchmark.rehearsal.training import Training

        self._trainings[name] = Training(task, plan, self._device)
        gc.collect()
        gc.freeze()  # later collections look at what steps make: 1 ms instead of 130

    def train(self, name: str, steps: int) -> Any:
        """So many steps, as each of them went."""
        with claimed(self._core, f"a rehearsal in {this_pool()}", _PATIENCE_S):
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
        import torch

        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        told = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(told[1]) * 1024 if told else 0
