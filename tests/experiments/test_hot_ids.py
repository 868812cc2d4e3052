"""Hot rows through the commands: profiled, planned, explained, compared, and trained."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.experiments import diff_plans, profile_tables, shard
from autoshard.experiments.diff_plans import DiffConfig
from autoshard.experiments.profile_tables import ProfileConfig
from autoshard.experiments.shard import ShardConfig
from autoshard.workload import ShardingPlan, UserError, load_hot_ids, save_hot_ids

ROWS, SAMPLES, LOOKUPS = 400_000, 4_000, 100
OTHERS = [f"other{number}" for number in range(9)]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile of data whose ids are sorted by use, and a rule of rows."""
    folder = tmp_path_factory.mktemp("hot")
    rng = np.random.default_rng(1)
    popularity = np.cumsum(np.arange(1, ROWS + 1) ** -1.1)
    heavy = np.searchsorted(popularity, rng.random(SAMPLES * LOOKUPS) * popularity[-1])
    columns = {"heavy": heavy.reshape(SAMPLES, LOOKUPS).tolist()}
    columns |= {name: rng.integers(0, 50_000, (SAMPLES, 2)).tolist() for name in OTHERS}
    pq.write_table(pa.table(columns), folder / "data.parquet", row_group_size=SAMPLES // 4)
    known = [f"heavy,{ROWS},16,1", *(f"{name},50000,16,1" for name in OTHERS)]
    lines = ["name,rows,dim,pooling_factor", *known]
    (folder / "names.csv").write_text("\n".join(lines))
    profile_tables.main(
        ProfileConfig(
            str(folder / "data.parquet"),
            folder / "tables.parquet",
            folder / "ids.npz",
            str(folder / "names.csv"),
            batch_size=1000,
        )
    )
    (folder / "rows.yaml").write_text("tables: {heavy: {ways: row_wise}}")
    return folder


@pytest.fixture
def config(profiled: Path, tmp_path: Path) -> ShardConfig:
    return ShardConfig(
        str(profiled / "tables.parquet"), 4, "4", constraints=profiled / "rows.yaml",
        hot_ids=profiled / "ids.npz", batch_size=4096, out=tmp_path / "plan.json",
        store=tmp_path / "costs.db", probe=False,
    )  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_ids_of_a_profile_are_those_that_are_used_most(profiled: Path) -> None:
    ids = load_hot_ids(profiled / "ids.npz")
    assert set(ids) == {"heavy", *OTHERS}
    assert ids["heavy"][:3].tolist() == [0, 1, 2]
    assert len(ids["heavy"]) <= 0.05 * ROWS
    assert set(range(100)) <= set(ids["heavy"].tolist())


def test_a_plan_with_hot_rows_is_made_explained_and_compared(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(replace(config, hot_ids=None))
    said, without = printed(capsys), config.out.rename(config.out.with_name("without.json"))
    assert "busiest" in said
    assert "--hot-ids" in said  # the advice
    shard.main(replace(config, explain=True))
    said, plan = printed(capsys), ShardingPlan.load(config.out)
    ((table, count),) = plan.hot_rows.items()
    assert table == "heavy"
    assert f"hot rows copied to all devices: {count:,} of 1 tables" in said
    assert f"heavy {count:,} hot" in said  # among the differences from the heuristic's plan
    capsys.readouterr()
    diff_plans.main(
        DiffConfig(without, config.out, str(config.tables), store=config.store, batch_size=4096)
    )
    assert "hot rows: 1 tables come, 0 go" in printed(capsys)
    # Priced again, without ids, which only planning needs.
    again = replace(config, hot_ids=None, plan=config.out, out=config.out.with_name("no.json"))
    shard.main(again)
    assert f"hot rows copied to all devices: {count:,} of 1 tables" in printed(capsys)


def test_a_plan_with_hashed_ids_says_how_to_train_by_it(
    config: ShardConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shard.main(replace(config, hot_ids=None, hash_ids=True))
    said, plan = printed(capsys), ShardingPlan.load(config.out)
    assert plan.hot_rows == dict.fromkeys(plan.row_wise, 0)
    assert f"rows numbered by a hash of their ids: {len(plan.hot_rows)} of" in said
    assert "by with_hot_rows" in said
    assert "busiest" not in said


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"plan": Path("plan.json")}, "--hot-ids is for making plans"),
        ({"start_plan": Path("plan.json"), "max_moved_gb": 1.0}, "--hot-ids is for making plans"),
        ({"sharder": "neuroshard"}, "--hot-ids is not used by sharder neuroshard: take one of"),
        ({"objective": "operators"}, "--hot-ids needs the price of copies"),
        ({"hot_ids": None, "hash_ids": True, "sharder": "cost"}, "--hash-ids is not used by"),
    ],
)
def test_options_that_leave_no_use_of_ids_are_refused(
    config: ShardConfig, options: dict[str, object], fault: str
) -> None:
    with pytest.raises(UserError, match=fault):
        shard.main(replace(config, **options))  # type: ignore[arg-type]


def test_wrong_ids_are_one_line(config: ShardConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.npz: cannot be read"):
        shard.main(replace(config, hot_ids=tmp_path / "none.npz"))
    for ids, fault in (
        ({"heavy": [1, ROWS]}, f"hot id {ROWS} of table heavy is none of its {ROWS} rows"),
        ({"heavy": [1, 1]}, "hot ids of table heavy name a row twice"),
        ({"absent": [1]}, "has ids of none of these tables"),
    ):
        save_hot_ids(ids, tmp_path / "ids.npz")
        with pytest.raises(UserError, match=rf"ids\.npz: {fault}"):
            shard.main(replace(config, hot_ids=tmp_path / "ids.npz"))
