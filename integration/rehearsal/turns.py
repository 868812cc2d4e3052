"""Collectives of ranks that take turns: one rank of the machine computes at a time.

Ranks pass a token around in their order. Who has it computes until it needs what others send, adds
what it sends itself to its shared memory, and passes the token on; when the token is back, all
ranks have got that far, and everything that they sent can be read. So a rank computes with the
machine to itself, the others wait without using a core, and no thread of a network library runs
beside it. Tensors of a GPU that ranks share go through the host's memory, and a rank passes the
token on when the GPU has done all of its work. Exchanges move bytes as they would between machines;
how long that takes is priced by a link (`composition`).
"""

import array
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_MAX_TOKEN_BYTES = 2**20
_MUCH_S = 0.005  # of others' computing: less leaves little in the cache, and clearing takes longer


class _Sent(NamedTuple):
    """Where a rank's contribution to a collective lies in its memory, and how it is split."""

    offset: int
    dtype: torch.dtype
    splits: tuple[int, ...]  # elements for each rank; empty if all of it is for all


class _Region:
    """Memory that one rank writes and all ranks read; space is reused once all have read it."""

    def __init__(self) -> None:
        self.file = os.memfd_create("autoshard-rehearsal")
        self._free: list[tuple[int, int]] = []  # offset and bytes
        self._end = 0

    def write(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Writes a contiguous tensor; returns its offset and the bytes that are reserved."""
        data = _bytes_of(tensor)
        spot = next((spot for spot in self._free if spot[1] >= len(data)), None)
        if spot is None:
            spot = self._end, len(data)
            self._end += len(data)
        else:
            self._free.remove(spot)
        _transfer(os.pwritev, self.file, data, spot[0])
        return spot

    def release(self, spots: Sequence[tuple[int, int]]) -> None:
        """Allows new contributions to overwrite old ones."""
        self._free = sorted([*self._free, *spots], key=lambda spot: spot[1])


class Turns:
    """The token and the shared memory of one rank.

    Until `begin` all ranks run at the same time, as while they build models; `begin` and `end` are
    called by all ranks at the same point of their program.

    Args:
        store: Key-value store of torch.distributed through which ranks find each other.
        rank: Number of this rank.
        ranks: Number of ranks.
        prepare: Called when the rank gets the token after others computed for long, before it reads
            what it received: clears what they left in the cache.
        finish: Returns when the device has done all work of this rank; called before it passes the
            token on.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        prepare: Callable[[], object],
        finish: Callable[[], object],
    ) -> None:
        self.rank, self.ranks, self._prepare, self._finish = rank, ranks, prepare, finish
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # the system chooses an abstract name, which leaves no file
        store.set(f"turns{rank}", self._socket.getsockname())
        names = [bytes(store.get(f"turns{number}")) for number in range(ranks)]
        self._next = names[(rank + 1) % ranks]
        self._region = _Region()
        self._files = self._exchange_files(names)
        store.set(f"turns{rank} ready", b"")  # before that, a token could arrive among the files
        for number in range(ranks):
            store.get(f"turns{number} ready")
        self._in_turns = False
        self._number = 0  # of the next collective
        self._known = 0  # collectives that all ranks have issued
        self._own: dict[int, _Sent] = {}  # issued since the token was passed on
        self._token: dict[int, dict[int, _Sent]] = {}  # the same of each rank
        self._sent: dict[tuple[int, int], _Sent] = {}  # of (collective, rank)
        self._spots: dict[int, tuple[int, int]] = {}  # memory of each collective
        self._read: list[int] = []  # collectives that were read since the token came

    def begin(self) -> None:
        """Begins to take turns: returns when this rank has the token."""
        self._in_turns = True
        if self.rank:
            self._receive()

    def end(self) -> None:
        """Ends taking turns: the next ranks go on to the same point."""
        self._pass_on()
        self._in_turns = False
        if not self.rank:
            self._receive()

    def issue(self, tensor: torch.Tensor, splits: Sequence[int] = ()) -> int:
        """Contributes to a collective; returns its number.

        Args:
            tensor: What is sent, contiguous.
            splits: Elements for each rank; by default all of it is for all.
        """
        number, self._number = self._number, self._number + 1
        self._spots[number] = spot = self._region.write(tensor)
        self._own[number] = _Sent(spot[0], tensor.dtype, tuple(splits))
        return number

    def wait(self, number: int) -> None:
        """Returns when all ranks have contributed to a collective, and it is this rank's turn."""
        if number < self._known:
            return
        issued = self._number
        if self._in_turns:
            self._pass_on()
            left = time.monotonic()
            self._receive()
            if time.monotonic() - left > _MUCH_S:
                self._prepare()
        elif self.rank:
            self._receive()
            self._pass_on()  # all up to this rank have contributed
            self._receive()
            self._pass_on()  # all ranks have
        else:
            for _ in range(2):
                self._pass_on()
                self._receive()
        self._known = issued
        self._region.release([self._spots.pop(read) for read in self._read])
        self._read = []

    def read(self, number: int, rank: int, output: torch.Tensor) -> None:
        """Reads what a rank sent to this one into `output`, which is contiguous."""
        sent = self._sent[number, rank]
        first = sum(sent.splits[: self.rank])
        size = torch.empty((), dtype=sent.dtype).element_size()
        host = output if output.is_cpu else torch.empty_like(output, device="cpu")
        _transfer(os.preadv, self._files[rank], _bytes_of(host), sent.offset + first * size)
        if host is not output:
            output.copy_(host)

    def forget(self, number: int) -> None:
        """Notes that this rank has read a collective."""
        self._read.append(number)
        for rank in range(self.ranks):
            del self._sent[number, rank]

    def _pass_on(self) -> None:
        """Passes the token on, with what each rank has issued since it last had it."""
        self._finish()
        self._token[self.rank] = self._own
        self._sent.update({(number, self.rank): sent for number, sent in self._own.items()})
        self._own = {}
        self._socket.sendto(pickle.dumps(self._token), self._next)

    def _receive(self) -> None:
        self._token = pickle.loads(self._socket.recv(_MAX_TOKEN_BYTES))
        for rank, issued in self._token.items():
            if rank != self.rank:
                self._sent.update({(number, rank): sent for number, sent in issued.items()})

    def _exchange_files(self, names: Sequence[bytes]) -> list[int]:
        """Returns a descriptor of each rank's memory."""
        mine = self._region.file
        for rank, name in enumerate(names):
            if rank != self.rank:
                files = array.array("i", [mine])
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, files)
                self._socket.sendmsg([bytes([self.rank])], [rights], 0, name)
        found = {self.rank: mine}
        while len(found) < self.ranks:
            message, (file,), _, _ = socket.recv_fds(self._socket, 1, 1)
            found[message[0]] = file
        return [found[rank] for rank in range(self.ranks)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.detach().view(-1).view(torch.uint8).cpu().numpy()
    return memoryview(array)


def _transfer(call: Callable[..., int], file: int, data: memoryview, offset: int) -> None:
    """Reads or writes all of the data, though the system may stop early."""
    done = 0
    while done < len(data):
        done += call(file, [data[done:]], offset + done)
