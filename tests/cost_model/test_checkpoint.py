"""Models in folders: they come back to the bit, and nothing is lost on the way."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from formula import HARDWARE

from autoshard.cost_model import (
    CostModel,
    EstimatedCosts,
    OtherHardware,
    read_costs,
    split,
)
from autoshard.cost_model.learning.evaluation import evaluate
from autoshard.cost_model.models.checkpoint import (
    PRETRAINED,
    CheckpointError,
    load_model,
    save_model,
)
from autoshard.workload import EmbeddingTable, Link, Network, Shard, random_shards


def test_a_model_comes_back_to_the_bit(
    tmp_path: Path, model: CostModel, tables: tuple[EmbeddingTable, ...]
) -> None:
    save_model(model, tmp_path / "deep" / "model")
    back = load_model(tmp_path / "deep" / "model", HARDWARE)
    assert back.provenance == model.provenance
    assert back.compute.uncertainty == model.compute.uncertainty
    for name, weight in model.compute.ensemble.weights.items():
        assert torch.equal(back.compute.ensemble.weights[name], weight)
    shards = random_shards(tables, 30, 8, augment=True)
    # Where weights begin in memory decides the last bit on some machines.
    one, other = (
        [(cost.forward_ms, cost.backward_ms, cost.spread) for cost in oracle.costs(shards)]
        for oracle in (EstimatedCosts(model, 1024), EstimatedCosts(back, 1024))
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)
    assert set(model.links) == {2, 3, 4, 5, 6}
    assert back.links == model.links
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["model"]


def test_links_keep_their_rings(tmp_path: Path, model: CostModel) -> None:
    ringed = Link(2e9, 1e-4, 1e9)
    links = {2: ringed, 3: Link(2e9), 4: Network(ringed, Link(1e8), 2)}
    save_model(replace(model, links=links), tmp_path / "model")
    assert load_model(tmp_path / "model", HARDWARE).links == links


def test_a_model_may_know_no_links(tmp_path: Path, model: CostModel) -> None:
    save_model(replace(model, links={}), tmp_path / "model")
    assert load_model(tmp_path / "model", HARDWARE).links == {}


def test_what_exists_is_only_replaced_when_asked(tmp_path: Path, model: CostModel) -> None:
    folder = tmp_path / "model"
    save_model(model, folder)
    before = (folder / "model.json").read_bytes()
    with pytest.raises(CheckpointError, match="exists: name another folder"):
        save_model(model, folder)
    assert (folder / "model.json").read_bytes() == before
    save_model(replace(model, links={}), folder, force=True)
    assert load_model(folder, HARDWARE).links == {}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="holds other files"):
        save_model(model, tmp_path / "home", force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists"):
        save_model(model, tmp_path / "file", force=True)


def _edit(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        document = json.loads((folder / "model.json").read_text())
        change(document)
        (folder / "model.json").write_text(json.dumps(document))

    return apply


def _cut(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return apply


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "model.json").unlink(), "holds no cost model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "missing or damaged"),
        (_cut("model.json"), "line"),
        (_cut("model.safetensors"), "missing or damaged"),
        (_edit(lambda d: d.update(version=99)), "has version 99"),
        (_edit(lambda d: d.update(schema="else")), "not a document of schema"),
        (_edit(lambda d: d.update(inputs=["dim"])), "its inputs differ from those of this version"),
        (_edit(lambda d: d.pop("uncertainty")), "has no field 'uncertainty'"),
        (_edit(lambda d: d.update(shape={"hidden": 8, "fusion": 8, "learned": 2})), "damaged"),
        (_edit(lambda d: d.update(shape={"wide": 8})), "field of the wrong kind"),
    ],
)
def test_a_folder_without_a_model_is_reported_in_one_line(
    tmp_path: Path, model: CostModel, damage: Callable[[Path], None], says: str
) -> None:
    folder = tmp_path / "model"
    save_model(model, folder)
    damage(folder)
    with pytest.raises(Exception, match=says) as caught:
        load_model(folder, HARDWARE)
    assert type(caught.value).__module__.startswith(("autoshard.cost_model", "autoshard.workload"))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_write_that_fails_leaves_the_old_model(
    tmp_path: Path, model: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save_model(model, folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autoshard.cost_model.models.checkpoint.save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_model(model, folder, force=True)
    monkeypatch.undo()
    load_model(folder, HARDWARE)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_hardware_is_reported_in_one_line(tmp_path: Path, model: CostModel) -> None:
    save_model(model, tmp_path / "model")
    with pytest.warns(OtherHardware, match="trained on a machine, this is .* calibrate it") as told:
        load_model(tmp_path / "model")
    assert "\n" not in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(tmp_path / "model", HARDWARE)


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OtherHardware")
def test_a_model_is_shipped_and_prices_at_once(tables: tuple[EmbeddingTable, ...]) -> None:
    shipped = load_model("cpu")
    assert shipped.provenance.hardware.startswith("cpu")
    assert set(shipped.links) == {2}
    one, more = EstimatedCosts(shipped, 1024).costs(
        [Shard.of_tables(tables[:1]), Shard.of_tables(tables[:9])]
    )
    assert 0.05 < one.total_ms < more.total_ms < 500
    data = read_costs([PRETRAINED / "cpu.parquet"])
    assert data.hardware == shipped.provenance.hardware
    found = evaluate(shipped.compute, split(data)["train"], split(data)["test"])
    assert found.score.median_error < 0.05
    assert found.score.kendall_tau > 0.95
    shared = split(read_costs([PRETRAINED / "cpu-features.parquet"], level=data.reference_level))
    assert {m.table.features for s in shared["test"].shards for m in s.pieces} == {*range(1, 9)}
    found = evaluate(shipped.compute, split(data)["train"], shared["test"])
    assert found.score.median_error < 0.13
    assert found.score.kendall_tau > 0.88
    with pytest.raises(CheckpointError, match="these are shipped: cpu"):
        load_model("no-such-model")
