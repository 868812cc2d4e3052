import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.workload import Shard, UserError, random_shards, synthetic_tables, table_lookups
from autoshard.workload.access.reuse import bin_of
from autoshard.workload.sources.synthetic import LOOKUP_SHARE, PROFILES
from autoshard.workload.tables.parts import PARTS, part_of, part_of_shard, tables_by_part
from autoshard.workload.tables.table import NUM_REUSE_BINS

# `fbgemm_t856_bs65536.pt`, as published: share of distinct rows by number of uses.
PUBLISHED_ROW_SHARE = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001]
PUBLISHED_POOLING = 887_017_990 / 856 / 65_536
PUBLISHED_DISTINCT_ROWS = 128_435_723 / 856
STATISTICS = Path(__file__).parents[3] / "shared/data/dlrm_datasets/locality_stats_2021.txt"


@pytest.mark.parametrize(("count", "profile"), [(200, "small"), (24, "full")])
def test_a_pool_is_like_the_published_one(count: int, profile: str) -> None:
    """Counted in the pool's real batches, not in its descriptions."""
    scale, batch_size = PROFILES[profile].scale, PROFILES[profile].batch_size
    rows, lookups = np.zeros(NUM_REUSE_BINS), np.zeros(NUM_REUSE_BINS)
    for table in synthetic_tables(count, seed=3, profile=profile):
        _, uses = np.unique(table_lookups(table, batch_size)[0], return_counts=True)
        rows += np.bincount(bin_of(uses), minlength=NUM_REUSE_BINS)
        lookups += np.bincount(bin_of(uses), weights=uses, minlength=NUM_REUSE_BINS)
    share = rows / rows.sum()
    assert np.abs(share[: len(PUBLISHED_ROW_SHARE)] - PUBLISHED_ROW_SHARE).max() < 0.01
    assert share[len(PUBLISHED_ROW_SHARE) :].sum() < 0.002
    assert np.abs(lookups / lookups.sum() - LOOKUP_SHARE).max() < 0.025
    assert lookups.sum() / count / batch_size == pytest.approx(PUBLISHED_POOLING, rel=0.02)
    assert rows.sum() * scale / count == pytest.approx(PUBLISHED_DISTINCT_ROWS, rel=0.03)


@pytest.mark.skipif(not STATISTICS.exists(), reason="the published statistics are not beside us")
def test_the_constants_are_the_published_ones() -> None:
    first = STATISTICS.read_text().split("\n\n")[0]
    rows, lookups = first.split("Ratio of index distribution")
    read = [float(value) for value in re.findall(r"^\(.*: ([\d.]+)$", rows, re.MULTILINE)]
    assert read[: len(PUBLISHED_ROW_SHARE)] == PUBLISHED_ROW_SHARE
    read = [float(value) for value in re.findall(r"^\(.*: ([\d.]+)$", lookups, re.MULTILINE)]
    assert read == LOOKUP_SHARE.tolist()


def test_tables_are_reproducible_and_different() -> None:
    first = synthetic_tables(50, 1, "small")
    assert first == synthetic_tables(50, 1, "small")
    assert first != synthetic_tables(50, 2, "small")
    assert len({table.access_digest for table in first}) == 50
    assert {table.dim for table in first} == {16, 32, 64, 128, 256}
    pooling = [table.pooling_factor for table in first]
    assert min(pooling) < 3
    assert max(pooling) > 50


@pytest.mark.parametrize(("count", "profile"), [(0, "small"), (5, "huge")])
def test_impossible_pools_are_refused(count: int, profile: str) -> None:
    with pytest.raises(UserError):
        synthetic_tables(count, 0, profile)


def test_random_shards_differ_and_repeat() -> None:
    tables = synthetic_tables(30, 1, "small")
    shards = random_shards(tables, 200, 10, seed=4)
    assert len({shard.digest for shard in shards}) == 200
    assert {len(shard) for shard in shards} == set(range(1, 11))
    assert shards == random_shards(tables, 200, 10, seed=4)
    assert shards != random_shards(tables, 200, 10, seed=5)
    (one, other, *_), alien = tables_by_part(tables)["train"], tables_by_part(tables)["test"][0]
    assert len(random_shards([one, other], 50, 10)) == 3  # either table, or both
    assert len(random_shards([one, alien], 50, 10)) == 2  # no shard mixes parts
    widths = {
        s.width for shard in random_shards(tables, 200, 10, augment=True) for s in shard.pieces
    }
    assert widths == {4, 8, 16, 32, 64, 128, 256}
    with pytest.raises(UserError):
        random_shards(tables, 0, 10)


def test_a_table_is_of_one_part_under_any_name_and_width() -> None:
    tables = synthetic_tables(400, 1, "small")
    parts = tables_by_part(tables)
    for part, share in PARTS.items():
        assert len(parts[part]) / 400 == pytest.approx(share, abs=0.08)
    for table in tables[:20]:
        assert part_of(replace(table, name="other", dim=8)) == part_of(table)
    for shard in random_shards(tables, 100, 20, augment=True):
        assert part_of_shard(shard) is not None
    mixed = Shard.of_tables([parts["train"][0], parts["test"][0]])
    assert part_of_shard(mixed) is None
