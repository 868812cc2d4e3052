"""The reference: one operator, always the same, that runs beside every shard on a CPU core.

Other tenants of a shared host slow memory and caches down, by a tenth or by a half, for seconds
or for minutes, and no clock or counter of ours shows it. An operator of the same kind feels it as
the shard does. So each iteration of a shard is followed by one of the reference, and costs are
told as on a machine on which the reference takes its quiet time.
"""

import time

import torch

from benchmark.embedding_op import EmbeddingOp
from benchmark.measurement import MeasureSettings
from workload import EmbeddingTable, Shard

_SETTINGS = MeasureSettings(1024)
# rows, dim, pooling factor, exponent of popularity: hot and cold ones, narrow and wide ones
_TABLES = (
    (900, 64, 12.0, 1.0),
    (4_000, 256, 3.0, 0.6),
    (12_000, 32, 25.0, 0.8),
    (30_000, 128, 8.0, 0.7),
    (60_000, 64, 16.0, 0.6),
    (120_000, 16, 30.0, 0.9),
)


class Reference:
    """The reference operator, ready to be timed on the calling thread's core."""

    def __init__(self) -> None:
        tables = [
            EmbeddingTable(f"reference{number}", rows, dim, pooling, zipf_alpha=alpha)
            for number, (rows, dim, pooling, alpha) in enumerate(_TABLES)
        ]
        self._op = EmbeddingOp(Shard.of_tables(tables), _SETTINGS, torch.device("cpu"))

    def run_ms(self) -> float:
        """Milliseconds of the thread that one forward and backward pass takes now."""
        start = time.thread_time_ns()
        self._op.forward().backward(self._op.gradient)  # type: ignore[no-untyped-call]
        return (time.thread_time_ns() - start) / 1e6
