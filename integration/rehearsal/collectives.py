"""A process group of torch.distributed that records when a rank exchanges data.

Its collectives run on another process group (gloo, NCCL), or on `Turns`. Only the collectives that
TorchRec and DistributedDataParallel use are here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist

from autoshard.integration.rehearsal.turns import Turns
from autoshard.workload.tasks.links import Collective

Part: TypeAlias = Literal["inside", "between"]


class Recorder(Protocol):
    """Notes the exchanges of a rank."""

    def issue(self, moved_bytes: int, over: Collective) -> int:
        """Notes that a collective begins, with what this rank sends or receives."""

    def leave(self) -> None:
        """Notes that the rank stops computing."""

    def resume(self, waited: int | None = None) -> None:
        """Notes that it goes on computing, after it waited for a collective."""


class RecordedWork(dist.Work):
    """A running collective, whose result is needed when it is waited for."""

    def __init__(
        self, finish: Callable[[], None], output: Any, recorder: Recorder, number: int
    ) -> None:
        super().__init__()
        self._finish, self._output = finish, output
        self._recorder, self._number = recorder, number
        self._is_done = False

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Returns when the result is there."""
        if not self._is_done:
            self._recorder.leave()
            self._finish()
            self._recorder.resume(self._number)
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Returns whether it was waited for."""
        return self._is_done

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns the result as DistributedDataParallel expects it, which waits for it at once."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._output)
        return future


class RecordedGroup(dist.ProcessGroup):
    """Runs collectives and records them.

    Args:
        inner: Runs them.
        rank: Number of this rank in the group.
        ranks: Number of ranks in the group.
        recorder: Notes them.
        part: Which links they go over, of a group of some of the ranks; None if it has all.
    """

    def __init__(
        self, inner: Any, rank: int, ranks: int, recorder: Recorder, part: Part | None = None
    ) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]  # the form without a store
        self._inner, self._others, self._recorder = inner, ranks - 1, recorder
        self._part = part

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns the name by which torch.distributed knows it."""
        return "recorded"

    @property
    def group_name(self) -> Any:
        """The name by which torch.distributed finds it."""
        return dist.distributed_c10d._world.pg_names[self]

    def alltoall_base(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        output_splits: Sequence[int],
        sent_splits: Sequence[int],
        opts: Any = None,  # noqa: ARG002
    ) -> RecordedWork:
        """Sends each rank its part, and receives one from each."""
        ranks, own = self.size(), self.rank()
        output_splits = output_splits or [len(output) // ranks] * ranks
        sent_splits = sent_splits or [len(sent) // ranks] * ranks
        row_bytes = sent.nbytes // max(1, len(sent)) or output.nbytes // max(1, len(output))
        splits = (sent_splits, output_splits)
        going, coming = (row_bytes * (sum(some) - some[own]) for some in splits)
        run = self._inner.alltoall_base
        return self._run(
            lambda: run(output, sent, list(output_splits), list(sent_splits)),
            max(going, coming),
            [output],
            "all_to_all",
        )

    def allreduce(  # type: ignore[override]  # one of its forms
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> RecordedWork:
        """Replaces tensors by their sums over all ranks."""
        share = 2 * self._others / self.size()  # of a ring, which takes least
        going = int(share * sum(tensor.nbytes for tensor in tensors))
        opts = opts or dist.AllreduceOptions()
        return self._run(lambda: self._inner.allreduce(tensors, opts), going, tensors)

    def broadcast(  # type: ignore[override]  # one of its forms
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> RecordedWork:
        """Replaces tensors by those of one rank."""
        opts = opts or dist.BroadcastOptions()
        return self._run(lambda: self._inner.broadcast(tensors, opts), 0, tensors)

    def allgather(  # type: ignore[override]  # one of its forms
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> RecordedWork:
        """Receives the tensor of each rank."""
        going = sum(tensor.nbytes for tensor in tensors) * self._others
        run = self._inner.allgather
        return self._run(lambda: run(outputs, tensors, *([opts] if opts else [])), going, outputs)

    def all_gather_single(
        self, output: torch.Tensor, sent: torch.Tensor, opts: Any = None
    ) -> RecordedWork:
        """Receives the tensor of each rank, one after the other in one tensor."""
        run = self._inner._allgather_base
        return self._run(lambda: run(output, sent, opts), sent.nbytes * self._others, [output])

    def reduce_scatter_single(
        self, output: torch.Tensor, sent: torch.Tensor, opts: Any = None
    ) -> RecordedWork:
        """Receives the sum over ranks of its own part of their tensors."""
        run = self._inner._reduce_scatter_base
        return self._run(lambda: run(output, sent, opts), output.nbytes * self._others, [output])

    _device_types: Any = (torch.device("cpu"),)  # of meshes: TorchRec 1.6 asks for them
    _allgather_base: Any = all_gather_single  # names in torch 2.11
    _reduce_scatter_base: Any = reduce_scatter_single

    def barrier(self, opts: Any = None) -> RecordedWork:
        """Waits for all ranks."""
        opts = opts or dist.BarrierOptions()
        return self._run(lambda: self._inner.barrier(opts), 0, [])

    def _run(
        self, start: Callable[[], Any], moved: int, output: Any, over: Collective = "ring"
    ) -> RecordedWork:
        self._recorder.leave()
        work = start()
        number = self._recorder.issue(moved, _of_part(self._part, over))
        self._recorder.resume()
        return RecordedWork(work.wait, output, self._recorder, number)


def _of_part(part: Part | None, over: Collective) -> Collective:
    if part is None:
        return over
    rings: dict[Part, Collective] = {"inside": "inside_ring", "between": "between_ring"}
    return rings[part] if over == "ring" else part


class TurnsBackend:
    """Collectives of ranks that take turns, by the names that `RecordedGroup` calls.

    Groups of some of the ranks have as many collectives each, so that all ranks count alike.

    Args:
        turns: The turns of all ranks.
        members: Numbers of the group's ranks; by default all.
    """

    def __init__(self, turns: Turns, members: Sequence[int] = ()) -> None:
        self._turns, self._members = turns, members or range(turns.ranks)

    def alltoall_base(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        output_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> "_Later":
        """As `RecordedGroup.alltoall_base`."""
        row = sent[0].numel() if len(sent) else output[0].numel() if len(output) else 1
        number = self._issue(sent, [row * split for split in sent_splits])

        def finish() -> None:
            parts = torch.split(output, list(output_splits))
            for rank, part in zip(self._members, parts, strict=True):
                self._turns.read(number, rank, part)

        return _Later(self._turns, number, finish)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> "_Later":
        """Sums; other operations are not used."""
        name = str(opts.reduceOp).rpartition(".")[2].lower()
        combine = {"max": torch.maximum, "min": torch.minimum}.get(name, torch.add)
        (tensor,) = tensors
        number = self._turns.issue(tensor.contiguous())
        return _Later(self._turns, number, lambda: self._combine(number, tensor, combine))

    def _reduce_scatter_base(self, output: torch.Tensor, sent: torch.Tensor, opts: Any) -> "_Later":
        """As `RecordedGroup.reduce_scatter_single`; only sums are used."""
        del opts
        number = self._issue(sent, [output.numel()] * len(self._members))
        return _Later(self._turns, number, lambda: self._combine(number, output, torch.add))

    def _combine(self, number: int, output: torch.Tensor, combine: Callable[..., Any]) -> None:
        """Reads what all ranks sent to this one, and combines it."""
        total, part = torch.empty_like(output), torch.empty_like(output)
        first, *others = self._members
        self._turns.read(number, first, total)
        for rank in others:
            self._turns.read(number, rank, part)
            combine(total, part, out=total)
        output.copy_(total)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> "_Later":
        """As `RecordedGroup.broadcast`."""
        (tensor,) = tensors
        number = self._turns.issue(tensor.contiguous())
        return _Later(
            self._turns,
            number,
            lambda: self._turns.read(number, self._members[opts.rootRank], tensor),
        )

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> "_Later":
        """As `RecordedGroup.allgather`."""
        del opts
        (tensor,), (found,) = tensors, outputs
        return self._gather(tensor, found)

    def _allgather_base(self, output: torch.Tensor, sent: torch.Tensor, opts: Any) -> "_Later":
        """As `RecordedGroup.all_gather_single`."""
        del opts
        return self._gather(sent, output.chunk(len(self._members)))

    def _gather(self, sent: torch.Tensor, outputs: Sequence[torch.Tensor]) -> "_Later":
        number = self._turns.issue(sent.contiguous())

        def finish() -> None:
            for rank, output in zip(self._members, outputs, strict=True):
                self._turns.read(number, rank, output)

        return _Later(self._turns, number, finish)

    def _issue(self, sent: torch.Tensor, splits: Sequence[int]) -> int:
        """Sends each member its part, and other ranks nothing."""
        of_ranks = dict(zip(self._members, splits, strict=True))
        every = [of_ranks.get(rank, 0) for rank in range(self._turns.ranks)]
        return self._turns.issue(sent.contiguous(), every)

    def barrier(self, opts: Any) -> "_Later":
        """As `RecordedGroup.barrier`."""
        del opts
        return _Later(self._turns, self._turns.issue(torch.empty(0)), lambda: None)


class _Later:
    """A collective that reads what others sent once it is waited for."""

    def __init__(self, turns: Turns, number: int, finish: Callable[[], None]) -> None:
        self._turns, self._number, self._finish = turns, number, finish

    def wait(self) -> None:
        """Waits for all ranks, then reads."""
        self._turns.wait(self._number)
        self._finish()
        self._turns.forget(self._number)
