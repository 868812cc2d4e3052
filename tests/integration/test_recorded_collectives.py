"""What a process group notes of its collectives, on real ones of a single rank."""

import datetime

import pytest
import torch
import torch.distributed as dist

from autoshard.integration.rehearsal.collectives import Part, RecordedGroup
from autoshard.workload.tasks.links import Collective


class Notes:
    """Keeps which links collectives went over."""

    def __init__(self) -> None:
        self.over: list[Collective] = []

    def issue(self, moved_bytes: int, over: Collective) -> int:
        assert moved_bytes >= 0
        self.over.append(over)
        return len(self.over)

    def leave(self) -> None: ...

    def resume(self, waited: int | None = None) -> None: ...


@pytest.mark.parametrize(
    ("part", "over"),
    [
        (None, ["all_to_all", "ring", "ring", "ring"]),
        ("inside", ["inside", "inside_ring", "inside_ring", "inside_ring"]),
        ("between", ["between", "between_ring", "between_ring", "between_ring"]),
    ],
)
def test_groups_of_ranks_tell_rings_from_all_to_alls(
    part: Part | None, over: list[Collective]
) -> None:
    inner = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=60))
    notes, numbers = Notes(), torch.ones(4)
    group = RecordedGroup(inner, 0, 1, notes, part)
    received = torch.zeros(4)
    group.alltoall_base(received, numbers, [], []).wait()
    group.allreduce([numbers]).wait()
    group.reduce_scatter_single(received, numbers, dist.ReduceScatterOptions()).wait()
    group.all_gather_single(received, numbers, dist.distributed_c10d.AllgatherOptions()).wait()
    assert received.tolist() == numbers.tolist() == [1.0] * 4
    assert notes.over == over
