"""`autoshard.plan`: memory that is named, or that of a GPU."""

import pytest

import autoshard
from autoshard.workload.errors import FieldError

TABLES = "synthetic:10:1:small"


@pytest.mark.parametrize(("size", "count"), [("512MB", 2**29), ("1.5 GiB", 1536 * 2**20), (9, 9)])
def test_sizes_have_units(size: str | int, count: int) -> None:
    if count == 9:
        with pytest.raises(autoshard.workload.PlanError, match="of memory are missing"):
            autoshard.plan(TABLES, 2, size)
        return
    assert autoshard.plan(TABLES, 2, size).task.devices[0].memory_bytes == count


def test_a_gpu_that_is_named_has_memory_for_tables() -> None:
    planned = autoshard.plan(TABLES, 2, hardware="h100-80gb")
    assert planned.task.devices[0].memory_bytes == 68 * 2**30
    assert any("memory of a device is 68GB, 85% of what NVIDIA H100" in n for n in planned.notes)


@pytest.mark.parametrize("memory", [None, "80", "80XB", "-1GB", True, 1.5, 0, []])
def test_memory_that_is_none_is_refused(memory: object) -> None:
    with pytest.raises(FieldError, match=r"^memory: "):
        autoshard.plan(TABLES, 2, memory)  # type: ignore[arg-type]
