"""Shards that a probe times with the product's own operator: what a cost model adjusts to.

They were chosen from 266 small random shards of three machines, one after the other, as those that
leave the least uncertainty of the other shards' costs. Two with many tables were added by hand.
Names and contents stay as they are, for probes refer to them: other shards get other names.
"""

from typing import NamedTuple

from autoshard.workload import EmbeddingTable, Shard


class ProbeShard(NamedTuple):
    """A shard, and the samples of its batch."""

    shard: Shard
    batch_size: int


_Table = tuple[int, int, float, float]  # rows, dim, pooling factor, Zipf exponent

_MANY: tuple[_Table, ...] = (
    (40, 16, 1.0, 0.0), (90, 32, 3.0, 1.2), (200, 64, 1.0, 0.5), (500, 16, 20.0, 1.0),
    (1_000, 128, 0.5, 0.0), (2_000, 32, 8.0, 0.3), (4_000, 64, 2.0, 0.8), (8_000, 16, 40.0, 1.1),
    (10_000, 128, 1.0, 0.6), (15_000, 32, 12.0, 0.9), (20_000, 64, 0.5, 0.0),
    (30_000, 16, 5.0, 0.4), (50_000, 8, 30.0, 0.7), (80_000, 32, 1.0, 1.3),
)  # fmt: skip
_SHARDS: dict[str, tuple[int, tuple[_Table, ...]]] = {
    "mixed4": (1024, ((75_980, 24, 5.5, 1.16), (73, 12, 122.0, 1.19), (31_712, 12, 45.5, 0.15),
                      (6_010, 176, 36.5, 0.0))),
    "narrow1": (1024, ((1_095, 28, 46.0, 0.0),)),
    "wide5": (1024, ((2_148, 408, 5.3, 1.42), (20, 12, 2.0, 1.31), (6_982, 12, 4.6, 0.25),
                     (5_534, 360, 117.0, 1.31), (65_384, 12, 2.3, 0.0))),
    "sparse2": (1024, ((14_989, 184, 0.35, 0.0), (106, 8, 0.1, 0.0))),
    "scattered1": (1024, ((233_467, 4, 114.0, 0.0),)),
    "tiny4": (1024, ((44, 4, 0.8, 1.57), (392, 4, 5.9, 0.0), (11, 100, 145.0, 1.29),
                     (34, 8, 103.0, 0.0))),
    "hot3": (1024, ((2_236, 4, 97.0, 1.58), (6_248, 228, 14.0, 0.86), (3_590, 400, 0.17, 0.26))),
    "outputs3": (4096, ((2_712, 268, 0.25, 0.0), (21, 332, 1.7, 0.0), (49, 132, 0.24, 0.0))),
    "large_batch3": (4096, ((77_303, 36, 0.2, 0.05), (112, 4, 0.6, 0.0),
                            (97_000, 12, 21.0, 0.0))),
    "small_batch1": (128, ((18_530, 156, 96.0, 0.2),)),
    "small1": (1024, ((19, 244, 1.07, 1.55),)),
    "narrow4": (1024, ((118_763, 4, 82.0, 1.58), (22, 84, 0.14, 0.0), (10_583, 8, 3.5, 0.0),
                       (91, 184, 4.1, 0.08))),
    "reused1": (1024, ((832, 292, 199.0, 0.0),)),
    "skewed1": (1024, ((154_831, 4, 94.0, 0.68),)),
    "large_batch_hot3": (4096, ((10_256, 324, 4.75, 1.23), (531, 4, 0.7, 1.26),
                                (23, 16, 0.3, 1.25))),
    "many14": (1024, _MANY),
    "many14_small_batch": (256, _MANY),
}  # fmt: skip


def _shard(tables: tuple[_Table, ...]) -> Shard:
    return Shard.of_tables(
        EmbeddingTable(f"probe{number}", rows, dim, pooling, zipf_alpha=alpha)
        for number, (rows, dim, pooling, alpha) in enumerate(tables)
    )


PROBE_SHARDS: dict[str, ProbeShard] = {
    name: ProbeShard(_shard(tables), batch_size) for name, (batch_size, tables) in _SHARDS.items()
}
