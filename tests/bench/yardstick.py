"""Compares our timing with FBGEMM's own benchmark, on one operator and one batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from autoshard.benchmark.backends.base import DeviceBackend, Stopwatch, TimedOperator
from autoshard.benchmark.machine.process import keep_freed_memory
from autoshard.benchmark.measurement import TimingOptions
from autoshard.benchmark.operator.embedding_op import build_module
from autoshard.benchmark.operator.timing import time_interleaved
from autoshard.workload import EmbeddingTable, OperatorOptions, Shard

_TABLES, _ROWS, _DIM, _POOLING, _BATCH = 16, 40_000, 64, 16, 1024
_REQUESTS = 10  # whose medians are compared in each round
_KEPT_BYTES = 2**29  # more than outputs and gradients need


@dataclass(frozen=True)
class Agreement:
    """Ratios of our times to FBGEMM's: of a whole step, and of its backward pass."""

    step: float
    backward: float


def compare_with_fbgemm(
    backend: DeviceBackend, watch: Stopwatch, rounds: int = 15, batch_size: int = _BATCH
) -> Agreement:
    """Returns medians of ratios, with both timing one operator alternately on FBGEMM's requests.

    FBGEMM's forward pass is timed together with the backward pass. By itself it would find its rows
    in the cache, which the backward pass evicts in training.

    Args:
        backend: Backend of the device.
        watch: Stopwatch of the device. It clears no cache, as FBGEMM clears none on a CPU.
        rounds: Number of rounds.
        batch_size: Samples of the batch: enough that FBGEMM does not time the host's launches.
    """
    from fbgemm_gpu.tbe.utils import generate_requests

    keep_freed_memory(_KEPT_BYTES)
    tables = [EmbeddingTable(f"t{n}", _ROWS, _DIM, _POOLING) for n in range(_TABLES)]
    module = build_module(Shard.of_tables(tables), OperatorOptions(), backend)
    (request,) = generate_requests(
        1, batch_size, _TABLES, _POOLING, _ROWS, use_cpu=backend.device.type == "cpu"
    )
    indices, offsets = request.indices.long(), request.offsets.long()
    gradient = torch.ones(batch_size, _TABLES * _DIM, device=backend.device)
    request.indices, request.offsets = indices, offsets
    ratios = []
    for _ in range(rounds):
        subject = TimedOperator(lambda: module(indices, offsets), gradient)
        (ours,) = time_interleaved([subject], watch, [TimingOptions(max_iterations=_REQUESTS)])
        step = _by_fbgemm(request, lambda i, o, _: module(i, o).backward(gradient))
        backward = _by_fbgemm(request, lambda i, o, _: module(i, o), gradient)
        ratios.append(((ours.forward_ms + ours.backward_ms) / step, ours.backward_ms / backward))
    return Agreement(*(median(values) for values in zip(*ratios, strict=True)))


def _by_fbgemm(
    request: Any, run: Callable[..., Any], gradient: torch.Tensor | None = None
) -> float:
    """Returns FBGEMM's milliseconds of a run; with a gradient, of the backward pass after it.

    On a CPU, FBGEMM's clock includes time in which other processes have the core, and ours does
    not. So its result is multiplied by the share of time in which this thread ran.
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
