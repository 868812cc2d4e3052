"""Cost models of GPUs by their data sheets, held against what others have published."""

import numpy as np
import pytest
import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.learning.calibration import calibrate
from autoshard.cost_model.networks.dataset import CostDataset
from autoshard.cost_model.roofline import roofline_model
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    OperatorOptions,
    Shard,
    ShardingTask,
    load_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS

H100 = DATA_SHEETS["h100-80gb"]


def of_tables(count: int, rows: int, dim: int, pooling: float, alpha: float = 0.0) -> Shard:
    tables = (EmbeddingTable(f"t{n}", rows, dim, pooling, zipf_alpha=alpha) for n in range(count))
    return Shard.of_tables(tables)


def ms(
    shard: Shard, batch_size: int, gpu: str = "h100-80gb", weights: str = "fp32"
) -> tuple[float, float]:
    operator = OperatorOptions(weights, "rowwise_adagrad")  # type: ignore[arg-type]
    found = roofline_model(DATA_SHEETS[gpu], operator).compute.predict([shard], [batch_size])
    return found.forward_ms.item(), found.backward_ms.item()


@pytest.mark.parametrize(
    ("dim", "published_ms"), [(16, 0.587584), (32, 0.722624), (64, 1.29395), (128, 2.73472)]
)
def test_forward_passes_are_near_those_of_torchrec_2365(dim: int, published_ms: float) -> None:
    forward_ms, _ = ms(of_tables(16, 100_000, dim, 10.0), 131_072)
    assert 0.8 < forward_ms / published_ms < 1.25


def test_backward_over_forward_is_near_that_of_torchrec_4757() -> None:
    """4.9 for a workload of production, whose tables are not published; fp16 is usual there."""
    ratios = []
    for weights in ("fp32", "fp16"):
        forward_ms, backward_ms = ms(of_tables(8, 10**7, 128, 20.0, 1.0), 65_536, weights=weights)
        ratios.append(backward_ms / forward_ms)
    assert 3 < ratios[0] < 4.9 < ratios[1] < 7


def test_a_faster_memory_is_faster() -> None:
    shard = of_tables(16, 10**6, 128, 20.0, 1.0)
    every = [sum(ms(shard, 65_536, gpu)) for gpu in ("l4-24gb", "a100-80gb", "h100-80gb")]
    assert every == sorted(every, reverse=True)
    assert every[0] / every[2] == pytest.approx(3350 / 300, rel=0.1)


def test_intervals_are_as_wide_as_the_sources_leave_it_open() -> None:
    shards = [of_tables(16, 100_000, dim, 10.0) for dim in (16, 128)]
    found = roofline_model(H100).compute.predict(shards, [65_536] * 2)
    assert bool((found.deviation > 0.2).all())
    assert bool((found.deviation < 0.6).all())


def test_no_table_of_real_sizes_is_outside_of_what_it_knows() -> None:
    tables = load_tables("mlperf:dlrm-v2")
    task = ShardingTask(
        tables, Device.uniform(8, 72 * 2**30), 65_536, objective=Objective("operators")
    )
    oracle = EstimatedCosts(roofline_model(H100), task.batch_size)
    oracle.check(task)
    with torch.no_grad():
        assert bool(torch.isfinite(oracle.amounts([t.whole() for t in tables])).all())


def test_measured_shards_calibrate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that takes twice as long as the data sheet says for all but the start."""
    rng, model = np.random.default_rng(0), roofline_model(H100)
    shards = [
        of_tables(
            int(rng.integers(1, 9)),
            int(10 ** rng.uniform(4, 7)),
            int(rng.integers(2, 32)) * 4,
            float(rng.uniform(1, 40)),
        )
        for _ in range(60)
    ]
    found = model.compute.predict(shards, [65_536] * len(shards))
    costs_ms = 2 * torch.stack([found.forward_ms, found.backward_ms], dim=1).double().numpy()
    data = CostDataset(
        shards=tuple(shards),
        batch_sizes=(65_536,) * len(shards),
        costs_ms=costs_ms,
        errors=np.full(len(shards), 0.01),
        repeats_ms=tuple((total,) for total in costs_ms.sum(1).tolist()),
        operator=model.provenance.operator,
        hardware="cuda: NVIDIA H100 80GB HBM3 sm90, 79 GiB",
        versions="torch 2.13.0",
        reference_level=None,
    )
    # Folds are for the uncertainty.
    monkeypatch.setattr("autoshard.cost_model.learning.calibration._FOLDS", 2)
    known = calibrate(model, data.subset(range(40)))
    assert (known.data_sheet, known.provenance.hardware) == (None, data.hardware)
    unseen = data.subset(range(40, 60))
    predicted = known.compute.predict(unseen.shards, unseen.batch_sizes)
    error = predicted.total_ms.double().numpy() / unseen.costs_ms.sum(1) - 1
    assert np.abs(error).max() < 0.2
