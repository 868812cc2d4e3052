"""Sharding the tables of a TorchRec model that a user names."""

from pathlib import Path

import pytest
from commands import run

from autoshard.experiments.console.imports import model_tables
from autoshard.workload import ShardingPlan

MODULE = """
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.random import RandomRecDataset
from torchrec.optim import SGD, RowWiseAdagrad

NAMES = [f"t{number}" for number in range(8)]


def build_model(optimizer=RowWiseAdagrad):
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=5000, embedding_dim=32, feature_names=[n])
        for n in NAMES
    ]
    model = torch.nn.Module()
    model.bags = EmbeddingBagCollection(tables, device=torch.device("meta"))
    _apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    return model


def by_sgd():
    return build_model(SGD)


def batches():
    sizes = {"hash_sizes": [5000] * 8, "ids_per_features": [7] * 8}
    return RandomRecDataset(NAMES, batch_size=256, num_dense=1, manual_seed=0, **sizes)


model, loader, number = build_model(), batches(), 5


def broken():
    raise OSError("no such disk")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module of a name that no other test has."""
    (tmp_path / f"{tmp_path.name}.py").write_text(MODULE)
    (tmp_path / f"{tmp_path.name}_bad.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_model_s_tables_are_sharded_by_lookups_counted_in_its_batches(here: Path) -> None:
    name = here.name
    asked = f"--model {name}:build_model --batches {name}:batches --batch-size 512"
    done = run("shard.py", f"{asked} --num-devices 2 --memory-gb 1", here)
    assert "a step takes" in done.stdout
    assert "are unknown: one lookup" not in done.stderr
    plan = ShardingPlan.load(here / "plan.json")
    found = model_tables(f"{name}:model", f"{name}:loader", 2)
    plan.check_columns(found.tables)
    assert {table.reuse_batch_size for table in found.tables} == {512}
    assert all(2 < table.pooling_factor < 5 for table in found.tables)  # 0 to 7 are drawn


def test_what_is_not_known_is_said_on_the_way(here: Path) -> None:
    asked = f"--model {here.name}:model --num-devices 2 --memory-gb 1 --sharder torchrec"
    done = run("shard.py", asked, here)
    assert "note: lookups of 8 of 8 tables are unknown" in done.stderr


def test_tables_that_are_trained_by_another_optimizer_are_planned_with_a_note(here: Path) -> None:
    done = run("shard.py", f"--model {here.name}:by_sgd --num-devices 2 --memory-gb 1", here)
    note = "note: costs are known of fp32 with rowwise_adagrad, and these tables are fp32 with sgd"
    assert note in done.stdout
    ShardingPlan.load(here / "plan.json")


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("--num-devices 2", "name a file of tables with --tables, or a TorchRec model with --mo"),
        ("--model {0}:model --tables criteo", "name a file of tables with --tables, or a Torc"),
        ("--tables criteo --batches {0}:batches", "requires the model: name it"),
        ("--model {0}", "--model must be MODULE:NAME, as in my_module:build_model, got '{0}'"),
        ("--model no_such:model", "no_such cannot be imported: ModuleNotFoundError: No module"),
        ("--model {0}_bad:model", "{0}_bad cannot be imported: ModuleNotFoundError: No module"),
        ("--model {0}:modell", "--model {0}:modell: {0} has no modell"),
        ("--model {0}:number", "--model {0}:number: is a int: name a function"),
        ("--model {0}:batches", "is a RandomRecDataset, and no torch.nn.Module"),
        ("--model {0}:broken", "--model {0}:broken: it fails: OSError: no such disk"),
        ("--model {0}:model --batches {0}:number", "--batches {0}:number: is a int: name a fun"),
        ("--model {0}:model --batches {0}:build_model", "is a Module: name a list or loader"),
        ("--model {0}:model --batches {0}:NAMES", "an item is a str: give KeyedJaggedTensors"),
    ],
)
def test_names_that_are_off_end_in_one_line(here: Path, asked: str, line: str) -> None:
    done = run("shard.py", f"{asked.format(here.name)} --num-devices 2 --memory-gb 1", here, code=2)
    assert line.format(here.name) in done.stderr
