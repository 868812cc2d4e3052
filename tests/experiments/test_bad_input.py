"""Bad input of any command ends in one line that says what, where and how to mend it."""

import json
import time
from pathlib import Path

import pytest
from commands import run

from autoshard.workload import Device, EmbeddingTable, ShardingPlan, ShardingTask
from autoshard.workload.bounds import MAX_DEVICES
from autoshard.workload.sources.table_files import save_tables

_SECONDS = 10.0  # in which each is told
_SHARD = "shard --no-probe --tables tables.json --num-devices 2 --memory-gb 1"
_TRAIN = "ppo_shard --tables tables.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good tables and a plan for them, and what is wrong with others."""
    folder = tmp_path_factory.mktemp("bad")
    tables = tuple(EmbeddingTable(f"t{n}", 100, 16, 2.0) for n in range(2))
    save_tables(tables, folder / "tables.json")
    plan = ShardingPlan.table_wise(ShardingTask.from_json(_task(tables)), [0, 1])
    plan.save(folder / "plan.json")
    body = json.loads((folder / "plan.json").read_text())
    head = "name,rows,dim,pooling_factor\n"
    texts = {
        "often.csv": f"{head}a,100,16,1e30\n",
        "giants.csv": head + "".join(f"t{n},{2**40},32768,1\n" for n in range(200)),
        "true.json": '[{"name": "a", "rows": true, "dim": 16, "pooling_factor": 1}]',
        "digits.json": '[{"name": "a", "rows": 9' + "9" * 400 + ', "dim": 4, "pooling_factor": 1}]',
        "longer.json": "9" * 5000,
        "deep.json": "[" * 200_000,
        "deep.yaml": "[" * 3000,
        "many.json": json.dumps({**body, "num_devices": 10**9}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "store.db").mkdir()
    tasks = {"float": {"batch_size": 1.5}, "huge": {"batch_size": 10**30}}
    for name, changes in tasks.items():
        (folder / name).mkdir()
        document = json.dumps({**_task(tables), **changes})
        (folder / name / "0.json").write_text(document)
    return folder


def _task(tables: tuple[EmbeddingTable, ...]) -> dict[str, object]:
    return ShardingTask(tables, Device.uniform(2, 2**30), 64).to_json()


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (f"{_SHARD} --tables often.csv", "often.csv, line 2, column pooling_factor: must lie betw"),
        (f"{_SHARD} --tables giants.csv", "the tables need 26,"),
        (f"{_SHARD} --tables true.json", "true.json, table 1, column rows: must be a number"),
        (f"{_SHARD} --tables digits.json", "digits.json, table 1, column rows: must be a number"),
        (f"{_SHARD} --tables longer.json", "longer.json: has numbers that are too long"),
        (f"{_SHARD} --tables deep.json", "deep.json: has numbers that are too long, or lists"),
        (f"{_SHARD} --tables synthetic:-1:x:", "synthetic:-1:x:: write synthetic:N"),
        (f"{_SHARD} --tables synthetic:1000000000", "at most 65536, got 1000000000"),
        (f"{_SHARD} --tables zipf:1000000000", "at most 65536, got 1000000000"),
        (f"{_SHARD} --num-devices 1000000000", f"--num-devices must be at most {MAX_DEVICES}, got"),
        (f"{_SHARD} --num-devices two", "Error parsing --num-devices: invalid literal"),
        (f"{_SHARD} --bogus", "Unrecognized options: --bogus: shard.py --help describes"),
        (f"{_SHARD} --batch-size {10**18}", "--batch-size must be at most 2147483648, got"),
        (f"{_SHARD} --memory-gb 1e-30", "--memory-gb must be a number more than 0"),
        (f"{_SHARD} --host-memory-gb 1e300", "--host-memory-gb must be at most"),
        (f"{_SHARD} --start-plan plan.json --max-moved-gb 1e300", "--max-moved-gb must be at most"),
        (f"{_SHARD} --start-plan many.json --max-moved-gb 1", "many.json: num_devices: must lie"),
        (f"{_SHARD} --hardware b300", "--hardware b300 is no file, and none of the GPUs a100-40gb"),
        (f"{_SHARD} --hardware h100-80gb:{10**18}", f"name 1 to {MAX_DEVICES} devices of each"),
        (f"{_SHARD} --link 0.{'0' * 30}1B/s", "bytes_s: must be at least 1, got"),
        (
            f"{_SHARD} --num-devices 6 --link 1GB/s --inter-node-link 1GB/s --devices-per-node 4",
            "--devices-per-node 4: 6 devices do not fill nodes of 4: nodes need the same number of",
        ),
        (f"{_SHARD} --constraints deep.yaml", "deep.yaml: has lists that are too deep"),
        (f"{_SHARD} --store store.db", "store.db: is a folder: name a file"),
        (f"{_SHARD} --out /dev/null", "/dev/null: is a device: name a file for --out"),
        ("plan_world --tables tables.json --num-devices 2,1000000000 --memory-gb 1", "at most"),
        ("compare --no-probe --tasks float", "float/0.json: batch_size: must"),
        ("compare --no-probe --tasks huge", "huge/0.json: batch_size: must"),
        ("diff_plans many.json plan.json --tables tables.json", "many.json: num_devices: must"),
        ("collect_costs --tables tables.json --batch-size 0", "batch size must be at least 1"),
        ("collect_costs --tables tables.json --num-shards 1000000000000", "--num-shards must be"),
        (f"{_TRAIN} --num-devices 2-1000000000", "--num-devices must be at most"),
        (f"{_TRAIN} --num-tables 1000000000", "--num-tables must be at most"),
    ],
)
def test_bad_input_is_one_line_within_seconds(folder: Path, asked: str, line: str) -> None:
    script, _, arguments = asked.partition(" ")
    before, began = sorted(folder.rglob("*")), time.monotonic()
    told = [
        each
        for each in run(f"{script}.py", arguments, folder, code=2).stderr.splitlines()
        if not each.startswith("note: ")
    ]
    assert len(told) == 1
    assert line in told[0]
    assert time.monotonic() - began < _SECONDS
    assert sorted(folder.rglob("*")) == before
