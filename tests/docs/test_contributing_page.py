"""Runs the code of CONTRIBUTING.md: a sharder, a reward and a reader as newcomers write them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pages import python_blocks, text_of

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import Costs
from autoshard.workload import Device, EmbeddingTable, ShardingTask, UserError
from autoshard.workload.sources import readers


@pytest.fixture(scope="module")
def code() -> dict[str, Any]:
    """What the page's code blocks define; each imports what it needs."""
    found: dict[str, Any] = {}
    for block in python_blocks(text_of("CONTRIBUTING.md")):
        names: dict[str, Any] = {"__name__": "contributed"}
        exec(block, names)
        found.update(names)
    return found


def test_the_sharder_makes_plans(
    code: dict[str, Any], oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    task = ShardingTask(tables[:12], Device.uniform(3, 2**40), 1024)
    plan = code["LargestFirstSharder"](oracle).shard(task)
    plan.check(task)
    assert {placement.device for placement in plan.placements} == {0, 1, 2}


def test_the_reward_is_zero_for_an_ideal_plan(code: dict[str, Any]) -> None:
    costs = Costs(torch.tensor([2.0, 3.0]), torch.ones(2, 1))
    worth = code["Overload"]().complete(costs, torch.ones(2, 1) > 0, torch.tensor([2.0, 2.0]))
    assert worth.tolist() == [0.0, -0.5]


def test_the_reader_reads_tables(
    code: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(readers._READERS, ".jsonl", code["_jsonl_records"])
    path = tmp_path / "tables.jsonl"
    path.write_text('{"name": "user", "rows": 100, "dim": 8, "pooling_factor": 2}\n')
    assert readers.load_tables(str(path)) == (EmbeddingTable("user", 100, 8, 2.0),)
    path.write_text("{\n")
    with pytest.raises(UserError, match=r"tables\.jsonl, line 1: is not JSON"):
        readers.load_tables(str(path))
