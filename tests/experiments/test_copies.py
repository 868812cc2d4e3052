"""Plans with copies through the commands that make, price, explain, improve and compare them."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cost_model import load_model, save_model
from autoshard.cost_model.step.option_overheads import CopyOverhead
from autoshard.experiments import compare, diff_plans, shard
from autoshard.experiments.compare import CompareConfig
from autoshard.experiments.diff_plans import DiffConfig
from autoshard.experiments.shard import ShardConfig
from autoshard.workload import ShardingPlan, UserError

COPIES = CopyOverhead(0.5, 2.0, 0.05, 0.3, 2.0)
SMALL = [f"small{number}" for number in range(8)]


@pytest.fixture
def config(tmp_path: Path) -> ShardConfig:
    """A large table and eight small ones with many lookups, and a model that knows copies."""
    rows = [f"{name},{300 + n},64,120" for n, name in enumerate(SMALL)]
    lines = ["name,rows,dim,pooling_factor", "large,900000,64,20", *rows]
    (tmp_path / "tables.csv").write_text("\n".join(lines))
    model = load_model("cpu")
    assert model.overhead is not None
    save_model(replace(model, overhead=replace(model.overhead, copies=COPIES)), tmp_path / "model")
    return ShardConfig(
        str(tmp_path / "tables.csv"), 3, "4", out=tmp_path / "plan.json",
        cost_model=tmp_path / "model", store=tmp_path / "costs.db", probe=False,
    )  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def constraints(config: ShardConfig, ways: str) -> ShardConfig:
    path = config.out.with_name("constraints.yaml")
    path.write_text(f"tables: {{'*': {{ways: {ways}}}}}")
    return replace(config, constraints=path)


def test_a_plan_with_copies_is_made_explained_priced_and_improved(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(replace(config, explain=True))
    said, plan = printed(capsys), ShardingPlan.load(config.out)
    assert set(plan.copied) <= set(SMALL)
    assert len(plan.copied) >= 4
    assert f"copied to all devices (data-parallel): {len(plan.copied)} of 9 tables" in said
    assert " grads " in said
    old = config.out.rename(config.out.with_name("old.json"))
    shard.main(replace(config, plan=old, explain=True))
    assert "old.json, estimated" in printed(capsys)
    shard.main(replace(config, start_plan=old, max_moved_gb=1.0))
    assert ShardingPlan.load(config.out).copied == plan.copied
    with pytest.raises(UserError, match=r"copied to all devices, and objective operators counts"):
        shard.main(replace(config, plan=old, objective="operators"))
    with pytest.raises(UserError, match=r"cost model does not know what copies take: rehearse.py"):
        shard.main(replace(config, plan=old, cost_model=_without_copies(config)))


def _without_copies(config: ShardConfig) -> Path:
    folder = config.out.with_name("without")
    model = load_model("cpu")
    assert model.overhead is not None
    save_model(replace(model, overhead=replace(model.overhead, copies=None)), folder)
    return folder


def test_ways_decide_whether_there_are_copies(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(constraints(config, "[table_wise, column_wise]"))
    assert ShardingPlan.load(config.out).copied == ()
    every = constraints(config, "data_parallel")
    shard.main(replace(every, explain=True))
    assert len(ShardingPlan.load(config.out).copied) == 9
    assert "9 of 9 tables" in printed(capsys)
    shard.main(replace(every, sharder="size_lookup"))
    assert len(ShardingPlan.load(config.out).copied) == 9
    assert every.constraints is not None
    every.constraints.write_text("tables: {large: {ways: data_parallel, pinned: 0}}")
    with pytest.raises(
        UserError, match=r"'large: ways data_parallel' and 'large: pinned 0' cannot"
    ):
        shard.main(every)
    every.constraints.write_text("tables: {large: {ways: data_parallel}}")
    with pytest.raises(
        UserError,
        match=r"copies of 1 tables, or of their hot rows, take .* each device, and device 0 has",
    ):
        shard.main(replace(every, memory_gb="0.5"))


def test_copies_that_come_and_go_are_told_of(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(config)
    copied = config.out.rename(config.out.with_name("copied.json"))
    shard.main(constraints(config, "[table_wise, column_wise]"))
    capsys.readouterr()
    count = len(ShardingPlan.load(copied).copied)
    diff = DiffConfig(
        config.out, copied, str(config.tables), cost_model=config.cost_model or Path(),
        store=config.store,
    )  # fmt: skip
    diff_plans.main(diff)
    said = printed(capsys)
    assert f"copies: {count} tables come, 0 go" in said
    assert "gained: expected step time" in said
    diff_plans.main(replace(diff, old=copied, new=config.out))
    said = printed(capsys)
    assert f"copies: 0 tables come, {count} go" in said
    assert "gained: expected step time" in said


def test_plans_with_copies_are_compared_where_their_cost_is_known(
    config: ShardConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "tasks").mkdir()
    shard.main(replace(config, out=tmp_path / "plans/0.json", save_task=tmp_path / "tasks/0.json"))
    comparison = CompareConfig(
        tasks=tmp_path / "tasks", plans=[f"mine={tmp_path / 'plans'}"], sharders="size_lookup",
        cost_model=config.cost_model, mlflow_uri=f"sqlite:///{tmp_path / 'mlflow.db'}", probe=False,
    )  # fmt: skip
    compare.main(comparison)
    assert "mine" in printed(capsys)
    with pytest.raises(UserError, match=r"plans: table \S+ is copied to all devices, and the"):
        compare.main(replace(comparison, cost_model=_without_copies(config)))
