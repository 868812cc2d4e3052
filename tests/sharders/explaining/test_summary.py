"""The table of memory has whole words and whole numbers on lines of 80 characters."""

import pytest
from rich.console import Console

from autoshard.sharders.explaining.summary import memory_parts
from autoshard.workload import Device, EmbeddingTable, OperatorOptions, ShardingPlan, ShardingTask
from autoshard.workload.plans.placements import Placement
from autoshard.workload.ways.option import DATA_PARALLEL

GB = 10**9
NAMES = {"": 1000, "mi355x-288gb": 100}  # kinds of devices, and the first of them


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("reserved", [0.0, 0.04])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("memory_gb", [1, 9.9, 80, 309])
def test_memory_fits_into_80_characters(
    memory_gb: float, copied: bool, reserved: float, kind: str
) -> None:
    memory = int(memory_gb * GB)
    devices = tuple(
        Device(f"device{n + NAMES[kind]} {kind}".strip(), memory, int(reserved * memory))
        for n in range(2)
    )
    rows = memory // 2 // 1024  # of 128 weights and as many states: half of a device
    tables = (
        EmbeddingTable("large", rows, 128, 500.0 if memory_gb > 10 else 1.0),
        EmbeddingTable("copied", rows // 16, 128, 1.0),
    )
    operator = OperatorOptions(optimizer="adagrad")
    task = ShardingTask(tables, devices, 65536 if memory_gb > 10 else 1024, operator)
    options = {"copied": DATA_PARALLEL} if copied else {}
    placements = [Placement(table.name, 0, 128, n) for n, table in enumerate(tables)]
    plan = ShardingPlan(tuple(placements[: 2 - copied]), 2, options=options)

    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        for part in memory_parts(plan, task):
            console.print(part)
    _, head, *lines = capture.get().splitlines()
    columns = ["device", "weights", "optim", "inputs", "outputs"]
    columns += ["grads"] * copied + ["reserve"] * (reserved > 0) + ["free", "of", "full"]
    assert head.split() == columns
    words = " ".join(lines).split()  # names of two words may take two lines
    names = [word for device in devices for word in device.name.split()]
    assert [word for word in words if word in names] == names
    sizes = [word for word in words if word not in names]
    assert len(sizes) == len(devices) * (len(columns) - 1)
    assert all(size[0].isdigit() for size in sizes)
    assert kind or len(lines) == len(devices)
