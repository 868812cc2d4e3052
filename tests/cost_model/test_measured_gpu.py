"""A model of a measured GPU: by its data sheet and a few shards, or trained on many."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_gpu import HARDWARE, measured, random_tables

from autoshard.cost_model import CostDataset, CostModel
from autoshard.cost_model.learning import model_training
from autoshard.cost_model.learning.calibration import calibrate
from autoshard.cost_model.learning.evaluation import evaluate
from autoshard.cost_model.learning.model_training import calibrate_model, train_model
from autoshard.cost_model.learning.training import TrainOptions
from autoshard.cost_model.networks.dataset import part_of_shard
from autoshard.cost_model.roofline import roofline_model
from autoshard.workload import EmbeddingTable, Objective, Shard, UserError
from autoshard.workload.data_sheets import DATA_SHEETS

H200 = DATA_SHEETS["h200-141gb"]
BATCH = 8192


@pytest.fixture(scope="module")
def shards() -> CostDataset:
    """Shards of tables of one part each."""
    rng = np.random.default_rng(3)
    parts: dict[str, list[EmbeddingTable]] = {}
    for table in random_tables(rng, 390):
        parts.setdefault(str(part_of_shard(Shard.of_tables([table]))), []).append(table)
    names = list(parts)
    sizes = np.array([len(tables) for tables in parts.values()], float)
    found = []
    for name in rng.choice(names, 260, p=sizes / sizes.sum()).tolist():
        count = min(len(parts[name]), int(rng.integers(1, 10)))
        chosen = rng.choice(len(parts[name]), count, replace=False)
        found.append(Shard.of_tables([parts[name][n] for n in chosen]))
    return measured(found, BATCH, rng)


def errors(model: CostModel, data: CostDataset) -> tuple[float, float]:
    """Level, and deviation beside it, of predictions for shards."""
    found = evaluate(model.compute, data, data)
    logs = np.log(found.predicted_ms / found.measured_ms)
    return float(np.exp(logs.mean())), float(logs.std())


def test_fifty_shards_correct_the_data_sheet(shards: CostDataset) -> None:
    prior = roofline_model(H200)
    few, unseen = shards.subset(range(50)), shards.subset(range(50, 260))
    level, spread = errors(prior, unseen)
    assert abs(np.log(level)) > 0.2  # this GPU is another one than the sources tell
    known = calibrate(prior, few)
    new_level, new_spread = errors(known, unseen)
    assert abs(np.log(new_level)) < 0.05
    assert new_spread < spread
    assert known.provenance.hardware == HARDWARE
    assert known.links[8] == H200.link(8)
    assert known.for_objective(Objective("step", known.links[8]), 8).counted_overhead is not None


def test_a_trained_model_knows_training_by_the_data_sheet(shards: CostDataset) -> None:
    model, _ = train_model(shards, TrainOptions(steps=300), seed=0)
    assert model.overhead == roofline_model(H200).overhead
    assert model.links[16] == H200.link(16)
    _, spread = errors(model, shards)
    _, of_prior = errors(roofline_model(H200), shards)
    assert spread < 0.7 * of_prior


def test_a_data_sheet_is_calibrated_by_name(
    shards: CostDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_training, "MAX_CALIBRATION_SHARDS", 12)
    model, count, _ = calibrate_model(Path("h200-141gb"), shards)
    assert (count, model.provenance.hardware) == (12, HARDWARE)


def test_shards_of_another_gpu_are_refused(shards: CostDataset) -> None:
    with pytest.raises(UserError, match=r"a100-80gb is the data sheet of NVIDIA A100.*h200-141gb$"):
        calibrate_model(Path("a100-80gb"), shards)
    on_cores = replace(shards, hardware="cpu: of nobody")
    with pytest.raises(UserError, match=r"on cpu: of nobody: give shards of such a GPU$"):
        calibrate_model(Path("h200-141gb"), on_cores)
    with pytest.raises(UserError, match=r"cpu is a model of cpu: .*: give shards of a cpu device"):
        calibrate_model(Path("cpu"), shards)
