"""Tasks to be sharded."""

from dataclasses import replace

from autoshard.workload import Device, EmbeddingTable, ShardingTask

Tables = tuple[EmbeddingTable, ...]
GIANT = EmbeddingTable("giant", 100_000, 256, 150.0, zipf_alpha=0.8)


def task_of(tables: Tables, devices: int, fill: float = 0.1) -> ShardingTask:
    """As many devices alike as are that full."""
    loose = ShardingTask(tables, Device.uniform(devices, 2**50), 1024)
    total = sum(map(loose.table_bytes, tables))
    return replace(loose, devices=Device.uniform(devices, int(total / devices / fill) + 1))
