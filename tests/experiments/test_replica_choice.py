"""Replica groups: the cheapest size is planned, and what cannot be is said in one line."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.experiments import shard
from autoshard.experiments.shard import ShardConfig
from autoshard.workload import ShardingPlan, UserError, load_tables
from autoshard.workload.plans.replicas import ReplicaGroups


@pytest.fixture
def config(tmp_path: Path) -> ShardConfig:
    """Two dozen tables on two nodes of two devices, between which little can be sent."""
    return ShardConfig(
        "synthetic:24:5:small", 4, "1", sharder="cost_fused", out=tmp_path / "plan.json",
        store=tmp_path / "costs.db", probe=False, objective="operators", link="10GB/s,5us",
        inter_node_link="0.05GB/s,20us", devices_per_node=2, replica_group_size="auto",
        sync_interval=1000,
    )  # fmt: skip


def test_the_cheapest_size_is_planned(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rare averages leave groups their nodes; frequent ones leave one group."""
    shard.main(config)
    told = capsys.readouterr().out
    assert "the plan is for 2 groups of 2 devices, such as 0, 1 (DMPCollection's" in told
    plan = ShardingPlan.load(config.out)
    assert plan.replicas == ReplicaGroups(4, 2, consecutive=True, sync_interval=1000)
    assert plan.num_devices == 2
    plan.check_columns(load_tables(config.tables or ""))

    shard.main(replace(config, sync_interval=None))
    assert "cheapest: one group of 4, which needs no DMPCollection" in capsys.readouterr().out
    plan = ShardingPlan.load(config.out)
    assert plan.replicas is None
    assert plan.num_devices == 4


def test_a_size_may_be_named(config: ShardConfig) -> None:
    shard.main(replace(config, replica_group_size="2", sync_interval=None))
    plan = ShardingPlan.load(config.out)
    assert plan.replicas is not None
    assert plan.replicas.group_size == 2
    assert plan.replicas.sync_interval == 1
    alone = {"replica_group_size": None, "sync_interval": None, "sharder": "autoshard"}
    whole = replace(config, num_devices=2, **alone)
    for given in (
        {"plan": config.out}, {"start_plan": config.out, "max_moved_gb": 1.0}
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"plan.json: is the plan of one of 2 replica groups"):
            shard.main(replace(whole, **given))


def test_sizes_without_memory_are_reported(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(config, memory_gb="0.09")
    shard.main(small)
    told = capsys.readouterr().out
    assert "groups of 1: " in told
    assert "no plan" in told
    line = "no plan for replica groups of 1 .the least size that fits is 2.: the tables need "
    with pytest.raises(UserError, match=line):
        shard.main(replace(small, replica_group_size="1"))
    with pytest.raises(UserError, match="no plan for replica groups of 4: the tables need"):
        shard.main(replace(small, memory_gb="0.01"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"replica_group_size": "3"}, "must be auto, or divide --num-devices 4: one of 1, 2, 4, g"),
        ({"replica_group_size": "0"}, "must be auto, or divide --num-devices 4: "),
        ({"replica_group_size": "two"}, "must be auto, or divide --num-devices 4: .* got 'two'"),
        ({"sync_interval": 0}, "--sync-interval must be at least 1"),
        ({"replica_group_size": None}, "--sync-interval is of replica groups: "),
        ({"measure": True, "sharder": "autoshard"}, "leave out --plan, --start-plan"),
        ({"link": None, "inter_node_link": None, "devices_per_node": None}, "give --link, as in"),
        (
            {"num_devices": 36, "devices_per_node": 6, "replica_group_size": "4"},
            "groups of 4 of 36 devices are spread unevenly over nodes of 6: ",
        ),
    ],
)
def test_bad_input(config: ShardConfig, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        shard.main(replace(config, **changes))  # type: ignore[arg-type]
