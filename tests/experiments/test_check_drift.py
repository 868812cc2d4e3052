"""New data against a plan's task: no drift, drift with a new plan, and bad input."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from commands import run
from zipf_data import ZipfRows

from autoshard.experiments import check_drift
from autoshard.experiments.check_drift import DriftConfig
from autoshard.sharders import make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.profiling.profiler import TableProfiler
from autoshard.workload.profiling.sources import ParquetData
from autoshard.workload.ways.option import ShardingOption

BATCH, NAMES = 256, ("a", "b", "c", "d")


def write(path: Path, batches: int, more: float = 1.0, seed: int = 0) -> Path:
    """Writes lookups of tables; of the last, `more` times as many."""
    rng, columns = np.random.default_rng(seed), {}
    for number, name in enumerate(NAMES):
        factor = more if name == NAMES[-1] else 1.0
        lengths = rng.poisson(factor * (5 + 5 * number), batches * BATCH)
        rows = ZipfRows(4000, 1.0, is_shuffled=True).draw(int(lengths.sum()), rng)
        ends = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]), pyarrow.int32())
        columns[name] = pyarrow.ListArray.from_arrays(ends, pyarrow.array(rows))
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=BATCH)
    return path


@pytest.fixture
def config(tmp_path: Path) -> DriftConfig:
    """A task whose tables are a profile, and a plan by rows and dims."""
    profiler = TableProfiler(BATCH, [EmbeddingTable(name, 4000, 64, 1.0) for name in NAMES])
    data = ParquetData(str(write(tmp_path / "old.parquet", 30)), BATCH)
    for portion in data.portions(0):
        profiler.add(portion)
    objective = Objective("step", Link(1e9))
    task = ShardingTask(profiler.tables(), Device.uniform(2, 2**30), BATCH, objective=objective)
    task.save(tmp_path / "task.json")
    make_sharder("size").shard(task).save(tmp_path / "plan.json")
    write(tmp_path / "new.parquet", 25, seed=1)
    return DriftConfig(
        str(tmp_path / "new.parquet"), tmp_path / "task.json", tmp_path / "plan.json", 10**6,
        probe=False, json=tmp_path / "drift.json", out=tmp_path / "next.json",
        store=tmp_path / "costs.db",
    )  # fmt: skip


def test_the_same_lookups_are_no_drift(
    config: DriftConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    check_drift.main(config)
    assert "costs are as before" in capsys.readouterr().out
    assert config.json is not None
    told = json.loads(config.json.read_text())
    assert told["alarm"] == 0
    assert told["step_ratio"] == pytest.approx(1, abs=0.02)


def test_more_lookups_are_drift_and_a_new_plan_is_written(
    config: DriftConfig, tmp_path: Path
) -> None:
    write(tmp_path / "new.parquet", 25, more=3.0, seed=2)
    ShardingPlan.table_wise(ShardingTask.load(config.task), [0, 0, 1, 1]).save(config.plan)
    done = run(
        "check_drift.py",
        "new.parquet --task task.json --plan plan.json --steps-left 1000000 --no-probe "
        "--link 25GB/s --json drift.json --out next.json",
        tmp_path,
    )
    told = json.loads((tmp_path / "drift.json").read_text())
    assert told["schema"] == "autoshard.drift"
    assert told["alarm"] == 1
    assert told["step_ratio_low"] > 1
    assert told["change"]["is_drift"]
    assert "costs changed (p = " in done.stdout
    assert "1,000,000 steps" in done.stdout
    assert " d " in done.stdout.splitlines()[1]  # the table whose cost changed most
    assert told["saved_s"] > 0
    task = ShardingTask.load(config.task)
    new = ShardingPlan.load(tmp_path / "next.json")
    new.check(task)
    assert new != ShardingPlan.load(config.plan)


def test_tables_that_are_no_profile_are_noted(
    config: DriftConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ShardingTask.load(config.task)
    bare = tuple(replace(table, access=None) for table in task.tables)
    replace(task, tables=bare).save(config.task)
    check_drift.main(config)
    assert f"are no profile in batches of {BATCH}" in capsys.readouterr().out


def test_bad_input_ends_in_a_line(config: DriftConfig, tmp_path: Path) -> None:
    task = ShardingTask.load(config.task)
    few = str(write(tmp_path / "few.parquet", 10))
    with pytest.raises(UserError, match="takes at least 20 batches of 256 samples"):
        check_drift.main(replace(config, data=few))
    with pytest.raises(UserError, match="--model is for loaders, not for files"):
        check_drift.main(replace(config, model="my_model:build"))
    with pytest.raises(UserError, match="--batches must be at least 20, got 5"):
        check_drift.main(replace(config, batches=5))
    with pytest.raises(UserError, match="--steps-left must be at least 0, got -1"):
        check_drift.main(replace(config, steps_left=-1))
    other = EmbeddingTable("other", 10, 16, 1.0)
    replace(task, tables=(*task.tables, other)).save(tmp_path / "more.json")
    ShardingPlan.table_wise(ShardingTask.load(tmp_path / "more.json"), [0, 1, 0, 1, 0]).save(
        tmp_path / "more_plan.json"
    )
    with pytest.raises(UserError, match="has no table other of"):
        check_drift.main(
            replace(config, task=tmp_path / "more.json", plan=tmp_path / "more_plan.json")
        )
    plan = ShardingPlan.load(config.plan)
    replace(plan, options={"a": ShardingOption(hot_rows=5)}).save(tmp_path / "hot.json")
    with pytest.raises(UserError, match="has hot rows: name their ids with --hot-ids"):
        check_drift.main(replace(config, plan=tmp_path / "hot.json"))
