"""What runs the pool's affairs from a shell: look at it, end it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run

from autoshard.benchmark import BenchmarkPool, MeasureSettings, PoolError
from autoshard.benchmark.pool.pool import find_pool
from autoshard.workload import EmbeddingTable, Shard


def test_a_pool_is_shown_and_ended(
    fresh_pool: Callable[..., BenchmarkPool],
    tables: tuple[EmbeddingTable, ...],
    tmp_path: Path,
) -> None:
    (answer,) = fresh_pool().measure([Shard.of_tables(tables[:2])], MeasureSettings(256))
    hardware, versions = fresh_pool().make()
    assert (hardware, versions) == (answer.hardware, answer.versions)
    said = run("pool.py", "show", tmp_path).stdout
    assert f"devices of {hardware} with {versions}" in said
    assert f" on {answer.node}" in said
    assert "0 measure now, 0 shards wait; devices measured " in said
    assert "1 shards measured, 0 failed; 0 devices lost" in said
    with pytest.raises(PoolError, match=r"measures on cpu, not on cuda: end it first, with .*stop"):
        fresh_pool(kind="cuda").devices()
    assert "the pool is ended" in run("pool.py", "stop", tmp_path).stdout
    assert find_pool() is None
    for command in ("stop", "show"):
        assert "no pool runs" in run("pool.py", command, tmp_path).stdout


def test_no_cluster_is_started_to_look_at(tmp_path: Path) -> None:
    done = run("pool.py", "show", tmp_path, code=2, RAY_ADDRESS="127.0.0.1:9")
    assert "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:9" in done.stderr


def test_a_cluster_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
    done = run("pool.py", "show", tmp_path, code=2, RAY_ADDRESS="", RAY_TMPDIR=str(tmp_path))
    assert "no Ray cluster runs here: nothing answers at 127.0.0.1:9" in done.stderr
