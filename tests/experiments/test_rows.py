"""Plans with tables in blocks of rows through the commands that make, price and compare them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.experiments import compare, diff_plans, shard
from autoshard.experiments.compare import CompareConfig
from autoshard.experiments.diff_plans import DiffConfig
from autoshard.experiments.shard import ShardConfig
from autoshard.workload import ShardingPlan, UserError

OTHERS = [f"other{number}" for number in range(9)]


@pytest.fixture
def config(tmp_path: Path) -> ShardConfig:
    """A table with many lookups of few columns, and nine small ones; copies are forbidden."""
    rows = [f"{name},{50_000 + n},32,4" for n, name in enumerate(OTHERS)]
    lines = ["name,rows,dim,pooling_factor", "heavy,2000000,16,200", *rows]
    (tmp_path / "tables.csv").write_text("\n".join(lines))
    ways = "[table_wise, column_wise, row_wise]"
    (tmp_path / "constraints.yaml").write_text(f"tables: {{'*': {{ways: {ways}}}}}")
    return ShardConfig(
        str(tmp_path / "tables.csv"), 3, "4", out=tmp_path / "plan.json",
        store=tmp_path / "costs.db", probe=False, constraints=tmp_path / "constraints.yaml",
    )  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def demanding(config: ShardConfig, ways: str) -> ShardConfig:
    path = config.out.with_name("others.yaml")
    path.write_text(f"tables: {{'*': {{ways: {ways}}}}}")
    return replace(config, constraints=path)


def test_a_plan_by_rows_is_made_explained_priced_and_improved(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(replace(config, explain=True))
    said, plan = printed(capsys), ShardingPlan.load(config.out)
    assert plan.row_wise == {"heavy": 3}
    assert "row-wise (in blocks of rows): 1 of 10 tables, heavy" in said
    slowest = re.search(r"all phases: device(\d)", said)
    assert slowest is not None
    block = ("0:666667", "666667:1333334", "1333334:2000000")[int(slowest[1])]
    assert f"heavy[{block}]" in said  # among the costliest of the slowest device
    old = config.out.rename(config.out.with_name("old.json"))
    shard.main(replace(config, plan=old, explain=True))
    assert "old.json, estimated" in printed(capsys)
    shard.main(replace(config, start_plan=old, max_moved_gb=1.0))
    assert ShardingPlan.load(config.out).row_wise == plan.row_wise
    shard.main(replace(config, plan=old, objective="operators"))  # rows have a price there, too
    assert "old.json, estimated" in printed(capsys)


def test_ways_decide_whether_there_are_rows(config: ShardConfig) -> None:
    shard.main(demanding(config, "[table_wise, column_wise]"))
    assert ShardingPlan.load(config.out).row_wise == {}
    for sharder in ("autoshard", "size_lookup", "neuroshard"):
        shard.main(replace(demanding(config, "row_wise"), sharder=sharder))
        assert ShardingPlan.load(config.out).row_wise == dict.fromkeys(["heavy", *OTHERS], 3)
    assert config.constraints is not None
    config.constraints.write_text("tables: {heavy: {ways: row_wise, whole: true}}")
    with pytest.raises(UserError, match=r"'heavy: ways row_wise' and 'heavy: whole' cannot be"):
        shard.main(config)


def test_rows_that_come_and_go_are_told_of(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(config)
    row_wise = config.out.rename(config.out.with_name("rows.json"))
    shard.main(demanding(config, "[table_wise, column_wise]"))
    capsys.readouterr()
    diff = DiffConfig(
        config.out, row_wise, str(config.tables), store=config.store,
        json=config.out.with_name("d.json"),
    )  # fmt: skip
    diff_plans.main(diff)
    said = printed(capsys)
    assert "row-wise: 1 tables come, 0 go" in said
    assert "rows 0-666,667" in said
    moves = json.loads(config.out.with_name("d.json").read_text())["moves"]
    assert all(move["rows"] for move in moves if move["table"] == "heavy")


def test_uneven_rows_in_a_plan_file_are_one_line(config: ShardConfig) -> None:
    shard.main(config)
    document = json.loads(config.out.read_text())
    placement = next(p for p in document["placements"] if p["table"] == "heavy")
    placement["row_blocks"] = 2
    config.out.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"heavy is in 2 blocks of rows from device 0 on: take"):
        shard.main(replace(config, plan=config.out))
    placement["rows"] = [0, 1000]
    config.out.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"plan.json: rows: is not a field of a placement"):
        shard.main(replace(config, plan=config.out))


def test_plans_by_rows_are_compared(
    config: ShardConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "tasks").mkdir()
    shard.main(replace(config, out=tmp_path / "plans/0.json", save_task=tmp_path / "tasks/0.json"))
    compare.main(
        CompareConfig(
            tasks=tmp_path / "tasks", plans=[f"mine={tmp_path / 'plans'}"], sharders="size_lookup",
            mlflow_uri=f"sqlite:///{tmp_path / 'mlflow.db'}", probe=False,
        )
    )  # fmt: skip
    assert "mine" in printed(capsys)
