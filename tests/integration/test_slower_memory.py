"""Rows in slower memory: what TorchRec's planner and its caches are told of them."""

from functools import partial

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from zipf_data import ZipfRows

from autoshard.integration import AccessStatistics, memory_constraints
from autoshard.workload import EmbeddingTable, UserError, lru_hit_rate
from autoshard.workload.profiling.profiler import Portion, TableProfiler
from autoshard.workload.profiling.table_counts import TableBatch

LOOKUPS, BATCH, BATCHES = 4, 2048, 40  # of a sample; of a batch; that are counted


def profiled(name: str, law: ZipfRows) -> EmbeddingTable:
    """A table with the statistics of batches that are drawn from a law."""
    profiler = TableProfiler(BATCH, [EmbeddingTable(name, law.rows, 16, 1.0)])
    rng = np.random.default_rng(7)
    for number in range(BATCHES):
        batch = TableBatch(law.draw(BATCH * LOOKUPS, rng), np.full(BATCH, LOOKUPS))
        profiler.add(Portion(int(2 * number >= BATCHES), {name: partial(list, [batch])}))
    (table,) = profiler.tables()
    return table


def test_the_planner_takes_the_choice() -> None:
    """On GPUs that exist in numbers only: its planner needs none."""
    tables = [profiled(name, ZipfRows(1000, 1.0)) for name in "abc"]
    constraints = memory_constraints(tables, (1000, 0, 250), "lru")
    model = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=[table.name],
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cuda", hbm_cap=2**30, ddr_cap=2**30),
        batch_size=BATCH,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        debug=False,
    )
    (plan,) = planner.plan(model, [EmbeddingBagCollectionSharder()]).plan.values()
    kernels = {name: parameter.compute_kernel for name, parameter in plan.items()}
    assert kernels == {"a": "fused", "b": "fused_uvm", "c": "fused_uvm_caching"}
    cache = plan["c"].cache_params
    assert (cache.load_factor, cache.algorithm.name) == (0.25, "LRU")
    assert 1 - cache.stats.expected_miss_rate(0.25) == lru_hit_rate(tables[2], 250, BATCH)
    with pytest.raises(UserError, match="rows: of table a must lie between 0 and 1000, got 1001"):
        memory_constraints(tables, (1001, 0, 0))
    with pytest.raises(UserError, match="eviction: must be lfu or lru, got 'fifo'"):
        AccessStatistics(tables[0], "fifo")  # type: ignore[arg-type]


def test_torchrec_knows_statistics_again_that_say_the_same() -> None:
    """By what it calls a stable fingerprint, which another process must find as well."""
    table, other = profiled("t", ZipfRows(2000, 1.3)), profiled("t", ZipfRows(2000, 0.5))
    again = profiled("t", ZipfRows(2000, 1.3))
    said = AccessStatistics(table).stable_fingerprint()
    assert said == AccessStatistics(again).stable_fingerprint()
    assert all(isinstance(each, str | int | float) for each in said)
    for differs in (AccessStatistics(table, "lru"), AccessStatistics(other)):
        assert differs.stable_fingerprint() != said


def test_caches_know_which_rows_are_hot() -> None:
    hot_law, even_law = ZipfRows(2000, 1.3), ZipfRows(2000, 0.0)
    hot, even = (AccessStatistics(profiled("t", law)) for law in (hot_law, even_law))
    assert hot.expected_miss_rate(0) == 1
    assert hot.expected_miss_rate(1) == pytest.approx(0)
    # A row is in a batch of so many lookups with this probability.
    used = -np.expm1(-LOOKUPS * BATCH * hot_law.shares)
    assert hot.expected_miss_rate(0.1) == pytest.approx(1 - used[:200].sum() / used.sum(), abs=0.03)
    assert hot.expected_lookups == pytest.approx(used.sum(), rel=0.02)
    assert hot.cacheability < 0.9 * even.cacheability
    assert even.cacheability > 0.9
    with pytest.raises(UserError, match="table t has no access statistics: profile its data"):
        AccessStatistics(EmbeddingTable("t", 10, 8, 1.0))
