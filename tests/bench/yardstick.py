"""Our timing against fbgemm's own benchmark, on one operator and one batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from autoshard.benchmark.backends.base import DeviceBackend, Stopwatch, TimedOperator
from autoshard.benchmark.embedding_op import build_module
from autoshard.benchmark.measurement import TimingOptions
from autoshard.benchmark.process import keep_freed_memory
from autoshard.benchmark.timing import time_operator
from autoshard.workload import EmbeddingTable, OperatorOptions, Shard

_TABLES, _ROWS, _DIM, _POOLING, _BATCH = 16, 40_000, 64, 16, 1024
_REQUESTS = 10  # that fbgemm and we take our medians of, in each round
_KEPT_BYTES = 2**29  # more than its outputs and gradients take


@dataclass(frozen=True)
class Agreement:
    """Our milliseconds over fbgemm's: of a whole step, and of its backward pass."""

    step: float
    backward: float


def compare_with_fbgemm(backend: DeviceBackend, watch: Stopwatch, rounds: int = 15) -> Agreement:
    """Times one operator by turns with both, on fbgemm's own requests; medians of the ratios.

    fbgemm's forward pass is timed together with the backward pass that follows: by itself it would
    find its rows in the cache, which in training the backward pass has taken.

    Args:
        backend: of the device.
        watch: of the device. It clears no cache, for fbgemm clears none on a CPU.
        rounds: to take medians of.
    """
    from fbgemm_gpu.tbe.utils import generate_requests

    keep_freed_memory(_KEPT_BYTES)
    tables = [EmbeddingTable(f"t{n}", _ROWS, _DIM, _POOLING) for n in range(_TABLES)]
    module = build_module(Shard.of_tables(tables), OperatorOptions(), backend)
    (request,) = generate_requests(
        1, _BATCH, _TABLES, _POOLING, _ROWS, use_cpu=backend.device.type == "cpu"
    )
    indices, offsets = request.indices.long(), request.offsets.long()
    gradient = torch.ones(_BATCH, _TABLES * _DIM, device=backend.device)
    request.indices, request.offsets = indices, offsets
    ratios = []
    for _ in range(rounds):
        subject = TimedOperator(lambda: module(indices, offsets), gradient)
        ours = time_operator(subject, watch, TimingOptions(max_iterations=_REQUESTS))
        step = _by_fbgemm(request, lambda i, o, _: module(i, o).backward(gradient))
        backward = _by_fbgemm(request, lambda i, o, _: module(i, o), gradient)
        ratios.append(((ours.forward_ms + ours.backward_ms) / step, ours.backward_ms / backward))
    return Agreement(*(median(values) for values in zip(*ratios, strict=True)))


def _by_fbgemm(
    request: Any, run: Callable[..., Any], gradient: torch.Tensor | None = None
) -> float:
    """Its milliseconds of a run; with a gradient, of the backward pass that follows it.

    On a CPU its clock goes on while others have the core, and ours does not: so its own is told
    less the share of the time that this thread did not run.
    """
    from fbgemm_gpu.tbe.bench import benchmark_requests

    start_wall, start = time.perf_counter(), time.thread_time()
    seconds: float = benchmark_requests(
        [request] * _REQUESTS,
        run,
        check_median=True,
        num_warmups=2,
        bwd_only=gradient is not None,
        grad=gradient,
    )
    on_core = (time.thread_time() - start) / (time.perf_counter() - start_wall)
    return seconds * 1e3 * (1.0 if request.indices.is_cuda else on_core)
