"""Tables in host memory by the command line, for GPUs that are not here."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.experiments import shard
from autoshard.experiments.shard import ShardConfig
from autoshard.workload import ShardingPlan, UserError


@pytest.fixture
def config(tmp_path: Path) -> ShardConfig:
    """Eight tables of 10 GB on two GPUs of 24 GB."""
    path = tmp_path / "tables.csv"
    rows = [f"t{n},20000000,128,2,{0.9 + n / 20}" for n in range(8)]
    path.write_text("\n".join(["name,rows,dim,pooling_factor,zipf_alpha", *rows]))
    return ShardConfig(
        str(path), 2, "24", sharder="policy", out=tmp_path / "plan.json", batch_size=8192,
        store=tmp_path / "costs.db", hardware="h100-80gb", host_memory_gb=64,
    )  # fmt: skip


def test_tables_that_do_not_fit_into_gpus_stay_with_the_host(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="of memory are missing"):
        shard.main(replace(config, host_memory_gb=None))
    shard.main(config)
    told = capsys.readouterr().out
    assert "of 8 tables, at most" in told
    assert "kernels fused_uvm_caching and fused_uvm, never measured here" in told
    plan = ShardingPlan.load(config.out)
    assert plan.cached_rows
    # What is written is priced, explained and compared as any plan.
    again = replace(config, host_memory_gb=None, sharder="autoshard", explain=True)
    shard.main(replace(again, plan=config.out, out=config.out.with_name("other.json")))
    assert "in host memory: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"host_memory_gb": 1.0}, r"device \d would keep .* GiB in host memory, of which each "),
        ({"host_memory_gb": 0.0}, "--host-memory-gb must be more than 0, got 0.0"),
        ({"sharder": "size"}, "--host-memory-gb is not used by sharder size: take autoshard"),
        ({"sharder": "autoshard_verified"}, "leave out --plan, --start-plan, --replica-group-siz"),
        ({"plan": Path("plan.json")}, "--plan is priced as it is: leave out --sharder"),
        ({"hardware": None, "probe": False}, "no bandwidth from cpu: .*: plan for a GPU with --ha"),
    ],
)
def test_bad_input(config: ShardConfig, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        shard.main(replace(config, **changes))  # type: ignore[arg-type]
