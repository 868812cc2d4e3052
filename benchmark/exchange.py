"""Runs and times all-to-alls of pooled embeddings on every rank.

Rank r computes `dims[r]` columns for the whole batch. Forward, it sends each rank that rank's
samples and receives all columns of its own; backward, gradients travel the other way. If a plan has
more ranks than there are devices, some run several ranks, if their kind allows that; the key says
so.
"""

import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from autoshard.benchmark.backends.base import DeviceBackend
from autoshard.benchmark.measurement import ExchangeKey, ExchangePart, RankTimes

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


def run_ranks(part: ExchangePart, backend: DeviceBackend) -> list[RankTimes]:
    """Runs the ranks of this device, each in its own thread."""
    results: dict[int, RankTimes] = {}
    errors: list[BaseException] = []

    def play(rank: int) -> None:
        try:
            results[rank] = _play(part, rank, backend)
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in part.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in part.ranks]


def _play(part: ExchangePart, rank: int, backend: DeviceBackend) -> RankTimes:
    meeting = dist.TCPStore(part.host, part.port, is_master=False, timeout=_TIMEOUT)
    store = dist.PrefixStore(part.name, meeting)
    group, device = backend.process_group(store, rank, part.key.ranks, _TIMEOUT), backend.device
    samples = samples_of_ranks(part.key)
    own_dim, own_samples = part.key.dims[rank], samples[rank]
    columns_out = [own_dim * count for count in samples]  # my columns of everyone's samples
    columns_in = [dim * own_samples for dim in part.key.dims]  # everyone's columns of my samples
    computed = torch.ones(max(1, sum(columns_out)), device=device)[: sum(columns_out)]
    gathered = torch.ones(max(1, sum(columns_in)), device=device)[: sum(columns_in)]
    received, returned = torch.empty_like(gathered), torch.empty_like(computed)
    forward, backward = [], []
    for _ in range(_WARM_UP + part.iterations):
        forward.append(_timed(group, received, computed, columns_in, columns_out, backend))
        backward.append(_timed(group, returned, gathered, columns_out, columns_in, backend))
    return RankTimes(rank, tuple(forward[_WARM_UP:]), tuple(backward[_WARM_UP:]))


def _timed(
    group: Any,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_splits: list[int],
    sent_splits: list[int],
    backend: DeviceBackend,
) -> float:
    """Returns ms from the moment all ranks are ready until this one has received everything."""
    group.barrier().wait()
    backend.synchronize()
    start = time.perf_counter_ns()
    group.alltoall_base(received, sent, received_splits, sent_splits).wait()
    backend.synchronize()
    return (time.perf_counter_ns() - start) / 1e6
