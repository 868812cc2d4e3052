"""Measures the memory of a device and the prices of fbgemm's operator, for a `MachineProbe`.

The operator itself is the most faithful probe of what will slow it down: its forward pass gathers
rows, its backward pass reads, modifies and writes them. SGD is used, whose state is the weights
alone. One buffer holds the weights of all tables, because new pages take longer than all measuring:
up to 20 microseconds each on a virtual machine.

Everything is measured in rounds until the time is up, and the fastest run counts: others slow a
host down for moments, but never speed it up. Working sets are a ladder of fixed sizes, because
virtual machines may report caches wrongly, and may have a share of them only.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, product, repeat
from typing import Any, get_args

import numpy as np
import torch

from autoshard.benchmark.backends.base import DeviceBackend, Iteration, TimedOperator
from autoshard.benchmark.operator import fbgemm
from autoshard.benchmark.operator.embedding_op import build_module
from autoshard.benchmark.operator.timing import level_of
from autoshard.benchmark.probe.report import (
    MachineProbe,
    OperatorPrices,
    Passes,
    RowTimes,
    UpdateTime,
    WorkingSet,
)
from autoshard.workload import EmbeddingTable, OperatorOptions, Shard
from autoshard.workload.tables.operators import Optimizer

_MIB = 2**20
SET_BYTES = tuple(round(mib * _MIB) for mib in (0.5, 4, 16, 64, 256, 512, 2048))
ROW_BYTES = (32, 128, 512, 2048)
_ROUNDS = 4
_ITERATIONS = 5  # of an operator in each round, after one that warms up
_SHORT_ITERATIONS = 25  # of tables of less than a MiB, which take little longer than their start
_POOLING = 16
_ORDER = 2**20  # row numbers in random order, from which all indices are taken
_WARM_BYTES = 512 * _MIB  # last bytes of a working set that are read first: more than caches hold
_SHORT_COPY, _SHORT_COPIES = 32 * _MIB, 8
_TOUCHED_BYTES = 16 * _MIB  # between two looks at the clock
_LINE_BYTES = 64
_CHAIN, _STEPS = 32_768, 4096  # loads that depend on each other; those that are timed together
_L1_BYTES = 16 * 2**10
# Small operators whose differences are prices: tables, samples, lookups a sample, distinct rows.
_SMALL_ROW_BYTES, _SAMPLES = 16, 2048
_OPERATORS = {
    "start": (1, 1, 1, 1),
    "tables": (65, 1, 1, 1),
    "samples": (1, _SAMPLES, 1, 1),
    "lookups": (1, _SAMPLES, _POOLING, 1),
    "rows": (1, _SAMPLES, _POOLING, _SAMPLES * _POOLING),
}
_UPDATED_BYTES = (16, 512)  # widths of rows at which optimizers are compared
_UPDATED_ROWS = 2048
_UPDATES = tuple(product(get_args(Optimizer), _UPDATED_BYTES))


class _TimeIsUp(Exception):  # noqa: N818 - the usual end of a probe
    """There is no time left for more."""


@dataclass
class _Fastest:
    """The fastest forward and the fastest backward pass of an operator."""

    forward_ms: float = math.inf
    backward_ms: float = math.inf

    def add(self, run: Iteration) -> None:
        self.forward_ms = min(self.forward_ms, run.forward_ms)
        self.backward_ms = min(self.backward_ms, run.backward_ms)

    def beyond(self, other: "_Fastest", ms: float) -> Passes:
        """Returns what its passes take longer than those of another operator, in units of `ms`."""
        return Passes(
            _known((self.forward_ms - other.forward_ms) / ms),
            _known((self.backward_ms - other.backward_ms) / ms),
        )


_NOTHING = _Fastest(0.0, 0.0)
_Subjects = Callable[[int], TimedOperator]  # by the number of the turn


class MemoryProbe:
    """The state of a running probe of memory and operator."""

    def __init__(
        self,
        backend: DeviceBackend,
        references: Sequence[TimedOperator],
        sizes: Sequence[int],
        deadline: float,
    ) -> None:
        self._backend, self._sizes, self._deadline = backend, sizes, deadline
        self._watch = backend.stopwatch(flush=False, references=references)
        self._buffer = torch.empty(sizes[-1] // 4, device=backend.device)
        self._touched_bytes, self._touching_s = 0, 0.0
        order = torch.randperm(_ORDER, generator=torch.Generator().manual_seed(0))
        self._order = order.to(backend.device)
        self._orders: dict[int, torch.Tensor] = {}  # of fewer rows
        self._turns = count()
        self._subjects: dict[object, _Subjects] = {}
        self._fastest: dict[object, _Fastest] = {}
        self._copied: dict[int, float] = {}  # bytes per ms
        self._load_ns: dict[int, float] = {}
        self._references: list[Iteration] = []

    def run(self) -> None:
        """Measures in rounds until the time is up."""
        with suppress(_TimeIsUp):
            for _ in range(_ROUNDS):
                for size in self._sizes:
                    if not self._touch(size):
                        break
                    self._visit(size)

    def report(self, seconds: float) -> MachineProbe:
        """Returns what was found so far."""
        return MachineProbe(
            hardware=self._backend.fingerprint(),
            versions=fbgemm.library_versions(),
            reference_level=level_of(self._references),
            system=self._backend.system_report(),
            operator=self._prices(),
            working_sets=tuple(self._working_set(size) for size in SET_BYTES),
            seconds=seconds,
            measured_at=time.time(),
        )

    def _check_time(self) -> float:
        """Returns the seconds that are left; raises _TimeIsUp if there are none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise _TimeIsUp
        return left

    def _touch(self, size: int) -> bool:
        """Writes to all pages of a working set, if that leaves time to measure it."""
        pace = self._touching_s / max(1, self._touched_bytes)
        if pace * (size - self._touched_bytes) > self._check_time() / 2:
            return False
        while self._touched_bytes < size:
            self._check_time()
            start, end = time.monotonic(), min(size, self._touched_bytes + _TOUCHED_BYTES)
            self._buffer[self._touched_bytes // 4 : end // 4].fill_(1.0)
            self._backend.synchronize()
            self._touching_s += time.monotonic() - start
            self._touched_bytes = end
        return True

    def _visit(self, size: int) -> None:
        """Measures everything in a working set, and what does not depend on it once more."""
        found = self._watch.reference()
        if found is not None:
            self._references.append(found)
        for name in _OPERATORS:
            self._time(name, partial(self._small_operator, name), _ITERATIONS)
        for optimizer, row_bytes in _UPDATES:
            make = partial(self._updating_operator, optimizer, row_bytes)
            self._time((optimizer, row_bytes), make, _ITERATIONS)
        self._copy(size)
        self._chase(_L1_BYTES)
        self._chase(size)
        for row_bytes in ROW_BYTES:
            iterations = _SHORT_ITERATIONS if size <= _MIB else _ITERATIONS
            self._time((size, row_bytes), partial(self._table, size, row_bytes), iterations)

    def _time(self, key: object, make: Callable[[], _Subjects], iterations: int) -> None:
        """Times an operator, which is made at the first time."""
        self._check_time()
        if key not in self._subjects:
            self._subjects[key] = make()
        fastest = self._fastest.setdefault(key, _Fastest())
        for number in range(iterations + 1):
            run = self._watch.iteration(self._subjects[key](next(self._turns)))
            if number:
                fastest.add(run)

    def _small_operator(self, name: str) -> _Subjects:
        """Returns an operator whose rows are near to the core; it is the same in each turn."""
        tables, samples, pooling, distinct = _OPERATORS[name]
        run = self._operator([distinct] * tables, _SMALL_ROW_BYTES, samples, pooling)
        rows = self._random_rows(distinct, distinct)
        subject = run(rows.repeat(tables * samples * pooling // distinct))
        return lambda _: subject

    def _updating_operator(self, optimizer: Optimizer, row_bytes: int) -> _Subjects:
        """Returns an operator that updates each row of a small table once."""
        samples = _UPDATED_ROWS // _POOLING
        run = self._operator([_UPDATED_ROWS], row_bytes, samples, _POOLING, optimizer=optimizer)
        subject = run(self._random_rows(_UPDATED_ROWS, _UPDATED_ROWS))
        return lambda _: subject

    def _table(self, size: int, row_bytes: int) -> _Subjects:
        """Returns the operator of a table that fills a working set; each turn has other rows."""
        rows, lookups = size // row_bytes, self._lookups(size, row_bytes)
        weights = self._buffer[: size // 4]
        run = self._operator([rows], row_bytes, lookups // _POOLING, _POOLING, weights)
        return lambda turn: run(self._random_rows(rows, lookups, turn))

    def _lookups(self, size: int, row_bytes: int) -> int:
        """Returns the lookups in one pass over a table, all of different rows."""
        return min(size // row_bytes, self._backend.probe_bytes // row_bytes, _ORDER)

    def _random_rows(self, rows: int, count: int, turn: int = 0) -> torch.Tensor:
        """Returns `count` different row numbers below `rows`; both are powers of two."""
        if rows < _ORDER and rows not in self._orders:
            self._orders[rows] = self._order[self._order < rows]
        order, spread = self._orders.get(rows, self._order), max(1, rows // _ORDER)
        first = turn * count % len(order)
        return order[first : first + count] * spread + turn % spread

    def _operator(
        self,
        rows: Sequence[int],
        row_bytes: int,
        samples: int,
        pooling: int,
        weights: torch.Tensor | None = None,
        optimizer: Optimizer = "sgd",
    ) -> Callable[[torch.Tensor], TimedOperator]:
        """Returns a function from indices to fbgemm's operator for tables of so many rows."""
        tables = [EmbeddingTable(f"{n}", size, row_bytes // 4, 1.0) for n, size in enumerate(rows)]
        module = build_module(
            Shard.of_tables(tables), OperatorOptions("fp32", optimizer), self._backend, weights
        )
        device, bags = self._backend.device, len(rows) * samples
        offsets = torch.arange(0, bags * pooling + 1, pooling, device=device)
        gradient = torch.ones(samples, len(rows) * row_bytes // 4, device=device)
        return lambda indices: TimedOperator(lambda: module(indices, offsets), gradient)

    def _copy(self, size: int) -> None:
        """Copies one half of a working set, or of its last part, to the other."""
        self._check_time()
        part = self._buffer[max(0, size - _WARM_BYTES) // 4 : size // 4]
        source, target = part.chunk(2)
        for _ in range(_SHORT_COPIES if size <= _SHORT_COPY else 1):
            start = self._watch.mark()
            target.copy_(source)
            copy_ms = self._own_ms(start)
            bytes_per_ms = part.nbytes / copy_ms if copy_ms else math.nan
            self._copied[size] = max(self._copied.get(size, 0.0), bytes_per_ms)

    def _chase(self, size: int) -> None:
        """Times loads of which each gives the address of the next; on a CPU alone."""
        self._check_time()
        if self._buffer.device.type != "cpu":
            return
        part = self._buffer[: size // 4]
        words = part.view(torch.int64).numpy()
        lines = size // _LINE_BYTES
        places = self._random_rows(lines, min(lines, _CHAIN)).numpy() * (_LINE_BYTES // 8)
        words[places] = np.roll(places, -1)
        part[-_WARM_BYTES // 4 :].sum()
        view, at = words.data, int(places[0])
        for _ in range(_CHAIN // _STEPS):
            start = self._watch.mark()
            for _ in repeat(None, _STEPS):
                at = view[at]
            ns = self._own_ms(start) * 1e6 / _STEPS
            self._load_ns[size] = min(self._load_ns.get(size, math.inf), ns)
        words[places] = 0

    def _own_ms(self, start: Any) -> float:
        """Returns the time that this process had the device since a mark."""
        ((_, own_ms),) = self._watch.between([start, self._watch.mark()])
        return own_ms

    def _prices(self) -> OperatorPrices:
        found = {name: self._fastest.get(name, _Fastest()) for name in _OPERATORS}
        samples, lookups = _SAMPLES, _SAMPLES * _POOLING
        updates = []
        for optimizer, row_bytes in _UPDATES:
            fastest = self._fastest.get((optimizer, row_bytes), _Fastest())
            ns = fastest.beyond(found["start"], _UPDATED_ROWS * 1e-6).backward
            updates.append(UpdateTime(optimizer, row_bytes, ns))
        return OperatorPrices(
            start_us=found["start"].beyond(_NOTHING, 1e-3),
            table_us=found["tables"].beyond(found["start"], 64 * 1e-3),
            lookup_ns=found["lookups"].beyond(found["samples"], (lookups - samples) * 1e-6),
            row_ns=found["rows"].beyond(found["lookups"], (lookups - 1) * 1e-6),
            updates=tuple(updates),
        )

    def _working_set(self, size: int) -> WorkingSet:
        start, rows = self._fastest.get("start", _Fastest()), []
        for row_bytes in ROW_BYTES:
            found = self._fastest.get((size, row_bytes), _Fastest())
            lookups = self._lookups(size, row_bytes)
            rows.append(RowTimes(row_bytes, found.beyond(start, lookups * 1e-6)))
        return WorkingSet(
            size_bytes=size,
            copy_gb_s=_known(self._copied.get(size, math.nan) / 1e6),
            latency_ns=_known(
                self._load_ns.get(size, math.nan) - self._load_ns.get(_L1_BYTES, 0.0)
            ),
            rows=tuple(rows),
        )


def _known(value: float) -> float | None:
    """Returns a measured number; None where nothing was measured, or less than the noise."""
    return value if 0 < value < math.inf else None
