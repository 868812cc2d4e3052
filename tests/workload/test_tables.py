import pickle
from dataclasses import replace

import pytest

from autoshard.workload import (
    EmbeddingTable,
    FieldError,
    OperatorOptions,
    Piece,
    Shard,
    UserError,
    table_lookups,
)
from autoshard.workload.tables.operators import Optimizer, Weights
from autoshard.workload.tables.table import NUM_REUSE_BINS

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
    first = Shard((TABLE.whole(), Piece(other, 8, 16)))
    second = Shard((Piece(other, 8, 16), TABLE.whole()))
    assert first == second
    assert first.digest == second.digest
    assert first.total_dim == 80
    renamed = Shard.of_tables([replace(TABLE, name="z")])
    assert renamed.digest == Shard.of_tables([TABLE]).digest
    assert Shard((Piece(TABLE, 0, 32),)).digest == Shard((Piece(TABLE, 32, 32),)).digest
    assert Shard((Piece(TABLE, 0, 32),)).digest != Shard((TABLE.whole(),)).digest


@pytest.mark.parametrize(("start", "width"), [(0, 0), (2, 8), (0, 6), (60, 8), (-4, 8)])
def test_a_slice_stays_inside_its_table(start: int, width: int) -> None:
    with pytest.raises(FieldError):
        Piece(TABLE, start, width)


def test_a_shard_is_never_empty() -> None:
    with pytest.raises(UserError):
        Shard(())


def test_stored_bytes_by_hand() -> None:
    assert OperatorOptions().stored_bytes(1000, 64) == 1000 * 64 * 4 + 1000 * 4
    assert OperatorOptions("fp16", "sgd").stored_bytes(1000, 64) == 1000 * 64 * 2
    assert OperatorOptions("fp16", "adagrad").stored_bytes(10, 8) == 10 * 8 * 2 + 10 * 8 * 4


def test_memory_by_hand() -> None:
    parts = OperatorOptions().memory([TABLE.whole()], 32)
    assert parts.weights == 1000 * 64 * 4
    assert parts.optimizer == 1000 * 4
    assert parts.inputs == (10 * 32 + 32) * 8
    assert parts.outputs == 2 * 64 * 32 * 4
    assert parts.total == sum(parts)
    more = OperatorOptions().memory([replace(TABLE, features=3, weighted=True).whole()], 32)
    assert more.inputs == (10 * 32 + 3 * 32) * 8 + 10 * 32 * 4
    assert more.outputs == 3 * parts.outputs


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_bytes_of_many_slices_are_those_of_each(weights: Weights, optimizer: Optimizer) -> None:
    operator = OperatorOptions(weights, optimizer)
    tables = [TABLE, replace(TABLE, features=3, weighted=True), replace(TABLE, rows=2**40)]
    pieces = [piece for table in tables for piece in (table.whole(), Piece(table, 8, 12))]
    found = operator.bytes_of_each(pieces, 32).tolist()
    assert found == [operator.memory([piece], 32).total for piece in pieces]
    assert sum(found) == operator.memory(pieces, 32).total
    assert operator.bytes_of_each([], 32).tolist() == []


def test_features_and_weights_of_lookups_are_distinguished() -> None:
    plain = TABLE.whole()
    for unusual in (replace(TABLE, features=2), replace(TABLE, weighted=True)):
        assert unusual.whole().digest != plain.digest
        assert EmbeddingTable.from_json(unusual.to_json()) == unusual
    assert "features" not in TABLE.to_json()  # names of what was measured before stay as they are
    lookups, lengths = table_lookups(replace(TABLE, features=3), 32)
    assert len(lookups) == sum(lengths) == 320
    assert len(lengths) == 3 * 32
    assert replace(TABLE, features=3).whole().output_width == 3 * TABLE.dim
    with pytest.raises(FieldError, match="features"):
        replace(TABLE, features=0)


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"optimizer": "adam"}])
def test_unknown_operators_list_what_is_known(options: dict[str, str]) -> None:
    with pytest.raises(FieldError, match="must be one of"):
        OperatorOptions(**options)  # type: ignore[arg-type]
