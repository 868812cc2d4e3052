"""What may be learned from, and what is said of the rest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from formula import REFERENCE_LEVEL, formula_exchanges, measurement

from autoshard.benchmark import Measurement, MeasurementStore, ReferenceLevel, export_parquet
from autoshard.benchmark.measurement import Directions
from autoshard.cost_model import CostDataset, DataError, Selection, read_costs, split
from autoshard.workload import EmbeddingTable, OperatorOptions, Shard, random_shards
from autoshard.workload.tables.parts import part_of_shard, tables_by_part

FP16 = OperatorOptions("fp16")


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., Path]:
    """Puts measurements into a store."""

    def put(measurements: Sequence[Measurement], name: str = "costs.db") -> Path:
        with MeasurementStore(tmp_path / name) as store:
            store.put(measurements)
        return tmp_path / name

    return put


@pytest.fixture
def shards(many_tables: tuple[EmbeddingTable, ...]) -> list[Shard]:
    return random_shards(many_tables, 120, 6)


def test_stores_and_parquet_files_are_read_together(
    keep: Callable[..., Path], shards: list[Shard], many_tables: tuple[EmbeddingTable, ...]
) -> None:
    first = keep([measurement(shard) for shard in shards[:80]])
    second = keep([measurement(shard) for shard in shards[60:]], "more.db")
    with MeasurementStore(second) as store:
        for exchange in formula_exchanges(many_tables, 5):
            store.put_exchange(exchange)
        export_parquet(store, second.with_suffix(".parquet"))
    data = read_costs([first, second.with_suffix(".parquet")])
    assert len(data) == 120
    assert len(data.exchanges) == 5
    assert data.totals_ms[0] == pytest.approx(measurement(shards[0]).total_ms)
    parts = split(data)
    assert sum(map(len, parts.values())) == 120
    for part, some in parts.items():
        assert {part_of_shard(shard) for shard in some.shards} == {part}


def test_the_noise_follows_from_repeats(keep: Callable[..., Path], shards: list[Shard]) -> None:
    once = [measurement(shard, noise=0.05) for shard in shards]
    twice = [measurement(shard, noise=0.05, seed=1) for shard in shards[:40]]
    data = read_costs([keep(once + twice)])
    assert len(data) == 120
    assert data.noise_floor() == pytest.approx(0.05 * 2**0.5 * 0.67, rel=0.6)
    assert data.totals_ms[0] == pytest.approx(np.mean([once[0].total_ms, twice[0].total_ms]))
    assert read_costs([keep(once, "once.db")]).noise_floor() is None


def with_error(known: Measurement, error: float, factor: float = 1.0) -> Measurement:
    """The same cost times a factor, and how certain it is."""
    assert known.timing is not None
    forward_ms, backward_ms = known.timing.forward_ms * factor, known.timing.backward_ms * factor
    timing = replace(
        known.timing, forward_ms=forward_ms, backward_ms=backward_ms, error=Directions.of(error)
    )
    return replace(known, timing=timing)


def test_repeats_are_weighted_by_their_errors(shards: list[Shard]) -> None:
    sure = with_error(measurement(shards[0]), 0.01)
    loose = with_error(measurement(shards[0], seed=1), 0.02, factor=1.05)
    data = CostDataset.of([sure, loose])
    assert data.totals_ms[0] == pytest.approx(sure.total_ms * (4 * 1.0 + 1 * 1.05) / 5)
    assert data.errors[0] == pytest.approx((1 / 0.01**2 + 1 / 0.02**2) ** -0.5)
    assert data.repeats_ms[0] == (sure.total_ms, loose.total_ms)


@pytest.mark.parametrize("error", [0.0, -1.0, float("nan"), float("inf")])
def test_an_error_that_cannot_be_is_like_the_others(shards: list[Shard], error: float) -> None:
    known = [with_error(measurement(shard), 0.02) for shard in shards[:5]]
    odd = with_error(measurement(shards[5]), error)
    assert CostDataset.of([odd, *known]).errors == pytest.approx([0.02] * 6)
    alone = CostDataset.of([odd, with_error(measurement(shards[5], seed=1), error, 1.1)])
    assert alone.totals_ms[0] == pytest.approx(odd.total_ms * 1.05)
    assert alone.noise() is None


def test_repeats_widen_errors_that_cover_iterations_alone(shards: list[Shard]) -> None:
    """Here a measurement states an error of 1 %, a repeat differs by 4 %."""
    repeats = [
        with_error(measurement(shard, noise=0.04, seed=seed), 0.01)
        for shard in shards
        for seed in range(2)
    ]
    once = [with_error(measurement(shard, noise=0.04), 0.01) for shard in shards]
    data = CostDataset.of(repeats)
    assert data.errors == pytest.approx([0.04 / 2**0.5] * len(shards), rel=0.25)
    assert data.noise() == pytest.approx(0.67 * 0.04 / 2**0.5, rel=0.25)
    assert CostDataset.of(once).errors == pytest.approx([0.01] * len(shards))
    assert CostDataset.of(once).noise() == pytest.approx(0.67 * 0.01, rel=0.02)
    honest = [with_error(repeat, 0.04) for repeat in repeats]  # nothing is added to these errors
    assert CostDataset.of(honest).errors == pytest.approx([0.04 / 2**0.5] * len(shards), rel=0.2)


def test_a_file_that_is_read_twice_is_no_repeat(
    keep: Callable[..., Path], shards: list[Shard]
) -> None:
    path = keep([measurement(shard) for shard in shards])
    with MeasurementStore(path) as store:
        export_parquet(store, path.with_suffix(".parquet"))
    assert read_costs([path, path.with_suffix(".parquet")]).noise_floor() is None


def test_levels_of_several_stores_become_one(
    keep: Callable[..., Path], shards: list[Shard]
) -> None:
    first, second = measurement(shards[0]), measurement(shards[1])
    assert second.timing is not None
    slow = ReferenceLevel(2 * REFERENCE_LEVEL.forward_ms, 3 * REFERENCE_LEVEL.backward_ms)
    slower = replace(second, timing=second.timing.normalized_to(slow))
    data = read_costs([keep([first]), keep([slower], "slow.db")])
    assert data.reference_level == REFERENCE_LEVEL
    assert data.totals_ms[1] == pytest.approx(second.total_ms)


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        (Selection(), r"several weights: fp16 \(30\), fp32 \(40\): choose with --weights"),
        (Selection(weights="fp32", optimizer="sgd"), "no costs of optimizer sgd, it holds rowwise"),
        (Selection(weights="fp32", batch_sizes=(7, 9)), "batch size 7 or 9, it holds 512, 1024"),
        (Selection(weights="fp16", hardware="another"), "no costs of hardware another"),
    ],
)
def test_a_missing_selection_is_reported(
    keep: Callable[..., Path], shards: list[Shard], selection: Selection, says: str
) -> None:
    path = keep(
        [
            *(measurement(shard, 1024) for shard in shards[:20]),
            *(measurement(shard, 512) for shard in shards[:20]),
            *(measurement(shard, operator=FP16) for shard in shards[:30]),
        ]
    )
    with pytest.raises(DataError, match=says) as caught:
        read_costs([path], selection)
    assert str(path) in str(caught.value)
    assert len(read_costs([path], Selection("fp32", batch_sizes=(512,)))) == 20


def test_an_empty_store_is_reported(keep: Callable[..., Path], shards: list[Shard]) -> None:
    with pytest.raises(DataError, match="holds no costs: collect"):
        read_costs([keep([])])
    failed = replace(measurement(shards[0]), status="failed", timing=None, reason="hung")
    with pytest.raises(DataError, match="holds no costs"):
        read_costs([keep([failed], "failed.db")])
    with pytest.raises(DataError, match="name at least one"):
        read_costs([])


@pytest.mark.parametrize("cost", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_costs_are_reported(shards: list[Shard], cost: float) -> None:
    good = measurement(shards[0])
    assert good.timing is not None
    bad = replace(good, timing=replace(good.timing, backward_ms=cost))
    with pytest.raises(DataError, match="not positive numbers: measure it again"):
        CostDataset.of([good, bad], where="x.db")


def test_shards_that_mix_parts_teach_nothing(
    shards: list[Shard], many_tables: tuple[EmbeddingTable, ...]
) -> None:
    parts = tables_by_part(many_tables)
    mixed = [Shard.of_tables([t, parts["test"][0]]) for t in parts["train"][:30]]
    data = CostDataset.of(measurement(shard) for shard in [*shards, *mixed])
    assert sum(map(len, split(data).values())) == 120
    only_mixed = CostDataset.of(map(measurement, mixed))
    with pytest.raises(DataError, match="30 mix tables of several parts"):
        split(only_mixed)
    assert all(len(part) == 0 for part in split(only_mixed, must_be_full=False).values())
