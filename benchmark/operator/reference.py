"""The reference operator: small and fixed, it runs beside each iteration.

Other tenants of a shared host slow memory, caches and cores by 10 to 50 %, for moments or minutes,
and no clock or counter shows it; a GPU is slowed by its limits of power and heat. A small operator
of the same kind is slowed like the shard, forward like forward and backward like backward. So it
runs before and after each iteration, and costs are normalised to its uncontended time.
"""

from autoshard.benchmark.backends.base import DeviceBackend, TimedOperator
from autoshard.benchmark.measurement import MeasureSettings
from autoshard.benchmark.operator.embedding_op import EmbeddingOp
from autoshard.workload import EmbeddingTable, Shard

_COPIES = 4  # copies of 45 MB each
# rows, dim, pooling factor, Zipf exponent: hot and cold ones, narrow and wide ones
_TABLES = (
    (900, 64, 12.0, 1.0),
    (4_000, 256, 3.0, 0.6),
    (12_000, 32, 25.0, 0.8),
    (30_000, 128, 8.0, 0.7),
    (60_000, 64, 16.0, 0.6),
    (120_000, 16, 30.0, 0.9),
)


def reference_operators(backend: DeviceBackend, copies: int = _COPIES) -> list[TimedOperator]:
    """Returns copies of the reference, to be run in turn.

    The memory location of an operator's weights changes its time by 1 to 2 % permanently. With a
    single copy, that would affect all measurements of a process.
    """
    # Small beside most shards. On CPUs, an eighth of the usual batch shows the state of a host as
    # well as all of it; half of that misses some of it.
    settings = MeasureSettings(backend.reference_samples)
    tables = [
        EmbeddingTable(f"reference{number}", rows, dim, pooling, zipf_alpha=alpha)
        for number, (rows, dim, pooling, alpha) in enumerate(_TABLES)
    ]
    shard = Shard.of_tables(tables)
    operators = [EmbeddingOp(shard, settings, backend) for _ in range(copies)]
    return [TimedOperator(operator.forward, operator.gradient) for operator in operators]
