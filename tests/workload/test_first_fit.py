"""Packing of many tasks at once says what packing of each says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoshard.workload import Device, EmbeddingTable, PlanError, ShardingTask
from autoshard.workload.packing.first_fit import (
    all_fit,
    all_fit_split,
    first_fit_decreasing,
    surely_pack,
)
from autoshard.workload.packing.pack import pack

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=8)
capacities = st.lists(st.integers(1, 25), min_size=1, max_size=4)
tasks = st.lists(st.tuples(sizes, capacities), min_size=1, max_size=6)
Task = tuple[list[int], list[int]]


def arrays(
    drawn: list[Task],
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], ...]:
    return tuple(
        np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        for rows in ([task[0] for task in drawn], [task[1] for task in drawn])
    )


def by_hand(sizes: list[int], capacities: list[int]) -> list[int]:
    """Returns the device of each size, in a loop; -1 if none has so much free."""
    free, homes = list(capacities), [-1] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        for device in sorted(range(len(capacities)), key=lambda device: -capacities[device]):
            if free[device] >= sizes[number]:
                free[device] -= sizes[number]
                homes[number] = device
                break
    return homes


@given(drawn=tasks)
def test_many_are_packed_as_each(drawn: list[Task]) -> None:
    found = first_fit_decreasing(*arrays(drawn))
    for row, (sizes, capacities) in zip(found, drawn, strict=True):
        assert row[: len(sizes)].tolist() == by_hand(sizes, capacities)
    each = [-1 not in by_hand(*task) for task in drawn]
    assert all_fit(*arrays(drawn)).tolist() == each


@given(task=st.tuples(sizes, capacities), order=st.permutations(range(4)))
def test_what_surely_packs_packs_in_any_order_of_devices(task: Task, order: list[int]) -> None:
    if not surely_pack(*arrays([task]))[0]:
        return
    sizes, capacities = task
    free = [capacities[number] for number in order if number < len(capacities)]
    for size in sorted(sizes, reverse=True):
        device = next(number for number, left in enumerate(free) if left >= size)
        free[device] -= size


def test_the_bound_by_hand() -> None:
    # After 5 there are 7 left on two devices, so one has 4 or more for the 3; after that 4, so 2.
    assert surely_pack(np.array([[5, 3, 2]]), np.array([[6, 6]])).tolist() == [True]
    # The 4 may find 3 and 4 left, or 7 and 0: it fits in the first order only by luck.
    assert surely_pack(np.array([[5, 4]]), np.array([[6, 6]])).tolist() == [False]
    # A capacity of 0 is padding.
    assert surely_pack(np.array([[5, 0]]), np.array([[6, 0]])).tolist() == [True]


@given(
    tables=st.lists(
        st.tuples(st.integers(1, 4000), st.integers(1, 12), st.sampled_from([0.0, 3.0])),
        min_size=1, max_size=6,
    ),
    devices=st.integers(1, 4),
    fill=st.floats(0.5, 1.0),
)  # fmt: skip
def test_split_tables_are_packed_as_a_task_with_splits_is(
    tables: list[tuple[int, int, float]], devices: int, fill: float
) -> None:
    drawn = tuple(
        EmbeddingTable(f"t{number}", rows, 4 * steps, lookups)
        for number, (rows, steps, lookups) in enumerate(tables)
    )
    loose = ShardingTask(drawn, Device.uniform(devices, 2**40), 64)
    memory = int(sum(map(loose.table_bytes, drawn)) / devices / fill) + 1
    task = ShardingTask(drawn, Device.uniform(devices, memory), 64)
    narrow = [task.piece_bytes(type(t.whole())(t, 0, 4)) for t in drawn]
    column = [
        (task.table_bytes(t) - least) // (t.dim - 4) if t.dim > 4 else 0
        for t, least in zip(drawn, narrow, strict=True)
    ]
    fixed = [task.table_bytes(t) - t.dim * each for t, each in zip(drawn, column, strict=True)]
    widths = [t.dim for t in drawn]
    found = all_fit_split(
        *(np.array([values], np.int64) for values in (fixed, column, widths, [memory] * devices))
    )
    try:
        pack(task, split=True)
    except PlanError:
        assert not found[0]
    else:
        assert found[0]
