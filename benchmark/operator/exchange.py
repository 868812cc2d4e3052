"""Runs and times the collectives of a training step on every rank.

All-to-alls: rank r computes `dims[r]` columns for the whole batch. Forward, it sends each rank that
rank's samples and receives all columns of its own; backward, gradients travel the other way. Where
rows are spread over ranks, each has partial sums for the whole batch: forward they are reduced and
scattered, backward gradients are gathered. Gradients of copies are reduced for all ranks, backward.
If a plan has more ranks than there are devices, some run several ranks, if their kind allows that;
the key says so.
"""

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from autoshard.benchmark.backends.base import DeviceBackend
from autoshard.benchmark.measurement import ExchangeKey, ExchangePart, RankTimes

Result = TypeVar("Result")
_Start: TypeAlias = Callable[[], Any]  # starts a collective, and returns its Work
_WARM_UP = 3
_TIMEOUT = datetime.timedelta(seconds=60)


class Rendezvous:
    """The key-value server through which the ranks of an exchange find each other."""

    def __init__(self) -> None:
        self.host = _own_address()
        self._store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        self.port = int(self._store.port)


def _own_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def samples_of_ranks(key: ExchangeKey) -> list[int]:
    """Samples that each rank keeps after the exchange: the batch, split as evenly as it goes."""
    share, rest = divmod(key.batch_size, key.ranks)
    return [share + (rank < rest) for rank in range(key.ranks)]


class ExchangeRanks:
    """The ranks of one device, each in its own thread, which meet once for all rounds.

    Args:
        part: The exchange, and which ranks run here.
        backend: Backend that is bound to the device.
    """

    def __init__(self, part: ExchangePart, backend: DeviceBackend) -> None:
        self.part = part
        self._backend = backend
        self._watch = backend.stopwatch(flush=False)
        self._groups = dict(zip(part.ranks, self._in_threads(self._meet), strict=True))

    def run(self) -> list[RankTimes]:
        """Runs the iterations of a round on all ranks."""
        return self._in_threads(self._play)

    def close(self) -> None:
        """Leaves the others, once all have got that far: none is still in an exchange."""
        self._in_threads(self._leave)

    def _in_threads(self, work: Callable[[int], Result]) -> list[Result]:
        """Returns the result of each rank."""
        with ThreadPoolExecutor(len(self.part.ranks)) as threads:
            return list(threads.map(work, self.part.ranks))

    def _meet(self, rank: int) -> Any:
        part = self.part
        meeting = dist.TCPStore(part.host, part.port, is_master=False, timeout=_TIMEOUT)
        store = dist.PrefixStore(part.name, meeting)
        return self._backend.process_group(store, rank, part.key.ranks, _TIMEOUT)

    def _leave(self, rank: int) -> None:
        self._groups[rank].barrier().wait()
        self._groups[rank].shutdown()

    def _play(self, rank: int) -> RankTimes:
        forward, backward = [], []
        run_forward, run_backward = self._directions(rank)
        for _ in range(_WARM_UP + self.part.iterations):
            forward.append(self._timed(rank, run_forward) if run_forward else 0.0)
            backward.append(self._timed(rank, run_backward))
        return RankTimes(rank, tuple(forward[_WARM_UP:]), tuple(backward[_WARM_UP:]))

    def _directions(self, rank: int) -> tuple[_Start | None, _Start]:
        """Returns what starts the forward, if there is any, and the backward collective."""
        key, group, device = self.part.key, self._groups[rank], self._backend.device
        if key.collective == "all_to_all":
            return self._all_to_alls(rank)
        columns, samples = key.dims[rank], -(-key.batch_size // key.ranks)
        if key.collective == "all_reduce":
            reduced = torch.zeros(key.batch_size * columns, device=device)
            return None, lambda: group.allreduce([reduced])
        whole = torch.ones(key.ranks * samples * columns, device=device)
        own = torch.ones(samples * columns, device=device)
        return (
            lambda: group._reduce_scatter_base(own, whole),
            lambda: group._allgather_base(whole, own),
        )

    def _all_to_alls(self, rank: int) -> tuple[_Start, _Start]:
        key, group, device = self.part.key, self._groups[rank], self._backend.device
        samples = samples_of_ranks(key)
        own_dim, own_samples = key.dims[rank], samples[rank]
        columns_out = [own_dim * count for count in samples]  # my columns of everyone's samples
        columns_in = [dim * own_samples for dim in key.dims]  # everyone's columns of my samples
        computed = torch.ones(max(1, sum(columns_out)), device=device)[: sum(columns_out)]
        gathered = torch.ones(max(1, sum(columns_in)), device=device)[: sum(columns_in)]
        received, returned = torch.empty_like(gathered), torch.empty_like(computed)
        return (
            lambda: group.alltoall_base(received, computed, columns_in, columns_out),
            lambda: group.alltoall_base(returned, gathered, columns_out, columns_in),
        )

    def _timed(self, rank: int, start_collective: _Start) -> float:
        """Returns ms from the moment all ranks are ready until this one has received everything."""
        self._groups[rank].barrier().wait()
        self._backend.synchronize()
        self._watch.hold()
        start = self._watch.mark()
        start_collective().wait()
        ((milliseconds, _),) = self._watch.between([start, self._watch.mark()])
        return milliseconds
