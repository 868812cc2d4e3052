"""Checkpoints under other plans and numbers of ranks: training goes on as if nothing was new."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import run_forked
from small_model import SAMPLES, TABLES, Training, plan_of
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.integration import load_checkpoint, plan_of_checkpoint, save_checkpoint
from autoshard.sharders import IncrementalSharder
from autoshard.workload import Device, EmbeddingTable, ShardingPlan, ShardingTask, UserError

# Whole tables, slices, blocks of rows and copies, each table in another way.
FOUR = plan_of(4, ("a", 0, 8, 1), ("b", 0, 16, 0), ("b", 16, 8, 3), ("c", 0, 16, 0, 4), copied="d")
THREE = plan_of(3, ("a", 0, 8, 0, 3), ("b", 0, 4, 2), ("b", 4, 12, 0), ("b", 16, 8, 1),
                ("d", 0, 4, 0), ("d", 4, 4, 1), copied="c")  # fmt: skip
EIGHT = plan_of(8, ("b", 0, 24, 0, 8), ("c", 0, 8, 7), ("c", 8, 8, 5), ("d", 0, 8, 3), copied="a")
GRID = plan_of(4, ("a", 0, 8, 2, 2), ("b", 0, 16, 0, 2), ("b", 16, 8, 2, 2), ("c", 0, 16, 1),
               ("d", 0, 8, 3))  # fmt: skip
SAME_SLICES = plan_of(3, ("a", 0, 8, 2), ("b", 0, 16, 2), ("b", 16, 8, 0), ("c", 0, 16, 0, 3),
                      copied="d")  # fmt: skip
HOT = plan_of(3, ("a", 0, 8, 0, 3), ("b", 0, 16, 0), ("b", 16, 8, 2), ("c", 0, 16, 1),
              ("d", 0, 8, 0), hot={"a": 3, "b": 20, "d": 0})  # fmt: skip
HOTTER = plan_of(2, ("a", 0, 8, 1), ("b", 0, 24, 0, 2), ("c", 0, 8, 0), ("c", 8, 8, 1),
                 ("d", 0, 8, 0), hot={"b": 7, "c": 9})  # fmt: skip
HOT_IDS = {"a": [33, 4, 9], "b": list(range(50, 25, -1)), "c": [3, 1, 4, 15, 9, 2, 6, 5, 8]}


def hot_ids() -> dict[str, torch.Tensor]:
    return {f"bags.{name}": torch.tensor(ids) for name, ids in HOT_IDS.items()}


def carried(plan: ShardingPlan, ranks: int) -> ShardingPlan:
    """The plan on so many ranks with the least movement."""
    tables = tuple(EmbeddingTable(f"bags.{name}", *size, 2.0) for name, size in TABLES.items())
    task = ShardingTask(tables, Device.uniform(ranks, 2**20), SAMPLES)
    found = IncrementalSharder(EstimatedCosts(load_model("cpu"), SAMPLES), plan, 0).shard(task)
    assert (found.num_devices, found.copied) == (ranks, plan.copied)
    return found


def train_and_save(plan: ShardingPlan, optimizer: str, folder: Path) -> list[float]:
    """Losses of steps 5 to 9, before which a checkpoint is written."""
    training = Training(plan, optimizer, hot_ids())
    training.steps(range(5))
    save_checkpoint(folder, {**training.state, "step": 5}, plan)
    return training.steps(range(5, 10))


def load_and_train(plan: ShardingPlan, optimizer: str, folder: Path, to: Path) -> list[float]:
    """The same of a new training, which writes the checkpoint again, under its own plan."""
    training = Training(plan, optimizer, hot_ids())
    training.steps(range(90, 92))  # what there is is replaced
    state = {**training.state, "step": 0}
    load_checkpoint(folder, state)
    assert state["step"] == 5
    save_checkpoint(to, state, plan)
    return training.steps(range(5, 10))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_training_goes_on_under_another_plan_and_on_other_numbers_of_ranks(
    optimizer: str, tmp_path: Path
) -> None:
    expected, *_ = run_forked(4, train_and_save, FOUR, optimizer, tmp_path / "0")
    assert plan_of_checkpoint(tmp_path / "0") == FOUR
    less = carried(FOUR, 3)
    plans = [(less, None), (carried(less, 6), None), (THREE, None), (EIGHT, None), (GRID, 2)]
    plans += [(HOT, None), (HOTTER, None), (FOUR, None)]
    if optimizer == "sgd":  # weights alone, which Adagrad's checkpoints have too
        plans = [(THREE, None), (GRID, 2), (HOT, None), (FOUR, None)]
    for number, (plan, of_node) in enumerate(plans):
        folders = [tmp_path / str(number), tmp_path / str(number + 1)]
        found, *_ = run_forked(
            plan.num_devices, load_and_train, plan, optimizer, *folders, of_node=of_node
        )
        assert found == pytest.approx(expected, abs=1e-5), plan


def test_row_wise_adagrad_goes_on_where_slices_do_not_change(tmp_path: Path) -> None:
    optimizer, folders = "rowwise_adagrad", [tmp_path / "0", tmp_path / "1"]
    expected, *_ = run_forked(4, train_and_save, FOUR, optimizer, folders[0])
    found, *_ = run_forked(3, load_and_train, SAME_SLICES, optimizer, *folders)
    assert found == pytest.approx(expected, abs=1e-5)


def sums_of_squares(optimizer: Any) -> dict[str, list[tuple[list[int], torch.Tensor]]]:
    """Parts of optimizer state on this rank by table, with their first elements."""
    found = dict[str, list[tuple[list[int], torch.Tensor]]]()
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if name != "step" and "embedding_bags" in key:
                sharded = isinstance(value, ShardedTensor)
                shards = value.local_shards() if sharded else []
                own = [(shard.metadata.shard_offsets, shard.tensor) for shard in shards]
                found[key.split(".")[-2]] = own if sharded else [([0, 0], value)]
    return found


def write_numbers(plan: ShardingPlan, folder: Path) -> None:
    """Saves a training in which slice k of row r has r + 100 k."""
    training = Training(plan, "rowwise_adagrad")
    for table, parts in sums_of_squares(training.optimizer).items():
        for (first, *_), tensor in parts:
            number, row = divmod(first, TABLES[table][0])
            tensor.copy_(torch.arange(len(tensor)) + row + 100 * number)
    save_checkpoint(folder, training.state, plan)


def read_numbers(plan: ShardingPlan, folder: Path, to: Path) -> dict[str, torch.Tensor]:
    """The numbers of the only part that this rank has of each table."""
    training = Training(plan, "rowwise_adagrad", hot_ids())
    load_checkpoint(folder, training.state)
    save_checkpoint(to, training.state, plan)
    found = sums_of_squares(training.optimizer)
    return {table: tensor.numpy() for table, ((_, tensor),) in found.items()}


def test_a_new_slice_has_the_mean_of_what_it_replaces_by_columns(tmp_path: Path) -> None:
    slices = plan_of(4, ("a", 0, 8, 2, 2), ("b", 0, 16, 0, 2), ("b", 16, 8, 2, 2), ("c", 0, 4, 1),
                     ("c", 4, 12, 0), ("d", 0, 8, 3))  # fmt: skip
    run_forked(4, write_numbers, slices, tmp_path / "0", of_node=2)
    others = plan_of(2, ("a", 0, 4, 1), ("a", 4, 4, 0), ("b", 0, 4, 0), ("b", 4, 20, 1),
                     ("c", 0, 16, 0, 2), ("d", 0, 8, 0, 2))  # fmt: skip
    first, second = run_forked(2, read_numbers, others, tmp_path / "0", tmp_path / "1")
    rows = np.arange(60)
    assert first["b"].tolist() == rows.tolist()
    assert second["b"] == pytest.approx(rows + 100 * 8 / 20)
    assert first["c"] == pytest.approx(rows[:15] + 100 * 12 / 16)
    assert second["c"] == pytest.approx(rows[15:30] + 100 * 12 / 16)
    assert second["d"].tolist() == rows[10:20].tolist()
    assert first["a"].tolist() == second["a"].tolist() == rows[:40].tolist()

    copies = plan_of(1, copied="abcd")
    (whole,) = run_forked(1, read_numbers, copies, tmp_path / "0", tmp_path / "2")
    assert (whole["b"][:, :16] == rows[:, None]).all()
    assert (whole["b"][:, 16:] == rows[:, None] + 100).all()
    hot = plan_of(2, ("a", 0, 8, 0), ("b", 0, 16, 0), ("b", 16, 8, 1), ("c", 0, 16, 1),
                  ("d", 0, 8, 0), hot={"b": 20})  # fmt: skip
    first, second = run_forked(2, read_numbers, hot, tmp_path / "0", tmp_path / "3")
    assert sorted(first["b"]) == [row for row in rows if row not in HOT_IDS["b"][:20]]
    assert second["b_hot"][:, 0].tolist() == HOT_IDS["b"][:20]
    for number, folder in enumerate(("2", "3")):
        to = tmp_path / f"back{number}"
        first, second = run_forked(2, read_numbers, others, tmp_path / folder, to)
        assert first["b"].tolist() == rows.tolist()
        assert second["b"] == pytest.approx(rows + 100 * 8 / 20)


def refusals(folder: Path) -> dict[str, str]:
    """What is said of checkpoints and trainings that do not go together."""
    plan = plan_of(1, ("a", 0, 8, 0), ("b", 0, 24, 0), copied="c")
    tables = {name: TABLES[name] for name in "abc"}

    def training(optimizer: str = "adagrad", **others: tuple[int, int]) -> Training:
        return Training(plan, optimizer, tables={**tables, **others})

    good = training()
    save_checkpoint(folder / "good", good.state, plan)
    save_checkpoint(folder / "sgd", training("sgd").state, plan)
    save_checkpoint(folder / "model", {"model": good.model}, plan)
    dcp.save({"model": good.model.state_dict()}, checkpoint_id=folder / "bare")
    save_checkpoint(folder / "torn", good.state, plan)
    for data in (folder / "torn").glob("*.distcp"):
        data.write_bytes(data.read_bytes()[:900])
    (folder / "empty").mkdir()
    adam = torch.optim.Adam(nn.Linear(1, 1).parameters())
    more = plan_of(1, ("a", 0, 8, 0), ("b", 0, 24, 0), ("d", 0, 8, 0), copied="c")
    cases: dict[str, tuple[str, Any]] = {
        "rows": ("good", training(b=(61, 24)).state),
        "table": ("good", Training(more, "adagrad").state),
        "fewer": ("good", {"model": {key: value for key, value in good.model.state_dict().items()
                                     if ".c." not in key}}),
        "other": ("sgd", good.state),
        "none": ("model", good.state),
        "back to sgd": ("good", training("sgd").state),
        "unknown": ("good", {**good.state, "more": torch.zeros(2)}),
        "empty": ("empty", good.state),
        "absent": ("absent", good.state),
        "torn": ("torn", good.state),
    }  # fmt: skip
    said = {}
    for name, (checkpoint, state) in cases.items():
        with pytest.raises(UserError) as error:
            load_checkpoint(folder / checkpoint, state)
        said[name] = str(error.value)
    save_checkpoint(folder / "adam", {"model": good.model, "optimizer": {"state": {"top.weight": {
        "exp_avg": torch.zeros(2)}}}}, plan)  # fmt: skip
    for name, run in {
        "again": lambda: save_checkpoint(folder / "good", good.state, plan),
        "no plan": lambda: plan_of_checkpoint(folder / "bare"),
        "no checkpoint": lambda: plan_of_checkpoint(folder / "empty"),
        "not begun": lambda: load_checkpoint(
            folder / "adam", {"model": good.model, "optimizer": adam}
        ),
    }.items():
        with pytest.raises(UserError) as error:
            run()
        said[name] = str(error.value)
    load_checkpoint(folder / "model", {"model": good.model})  # weights alone
    return said


def test_what_does_not_go_together_is_told_in_one_line(tmp_path: Path) -> None:
    (said,) = run_forked(1, refusals, tmp_path)
    expected = {
        "rows": "good: table bags.b has 60 rows of dim 24 in the checkpoint, and 61 of 24 in the",
        "table": "good: table bags.d is not in the checkpoint: it is of another model",
        "fewer": "good: table bags.c is not in the model: it is of another model",
        "other": "sgd: table bags.a: the checkpoint has no sum in optimizer.state: it was saved",
        "none": "model: table bags.a: the checkpoint has no sum in optimizer.state: it was saved",
        "back to sgd": "has optimizer state in the checkpoint, and none in what is loaded: train",
        "unknown": "good: more is not in the checkpoint: it is of another model",
        "empty": "empty: is no checkpoint: it has no file .metadata, which is written last",
        "absent": "absent: is no checkpoint: it has no file .metadata, which is written last",
        "torn": "torn: the checkpoint cannot be used: ",
        "again": "good: has a checkpoint already: save into a new folder",
        "no plan": "bare: has no plan: save_checkpoint writes one",
        "no checkpoint": "empty: is no checkpoint: it has no file .metadata",
        "not begun": "exp_avg is in the checkpoint, and not in what is loaded: run init_state() of",
    }
    for name, line in expected.items():
        assert line in said[name], name
        assert "\n" not in said[name]
