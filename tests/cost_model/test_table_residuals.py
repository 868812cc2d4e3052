"""Table corrections: what was measured of a table holds for it, and for similar ones."""

import numpy as np
import pytest
from formula import formula_ms, measurement

from autoshard.cost_model import CostDataset, CostModel, EstimatedCosts, TableResiduals
from autoshard.workload import EmbeddingTable, Piece, Shard, random_shards, synthetic_tables

TABLES = synthetic_tables(24, seed=31, profile="small")
# Higher than any that the model learned from, and of other widths.
OUTSIDE = tuple(
    EmbeddingTable(f"s{n}", 4_000_000 + 300_000 * n, 64 + 8 * n, 6.0 + n, zipf_alpha=0.1)
    for n in range(10)
)


def dearer(table: EmbeddingTable) -> float:
    """Some cost twice what one would think, and some half."""
    return (0.5, 1.0, 2.0)[int(table.access_digest[:4], 16) % 3]


def measured(
    shards: list[Shard], batch_size: int = 1024, residual: float | None = None
) -> CostDataset:
    known = dearer if residual is None else lambda table: residual
    return CostDataset.of(measurement(s, batch_size, noise=0.01, dearer=known) for s in shards)


def missed(oracle: EstimatedCosts, shards: list[Shard], residual: float | None = None) -> float:
    """The median relative error of the totals."""
    known = dearer if residual is None else lambda table: residual
    true = np.array([sum(formula_ms(shard, 1024, known)) for shard in shards])
    return float(np.median(np.abs(oracle.prices(shards).total_ms.numpy() / true - 1)))


def informed(model: CostModel, data: CostDataset) -> EstimatedCosts:
    return EstimatedCosts(model, 1024, TableResiduals(model.compute, 1024).learn(data))


def test_table_corrections_hold_beside_any_other_tables(
    model: CostModel, oracle: EstimatedCosts
) -> None:
    """Though they differ more than any that the model learned from."""
    data = measured(random_shards(TABLES, 80, 6, seed=1))
    others = random_shards(TABLES, 60, 12, seed=2)
    pieces = random_shards(TABLES, 40, 6, seed=3, augment=True)
    knows = informed(model, data)
    for shards in (others, pieces):
        assert missed(knows, shards) < 0.3 * missed(oracle, shards)


def test_what_is_not_measured_stays_as_it_was(model: CostModel, oracle: EstimatedCosts) -> None:
    nothing = TableResiduals(model.compute, 1024)
    assert nothing.tables == 0
    assert nothing.posterior(TABLES).means.tolist() == [[0.0] * len(TABLES)] * 2
    other_batch = nothing.learn(measured([Shard.of_tables(TABLES[:3])], 512))
    assert other_batch.tables == 0
    found = nothing.learn(measured([Shard.of_tables([TABLES[0]])]))
    assert (found.tables, found.knows(TABLES[0]), found.knows(TABLES[1])) == (1, True, False)
    before, after = nothing.posterior(TABLES).deviations, found.posterior(TABLES).deviations
    assert (after[:, 0] < before[:, 0]).all()
    assert after.argmin(1).tolist() == [0, 0]


def test_the_posterior_is_that_of_gauss(model: CostModel) -> None:
    """Of one table measured alone, whose cost is nearly all its own, the textbook's."""
    table = max(TABLES, key=lambda t: sum(formula_ms(Shard.of_tables([t]), 1024)))
    data = measured([Shard.of_tables([table])], residual=1.1)
    nothing = TableResiduals(model.compute, 1024)
    prior = float(nothing.posterior([table]).deviations[0, 0]) ** 2
    noise = model.compute.prior.rest**2 + float(data.errors[0]) ** 2
    found = float(nothing.learn(data).posterior([table]).deviations[0, 0])
    assert found == pytest.approx((prior * noise / (prior + noise)) ** 0.5, rel=0.15)


def test_out_of_distribution_tables_inform_similar_ones(model: CostModel) -> None:
    """Half of them are measured: the others are known better, and better than before."""
    some, others = OUTSIDE[::2], OUTSIDE[1::2]
    shards = [Shard.of_tables([table]) for table in others]
    nothing = TableResiduals(model.compute, 1024)
    before = missed(EstimatedCosts(model, 1024), shards, 2.5)
    data = measured([Shard.of_tables([table]) for table in some], residual=2.5)
    after = missed(informed(model, data), shards, 2.5)
    assert after < 0.6 * before
    found = nothing.learn(data)
    assert found.posterior(others).deviations.max() < nothing.posterior(others).deviations.min()
    assert found.posterior(some).deviations.max() < found.posterior(others).deviations.min()


def test_a_cost_that_is_far_off_does_not_decide(model: CostModel) -> None:
    shards = random_shards(TABLES, 60, 4, seed=5)
    wrong = [
        measurement(shard, noise=0.01, dearer=(lambda table: 9.0) if n == 7 else dearer)
        for n, shard in enumerate(shards)
    ]
    right = informed(model, measured(shards))
    misled = informed(model, CostDataset.of(wrong))
    others = random_shards(TABLES, 40, 8, seed=6)
    assert missed(misled, others) < missed(right, others) + 0.02


def test_out_of_distribution_tables_are_reported_in_one_line(model: CostModel) -> None:
    oracle = EstimatedCosts(model, 1024)
    with pytest.warns(match=r"10 of 34 tables, \d+% of the cost, are outside .* farthest is s\d"):
        oracle.amounts([table.whole() for table in (*TABLES, *OUTSIDE)])
    knows = informed(model, measured([Shard.of_tables([OUTSIDE[0]])]))
    with pytest.warns(match=r"9 of 10 tables"):
        knows.amounts([table.whole() for table in OUTSIDE])


def test_estimates_of_many_tables_are_those_of_each(model: CostModel) -> None:
    """Of more than are compared with the known ones at once, some of them several times."""
    knows = TableResiduals(model.compute, 1024).learn(
        measured(random_shards(TABLES, 40, 6, seed=4))
    )
    others = synthetic_tables(600, seed=32, profile="small")
    tables = [*TABLES, *others, *TABLES, *others[-3:]]
    means, left = knows.estimates(tables)
    assert (means.shape, left.shape) == ((2, len(tables)), (len(tables),))
    for number in (0, 23, 24, 499, 500, 623, 624, len(tables) - 1):
        mean, share = knows.estimates([tables[number]])
        assert means[:, number] == pytest.approx(mean[:, 0])
        assert left[number] == pytest.approx(share[0])
    assert left[:24].max() < left[24:624].max() <= 1.0
    assert knows.estimates([])[0].shape == (2, 0)


def test_a_slice_speaks_for_its_table(model: CostModel) -> None:
    """Where the whole is too large to be measured."""
    table = OUTSIDE[3]
    half = Shard((Piece(table, 0, table.dim // 2),))
    before = missed(EstimatedCosts(model, 1024), [Shard.of_tables([table])], 2.5)
    knows = informed(model, measured([half], residual=2.5))
    assert missed(knows, [Shard.of_tables([table])], 2.5) < 0.5 * before
