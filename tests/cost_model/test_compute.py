"""The set network: what adds up, what does not, and what it learns of a formula."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from formula import formula_data, formula_ms, measurement
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model import CostDataset, CostModel, EstimatedCosts, OutsideTraining, split
from autoshard.cost_model.learning.compute_training import train_compute
from autoshard.cost_model.learning.evaluation import Score, evaluate, net_of_noise
from autoshard.cost_model.learning.training import TrainOptions
from autoshard.cost_model.networks import compute
from autoshard.cost_model.pricing.placement_state import TaskPlacement, UnitCatalog
from autoshard.cost_model.uncertainty import scenarios
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Piece,
    Shard,
    ShardingTask,
    random_shards,
    synthetic_tables,
)
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.tables.parts import Part
from autoshard.workload.tables.table import can_be_split, halves

TABLES = synthetic_tables(40, seed=5, profile="small")
numbers = st.lists(st.integers(0, len(TABLES) - 1), min_size=1, max_size=30, unique=True)


@pytest.fixture(scope="module")
def amounts(model: CostModel) -> torch.Tensor:
    return model.compute.amounts([table.whole() for table in TABLES], 1024)


def test_the_formula_is_recovered_on_tables_never_seen(
    model: CostModel, formula_parts: dict[Part, CostDataset]
) -> None:
    found = evaluate(model.compute, formula_parts["train"], formula_parts["test"])
    assert found.score.median_error < 0.05
    assert found.score.kendall_tau > 0.95
    for name, score in found.baselines.items():
        assert score.kendall_tau < found.score.kendall_tau, name
        clearly = 1.2 if name == "additive_less_starts" else 2.0
        assert score.median_error > clearly * found.score.median_error, name
    assert found.coverage_90 > 0.7  # some twenty tables decided how far to trust it
    groups = found.by_size()
    assert sum(count for _, count, _, _ in groups) == len(formula_parts["test"])
    assert groups[0][0] == "1"
    # The sum over a single table is its cost, up to rounding that depends on the batch of shards.
    assert groups[0][2] == pytest.approx(groups[0][3], abs=1e-6)


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_the_error_net_of_noise_is_the_model_s_own(
    model: CostModel, formula_parts: dict[Part, CostDataset], repeats: int
) -> None:
    """Held against the truth, and against costs that err by 5 %, once or in the mean of several."""
    shards = formula_parts["test"].shards
    true = CostDataset.of(measurement(shard) for shard in shards)
    noisy = CostDataset.of(
        measurement(shard, noise=0.05, seed=seed) for shard in shards for seed in range(repeats)
    )
    own, found = (evaluate(model.compute, formula_parts["train"], data) for data in (true, noisy))
    assert found.noise == pytest.approx(0.67 * 0.05 / repeats**0.5, rel=0.25)
    assert found.net_error is not None
    assert abs(found.net_error - own.score.median_error) < 0.75 * found.noise
    assert found.net_error < found.score.median_error
    told = found.to_json()
    assert (told["noise_mape"], told["test_mape_net"]) == (found.noise, found.net_error)
    assert replace(found, noise=1.0).net_error == 0.0
    assert replace(found, noise=None).net_error is None


def test_the_net_error_comes_out_where_both_are_known() -> None:
    """The model errs by 2 %, the mean of two measurements by 2.1 %; outliers change nothing."""
    rng = np.random.default_rng(0)
    shards = random_shards(TABLES, 3000, 8, seed=4)
    data = CostDataset.of(measurement(s, noise=0.03, seed=n) for s in shards for n in range(2))
    true = np.array([sum(formula_ms(shard, 1024)) for shard in shards])
    predicted = true * np.exp(0.02 * rng.standard_normal(len(true)))
    predicted[:5] *= 10
    score, noise = Score.of(predicted, data.totals_ms), data.noise()
    assert score.median_error == pytest.approx(0.67 * (0.02**2 + 0.03**2 / 2) ** 0.5, rel=0.1)
    assert noise == pytest.approx(0.67 * 0.03 / 2**0.5, rel=0.1)
    assert net_of_noise(score.median_error, noise) == pytest.approx(0.67 * 0.02, rel=0.1)


def test_loud_costs_teach_less(many_tables: tuple[EmbeddingTable, ...]) -> None:
    """Half of the costs err by 1 %, half by 20 %: whoever knows which learns far more."""
    shards = random_shards(many_tables, 300, 12, seed=6)
    told = CostDataset.of(
        measurement(s, noise=0.2 if n % 2 else 0.01) for n, s in enumerate(shards)
    )
    alike = replace(told, errors=np.full(len(told), 0.1))
    others = random_shards(many_tables, 200, 12, seed=60)
    true = CostDataset.of(map(measurement, others))
    options = TrainOptions(members=3, steps=200)
    errors = []
    for data in (told, alike):
        taught, _ = train_compute(data, true.subset(range(50)), options, seed=0)
        prices = taught.predict(true.shards[50:], true.batch_sizes[50:])
        predicted = prices.total_ms.double().numpy()
        errors.append(Score.of(predicted, true.totals_ms[50:]).median_error)
    assert errors[0] < 0.8 * errors[1]


def test_forward_and_backward_are_told_apart(
    model: CostModel, formula_parts: dict[Part, CostDataset]
) -> None:
    data = formula_parts["test"]
    prices = model.compute.predict(data.shards, data.batch_sizes)
    for column, predicted in enumerate((prices.forward_ms, prices.backward_ms)):
        score = Score.of(predicted.double().numpy(), data.costs_ms[:, column])
        assert score.median_error < 0.06


def test_features_and_weights_are_learned(many_tables: tuple[EmbeddingTable, ...]) -> None:
    """Tables that differ in nothing else, some of which it has never seen."""
    mixed = [
        replace(table, features=(1, 1, 2, 5)[n % 4], weighted=n % 3 == 0)
        for n, table in enumerate(many_tables)
    ]
    parts = split(formula_data(mixed, 600, seed=3))
    taught, _ = train_compute(
        parts["train"], parts["validation"], TrainOptions(members=3, steps=300), seed=0
    )
    for change in ({"features": 4}, {"weighted": True}):
        shards = [
            [Shard.of_tables([replace(table, **each)]) for table in TABLES]  # type: ignore[arg-type]
            for each in ({}, change)
        ]
        usual, changed = (taught.predict(some, [1024] * len(some)).total_ms for some in shards)
        before, after = (np.array([sum(formula_ms(s, 1024)) for s in some]) for some in shards)
        missed = (changed / usual).double().numpy() / (after / before) - 1
        assert float((changed > usual).float().mean()) > 0.9  # another host learns another model
        assert np.median(np.abs(missed)) < 0.05, change


def test_one_model_spans_batch_sizes(model: CostModel) -> None:
    shard = Shard.of_tables(TABLES[:8])
    for batch_size in (512, 1024):
        cost = EstimatedCosts(model, batch_size).costs([shard])[0]
        assert cost.total_ms == pytest.approx(sum(formula_ms(shard, batch_size)), rel=0.15)


def test_the_same_seed_learns_the_same(formula_parts: dict[Part, CostDataset]) -> None:
    options = TrainOptions(members=2, steps=30)
    data = formula_parts["train"], formula_parts["validation"]
    first, _ = train_compute(*data, options, seed=0)
    again, curves = train_compute(*data, options, seed=0)
    other, _ = train_compute(*data, options, seed=1)
    for name, weight in first.ensemble.weights.items():
        assert torch.equal(weight, again.ensemble.weights[name])
    weight = "table.curved.0.weight"
    assert not torch.equal(first.ensemble.weights[weight], other.ensemble.weights[weight])
    assert curves.steps == (25, 30)


def test_learning_stops_when_validation_gets_no_better(
    formula_parts: dict[Part, CostDataset],
) -> None:
    told: list[None] = []
    options = TrainOptions(members=1, steps=400, patience=1, check_every=5)
    _, curves = train_compute(
        formula_parts["train"],
        formula_parts["validation"],
        options,
        seed=0,
        progress=lambda: told.append(None),
    )
    assert curves.steps[-1] < 400
    assert len(told) == 400  # so that progress bars come to their end


@given(chosen=numbers, seed=st.integers(0, 99))
def test_order_does_not_matter(model: CostModel, chosen: list[int], seed: int) -> None:
    mixed = np.random.default_rng(seed).permutation(chosen).tolist()
    oracle = EstimatedCosts(model, 1024)
    costs = [
        oracle.costs([Shard.in_order(tuple(TABLES[n].whole() for n in order))])[0]
        for order in (chosen, mixed)
    ]
    assert costs[0].total_ms == pytest.approx(costs[1].total_ms, rel=1e-5)
    assert costs[0].spread == pytest.approx(costs[1].spread, rel=1e-3)


@given(first=numbers, second=numbers)
def test_sums_add_up(model: CostModel, first: list[int], second: list[int]) -> None:
    """What two shards bring together is what they bring apart; their costs do not add up."""
    pieces = [table.whole() for table in TABLES]
    amounts = model.compute.amounts(pieces, 1024)
    both = amounts[first].sum(0) + amounts[second].sum(0)
    torch.testing.assert_close(both, amounts[first + second].sum(0), rtol=1e-5, atol=1e-5)


def state_of(oracle: EstimatedCosts, pieces: list[Piece], devices: int) -> TaskPlacement:
    task = ShardingTask(tuple(TABLES), Device.uniform(devices, 2**50), 1024)
    return TaskPlacement(UnitCatalog(oracle.expectation(), task, RuleMasks(task), pieces))


@given(chosen=numbers, taken=st.integers(0, 29), data=st.data())
def test_incremental_prices_are_full_ones(
    model: CostModel, chosen: list[int], taken: int, data: st.DataObject
) -> None:
    pieces = [table.whole() for table in TABLES]
    oracle = EstimatedCosts(model, 1024)
    devices = state_of(oracle, pieces, 2)
    placed: list[list[int]] = [[], []]
    for item in chosen:
        device = data.draw(st.integers(0, 1))
        devices.put(item, device)
        placed[device].append(item)
    leaver = chosen[taken % len(chosen)]
    home = 0 if leaver in placed[0] else 1
    other = next(item for item in range(len(TABLES)) if item not in placed[home])

    def full(items: list[int]) -> float:
        return oracle.costs([Shard(tuple(pieces[n] for n in items))])[0].total_ms if items else 0.0

    def same(found: np.ndarray, items: list[int]) -> None:
        assert float(found.sum()) == pytest.approx(full(items), rel=1e-5, abs=1e-6)

    for device in (0, 1):
        same(devices.costs()[device], placed[device])
        same(devices.joined(np.array([other]))[0, device], [*placed[device], other])
    where, out, into = np.array([home]), np.array([leaver]), np.array([other])
    rest = [item for item in placed[home] if item != leaver]
    same(devices.without(out, where)[0], rest)
    same(devices.exchanged(out, where, into)[0], [*rest, other])
    devices.take(leaver, home)
    same(devices.costs()[home], rest)
    same(oracle.alone_ms([pieces[other]]), [other])


def test_many_shards_are_priced_in_parts(
    oracle: EstimatedCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = synthetic_tables(24, seed=4)
    drawing = oracle.scenarios(tables, 4)
    pieces = [table.whole() for table in tables]
    sums, drawn = (
        amounts(pieces).unflatten(0, (12, 2)) for amounts in (oracle.amounts, drawing.amounts)
    )
    costs = oracle.model.compute

    def prices() -> list[torch.Tensor]:
        told = costs.price(sums)
        return [*vars(told).values(), costs.means(sums), drawing.price(drawn)]

    whole = prices()
    for module in (compute, scenarios):
        monkeypatch.setattr(module, "_BLOCK", 5)
    for one, other in zip(prices(), whole, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(whole[-2].sum(-1), whole[0] + whole[1])


def test_pieces_can_be_added_later(oracle: EstimatedCosts) -> None:
    devices = state_of(oracle, [TABLES[0].whole()], 1)
    half = Piece(TABLES[1], 0, TABLES[1].dim // 2)
    devices.put(devices.catalog.extend([half]), 0)
    assert float(devices.costs()[0].sum()) == pytest.approx(
        oracle.costs([Shard((half,))])[0].total_ms, rel=1e-5
    )


def test_nothing_costs_nothing(oracle: EstimatedCosts) -> None:
    devices = state_of(oracle, [table.whole() for table in TABLES], 3)
    free = devices.free.copy()
    devices.put(0, 1)
    devices.put(1, 1)
    assert devices.columns[0].tolist() == [0, TABLES[0].dim + TABLES[1].dim, 0]
    devices.take(0, 1)
    devices.take(1, 1)
    assert not devices.costs().any()
    assert not devices.columns.any()
    assert (devices.free == free).all()


def test_a_table_unlike_any_other_is_uncertain(oracle: EstimatedCosts) -> None:
    huge = EmbeddingTable("huge", 10**10, 1024, 2.0)
    (known,) = oracle.costs([Shard.of_tables(TABLES[:5])])
    with pytest.warns(
        OutsideTraining,
        match="1 of 1 tables, 100% of the cost, are outside .* huge, its log_rows by",
    ):
        (cost,) = oracle.costs([Shard.of_tables([huge])])
    assert np.isfinite(cost.total_ms)
    assert cost.total_ms > 0
    assert cost.spread > 5 * known.spread
    (mixed,) = oracle.costs([Shard.of_tables([*TABLES[:5], huge])])
    assert known.spread < mixed.spread


def test_an_out_of_distribution_table_is_reported_once_for_all_its_pieces(
    model: CostModel,
) -> None:
    oracle = EstimatedCosts(model, 1024)
    huge = EmbeddingTable("huge", 10**10, 1024, 2.0)
    narrow = [Piece(huge, 0, width) for width in (512, 256, 128)]
    with pytest.warns(OutsideTraining, match="1 of 6 tables, .* farthest is huge"):
        oracle.amounts([*(table.whole() for table in TABLES[:5]), huge.whole(), *narrow])
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutsideTraining)
        oracle.amounts([Piece(huge, 64, 64)])
        oracle.fresh().amounts([huge.whole()])  # of which the first one has warned


def test_amounts_of_many_slices_are_those_of_each(model: CostModel) -> None:
    """Also of halves, equal ones among them, some of which were requested before."""
    whole = [table.whole() for table in TABLES]
    pieces = [*whole, *(half for piece in whole if can_be_split(piece) for half in halves(piece))]
    oracle = EstimatedCosts(model, 1024)
    oracle.amounts(pieces[10:20])
    found = oracle.amounts(pieces)
    alone = torch.cat([EstimatedCosts(model, 1024).amounts([piece]) for piece in pieces])
    assert torch.allclose(found, alone, rtol=1e-6, atol=1e-9)


def test_the_ensemble_is_uncertain_of_unseen_tables(
    oracle: EstimatedCosts, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    """Shards of many more tables than any it learned from are priced with wider intervals."""
    usual = oracle.prices(random_shards(many_tables, 50, 20, seed=9)).deviation
    (wide,) = oracle.prices([Shard.of_tables(many_tables * 4)]).deviation.tolist()
    assert wide > float(usual.mean())


def test_few_data_are_enough_to_start(many_tables: tuple[EmbeddingTable, ...]) -> None:
    """With prices of work alone, 60 shards already give better predictions than their mean."""
    data = formula_data(many_tables, 60, seed=8)
    model, _ = train_compute(data, data, TrainOptions(members=2, steps=50), seed=0)
    other = formula_data(many_tables, 60, seed=80)
    predicted = model.predict(other.shards, other.batch_sizes).total_ms.double().numpy()
    assert Score.of(predicted, other.totals_ms).median_error < 0.25
