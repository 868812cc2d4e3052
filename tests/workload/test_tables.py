import pickle
from dataclasses import replace

import pytest

from autoshard.workload import (
    EmbeddingTable,
    FieldError,
    OperatorOptions,
    Shard,
    TableSlice,
    UserError,
)
from autoshard.workload.tables import NUM_REUSE_BINS

TABLE = EmbeddingTable("a", 1000, 64, 10.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("rows", 0),
        ("rows", 1.5),
        ("rows", 2**41),
        ("dim", 0),
        ("dim", 6),
        ("pooling_factor", -1.0),
        ("pooling_factor", float("nan")),
        ("pooling_factor", float("inf")),
        ("zipf_alpha", -0.1),
        ("reuse", (1.0,)),
        ("reuse", (0.5,) * NUM_REUSE_BINS),
        ("reuse_batch_size", 0),
    ],
)
def test_a_table_names_the_field_that_is_wrong(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        replace(TABLE, **{field: value})
    assert caught.value.field == field


def test_errors_survive_the_way_through_ray() -> None:
    with pytest.raises(FieldError) as caught:
        replace(TABLE, rows=0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.field) == (str(caught.value), "rows")


def test_lookups_depend_on_the_description_and_not_on_name_or_dim() -> None:
    assert replace(TABLE, name="b", dim=8).access_digest == TABLE.access_digest
    for change in ({"rows": 999}, {"pooling_factor": 9.0}, {"zipf_alpha": 1.0}):
        assert replace(TABLE, **change).access_digest != TABLE.access_digest
    assert replace(TABLE, zipf_alpha=0.0).access_digest == TABLE.access_digest


def test_equal_sets_of_slices_are_equal_shards() -> None:
    other = replace(TABLE, name="b", rows=77)
    first = Shard((TABLE.whole(), TableSlice(other, 8, 16)))
    second = Shard((TableSlice(other, 8, 16), TABLE.whole()))
    assert first == second
    assert first.digest == second.digest
    assert first.total_dim == 80
    renamed = Shard.of_tables([replace(TABLE, name="z")])
    assert renamed.digest == Shard.of_tables([TABLE]).digest
    assert Shard((TableSlice(TABLE, 0, 32),)).digest == Shard((TableSlice(TABLE, 32, 32),)).digest
    assert Shard((TableSlice(TABLE, 0, 32),)).digest != Shard((TABLE.whole(),)).digest


@pytest.mark.parametrize(("start", "width"), [(0, 0), (2, 8), (0, 6), (60, 8), (-4, 8)])
def test_a_slice_stays_inside_its_table(start: int, width: int) -> None:
    with pytest.raises(FieldError):
        TableSlice(TABLE, start, width)


def test_a_shard_is_never_empty() -> None:
    with pytest.raises(UserError):
        Shard(())


def test_stored_bytes_by_hand() -> None:
    assert OperatorOptions().stored_bytes(1000, 64) == 1000 * 64 * 4 + 1000 * 4
    assert OperatorOptions("fp16", "sgd").stored_bytes(1000, 64) == 1000 * 64 * 2
    assert OperatorOptions("fp16", "adagrad").stored_bytes(10, 8) == 10 * 8 * 2 + 10 * 8 * 4
    shard = Shard.of_tables([TABLE])
    indices = 10 * 32 + 32 + 1
    assert OperatorOptions().working_bytes(shard, 32) == indices * 8 + 2 * 64 * 32 * 4


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"optimizer": "adam"}])
def test_unknown_operators_list_what_is_known(options: dict[str, str]) -> None:
    with pytest.raises(FieldError, match="must be one of"):
        OperatorOptions(**options)  # type: ignore[arg-type]
