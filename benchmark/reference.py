"""The reference: a small operator, always the same, that runs beside every iteration on a core.

Other tenants of a shared host slow memory, caches and the core itself down, by a tenth or by a
half, for moments or for minutes, and no clock or counter of ours shows it. A small operator of the
same kind feels it as the shard does: its forward pass as that of the shard, its backward pass as
that of the shard. So it runs before and after each iteration, and costs are told as on a machine on
which it takes its quiet time.
"""

from autoshard.benchmark.backends.base import DeviceBackend, TimedOperator
from autoshard.benchmark.embedding_op import EmbeddingOp
from autoshard.benchmark.measurement import MeasureSettings
from autoshard.workload import EmbeddingTable, Shard

# Small beside most shards, whatever the machine: both are as fast as it is. An eighth of the usual
# batch tells the state of a host as well as all of it would; half of that misses some of it.
_SETTINGS = MeasureSettings(128)
_COPIES = 4  # of 45 MB
# rows, dim, pooling factor, exponent of popularity: hot and cold ones, narrow and wide ones
_TABLES = (
    (900, 64, 12.0, 1.0),
    (4_000, 256, 3.0, 0.6),
    (12_000, 32, 25.0, 0.8),
    (30_000, 128, 8.0, 0.7),
    (60_000, 64, 16.0, 0.6),
    (120_000, 16, 30.0, 0.9),
)


def reference_operators(backend: DeviceBackend) -> list[TimedOperator]:
    """Returns the reference several times over, to be run in turn; none where nothing is shared.

    Where an operator's weights came to lie in memory makes it faster or slower by 1 to 2 % for
    good, and with one reference all that its process measures.
    """
    if not backend.is_shared:
        return []
    tables = [
        EmbeddingTable(f"reference{number}", rows, dim, pooling, zipf_alpha=alpha)
        for number, (rows, dim, pooling, alpha) in enumerate(_TABLES)
    ]
    shard = Shard.of_tables(tables)
    operators = [EmbeddingOp(shard, _SETTINGS, backend) for _ in range(_COPIES)]
    return [TimedOperator(operator.forward, operator.gradient) for operator in operators]
