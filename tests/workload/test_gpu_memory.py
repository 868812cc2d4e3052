"""Memory that training takes of GPUs beside tables."""

import pytest

from autoshard.workload import (
    Device,
    EmbeddingTable,
    OperatorOptions,
    PlanError,
    ShardingTask,
    UserError,
)
from autoshard.workload.packing.gpu_memory import on_gpus

GB = 10**9


def task(memory: int, count: int = 100, batch: int = 65_536, ranks: int = 8) -> ShardingTask:
    tables = tuple(EmbeddingTable(f"t{n}", 1000, 128, 20.0) for n in range(count))
    return ShardingTask(tables, Device.uniform(ranks, memory), batch)


def test_large_batches_take_gigabytes_that_the_operator_s_inputs_do_not_show() -> None:
    before, after = task(80 * GB), on_gpus(task(80 * GB))
    pieces = [table.whole() for table in before.tables]
    lookups = 100 * 20 * 65_536
    assert after.bytes_of(pieces) - before.bytes_of(pieces) == lookups * (24 + 52 - 8)
    reserved = {device.reserved_bytes for device in after.devices}
    samples = 65_536 // 8 * (3 * 2000 * 8 + 2 * 100 * 128 * 4)
    assert reserved == {1_500_000_000 + round(0.03 * 80 * GB) + samples}
    assert OperatorOptions(**after.operator.to_json()) == after.operator
    assert ShardingTask.from_json(after.to_json()) == after


def test_what_a_user_reserves_is_left_alone() -> None:
    given = ShardingTask(task(80 * GB).tables, (Device("gpu", 80 * GB, 10 * GB),), 8)
    (device,) = on_gpus(given).devices
    assert device.reserved_bytes > 10 * GB


def test_a_gpu_without_memory_for_tables_ends_in_one_line() -> None:
    with pytest.raises(PlanError, match=r"device0 has .*, and training takes .* for CUDA, NCCL"):
        on_gpus(task(2 * GB))


def test_a_table_that_is_too_wide_for_the_operator_ends_in_one_line() -> None:
    wide = EmbeddingTable("wide", 1000, 2052, 1.0)
    given = ShardingTask((wide,), Device.uniform(2, 80 * GB), 64)
    with pytest.raises(UserError, match=r"table wide has 2,052 columns, .* at most 2,048 on GPUs"):
        on_gpus(given)
