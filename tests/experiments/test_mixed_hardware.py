"""`--hardware` with several kinds of devices: read, planned for, measured on each kind."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run

from autoshard.benchmark import MachineProbe, MeasurementStore, save_probe
from autoshard.benchmark.machine.hardware import cpu_fingerprint, physical_cores, with_threads
from autoshard.benchmark.pool.pool import end_pool, pool_names
from autoshard.benchmark.probe.report import Passes, ProbedShard
from autoshard.benchmark.probe.shards import PROBE_SHARDS
from autoshard.workload import ShardingPlan, ShardingTask

GPUS = "--tables synthetic:24:5:small --num-devices 4 --memory-gb 40 --batch-size 8192"
CORES = len(physical_cores())


def test_the_plan_gives_less_to_slower_gpus(tmp_path: Path) -> None:
    said = run("shard.py", f"{GPUS} --hardware h100-80gb:2,l4-24gb:2 --save-task task.json "
               "--memory-gb 24", tmp_path)  # fmt: skip
    assert "│ device0 h100-80gb │" in said.stdout
    task = ShardingTask.load(tmp_path / "task.json")
    assert [device.name for device in task.devices] == [
        "device0 h100-80gb", "device1 h100-80gb", "device2 l4-24gb", "device3 l4-24gb",
    ]  # fmt: skip
    assert "L4" in task.hardware[2]
    plan = ShardingPlan.load(tmp_path / "plan.json")
    columns = plan.exchanged_columns(task)
    assert sum(columns[:2]) > 1.5 * sum(columns[2:])
    # All-to-alls are by the slower link of the two kinds.
    assert "all-to-alls over 24 GB/s" in said.stdout


@pytest.mark.parametrize(
    ("command", "link"),
    [
        ("shard.py --hardware h100-80gb", "45 GB/s, 42 us, rings 45 GB/s, 60 us"),
        ("shard.py --hardware h100-80gb:6,a100-80gb:6", "22.5 GB/s, 42 us, rings 22.5 GB/s, 60 us"),
        ("plan_world.py --hardware h100-80gb", "45 GB/s, 42 us, rings 45 GB/s, 60 us"),
    ],
)
def test_a_note_says_which_link_nodes_that_are_not_full_have(
    command: str, link: str, tmp_path: Path
) -> None:
    script, _, options = command.partition(" ")
    number = "8,12" if script == "plan_world.py" else "12"
    asked = f"{GPUS} {options} --num-devices {number} --sharder size"
    notes = [s for s in run(script, asked, tmp_path).stdout.splitlines() if "do not fill" in s]
    assert notes == [
        "note: 12 devices do not fill nodes of 8, as their data sheet has them: all exchanges are "
        f"priced by the network between nodes, {link}; if your nodes are full, give --link, "
        "--inter-node-link and --devices-per-node"
    ]


@pytest.mark.parametrize(
    "options",
    [
        "--num-devices 16",
        "--num-devices 4",
        "--num-devices 12 --link 300GB/s,20us --inter-node-link 45GB/s,40us --devices-per-node 6",
    ],
)
def test_full_nodes_and_given_links_need_no_note(options: str, tmp_path: Path) -> None:
    asked = f"{GPUS} --hardware h100-80gb {options} --sharder size"
    assert "do not fill" not in run("shard.py", asked, tmp_path).stdout


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--hardware h100-80gb:2,a100-40gb", "--hardware a100-40gb: say how many devices"),
        ("--hardware h100-80gb:2,a100-40gb:1", "names 3 devices, and --num-devices 4"),
        ("--hardware h100-80gb:2,h100-80gb:2", "NVIDIA H100 .* is named twice"),
        ("--hardware h100-80gb:2,unheard-of:2", "--hardware unheard-of is no file, and none of"),
        ("--no-probe --hardware unheard-of", "--hardware unheard-of is no file, and none of"),
        ("--no-probe --hardware h100-80gb:2,unheard-of:2", "--hardware unheard-of is no file"),
        ("--no-probe --hardware h100-80gb", "--no-probe takes the cost model as it is"),
        ("--hardware h100-80gb:2,l4-24gb:2", "--memory-gb 40 is more than NVIDIA L4 has"),
    ],
)
def test_bad_hardware_is_one_line(options: str, error: str, tmp_path: Path) -> None:
    said = run("shard.py", f"{GPUS} {options}", tmp_path, code=2)
    assert re.search(error, said.stderr)


def test_names_of_kinds_are_whole_at_80_characters(tmp_path: Path) -> None:
    asked = (
        "--tables mlperf:dlrm-v2 --num-devices 4 --memory-gb 79 --sharder size "
        "--hardware h100-80gb:2,mi300x-192gb:2"
    )
    said = run("shard.py", asked, tmp_path, COLUMNS="80").stdout
    for kind in ("h100-80gb", "mi300x-192gb"):
        assert len(re.findall(rf"│ {kind} +│", said)) == 2


def test_other_commands_plan_for_one_kind(tmp_path: Path) -> None:
    said = run("plan_world.py", f"{GPUS} --hardware h100-80gb:2,a100-40gb:2", tmp_path, code=2)
    assert "names several kinds of devices, for which shard.py alone plans" in said.stderr
    said = run("plan_world.py", f"{GPUS} --hardware unheard-of:4", tmp_path, code=2)
    assert "--hardware unheard-of is no file, and none of the GPUs a100-40gb, " in said.stderr


def save_probe_of(hardware: str, slowness: float, path: Path) -> None:
    """A probe of a machine that takes so many ms for each thousand lookups and columns."""
    shards = []
    for name, probed in PROBE_SHARDS.items():
        tables = [piece.table for piece in probed.shard.pieces]
        work = sum(t.pooling_factor * (16 + t.dim) for t in tables) * probed.batch_size * 1e-6
        ms = slowness * (0.2 + work)
        shards.append(ProbedShard(name, Passes(0.4 * ms, 0.6 * ms)))
    save_probe(MachineProbe(hardware, shards=tuple(shards)), path)


@pytest.fixture
def no_pools(cluster: object) -> Iterator[None]:
    """Before and after: kinds of devices have pools of their own."""
    for name in pool_names():
        end_pool(name)
    yield
    for name in pool_names():
        end_pool(name)


@pytest.mark.skipif(CORES < 2, reason="a device of several cores needs as many")
@pytest.mark.usefixtures("no_pools")
def test_each_kind_is_measured_on_its_devices(tmp_path: Path) -> None:
    """Here one core, and all of them: both kinds learn, and the plan is measured on both."""
    one, several = cpu_fingerprint(), with_threads(cpu_fingerprint(), CORES)
    save_probe_of(one, 2.0, tmp_path / "one.json")
    save_probe_of(several, 1.0, tmp_path / "several.json")
    said = run("shard.py", "--tables synthetic:12:5:small --num-devices 3 --memory-gb 1 "
               "--hardware several.json:1,one.json:2 --measure --seconds 6 --store costs.db",
               tmp_path)  # fmt: skip
    assert re.search(r"measured: a step takes [\d.]+ ms", said.stdout)
    with MeasurementStore(tmp_path / "costs.db") as store:
        kinds = {hardware for hardware, _ in store.makes()}
    assert kinds == {one, several}
    assert len(pool_names()) == 2
