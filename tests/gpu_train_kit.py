"""Packs what a GPU machine without a package index needs to train by plans: make gpu-train-kit.

The machine has Python 3.12, torch 2.11 for CUDA, NumPy, SciPy, PyArrow and psutil, and fbgemm-gpu
1.6, or an archive of it. The folder .gpu-train/ gets Ray, the TorchRec of that torch and what both
import, this package, plans, and the script that trains by them: `run.sh`.
"""

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from wheels import ROOT, installed_files

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.cost_model.roofline import roofline_model
from autoshard.sharders import SharderContext, load_policy, make_sharder
from autoshard.sharders.explaining.summary import best_heuristic
from autoshard.workload import Device, Objective, ShardingTask, load_tables
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.packing.gpu_memory import on_gpus

KIT, MAX_MIB = ROOT / ".gpu-train", 60
RANKS, RANK_BYTES, BATCH, SHEET = 4, 16 * 2**30, 32_768, DATA_SHEETS["h200-141gb"]
SETS = ("synthetic:40:3:full", "synthetic:20:2:full")  # 14 and 12 GB on all ranks together
_TORCHREC = "torchrec==1.6.1"  # that of torch 2.11 and fbgemm-gpu 1.6
_OTHERS = (  # in the versions that are here
    "ray msgpack jsonschema jsonschema-specifications referencing rpds-py attrs protobuf click "
    "filelock pyyaml requests charset-normalizer idna urllib3 certifi packaging typing-extensions "
    "tensordict pyvers cloudpickle torchmetrics lightning-utilities pyre-extensions typing-inspect "
    "mypy-extensions tqdm rich markdown-it-py mdurl pygments"
)
_SKIPPED = re.compile(
    r"ray/(jars|cpp|rllib|tune|train|data|serve|llm|dashboard/client)/|ray/.*/tests?/"
)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")


def main() -> None:
    """Makes the folder."""
    shutil.rmtree(KIT, ignore_errors=True)
    (KIT / "plans").mkdir(parents=True)
    for name in ("gpu_train.py", "gpu_train.sh"):
        shutil.copy(ROOT / "tests" / name, KIT / name.replace("gpu_train.sh", "run.sh"))
    for number, tables in enumerate(SETS):
        _plan(f"task{number}", tables)
    with tempfile.TemporaryDirectory() as wheels, tarfile.open(KIT / "site.tar.xz", "w:xz") as site:
        _download(wheels)
        for name, mode, data in _files(Path(wheels)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            site.addfile(entry, io.BytesIO(data))
    mib = sum(path.stat().st_size for path in KIT.rglob("*")) / 2**20
    if mib > MAX_MIB:
        sys.exit(f"{KIT} has {mib:.0f} MiB, more than {MAX_MIB}: leave something out")
    say(f"{KIT}: {mib:.0f} MiB")


def _download(folder: str) -> None:
    given = [_TORCHREC, *(f"{name}=={metadata.version(name)}" for name in _OTHERS.split())]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    subprocess.run([*command, *given], check=True)


def _files(wheels: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yields name, mode and contents of all files of the archive."""
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            for entry in wheel.infolist():
                if not entry.is_dir() and not _SKIPPED.match(entry.filename):
                    name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", entry.filename)
                    yield name, entry.external_attr >> 16 & 0o777 or 0o644, wheel.read(entry)
    for name in sorted(installed_files()):
        yield f"autoshard/{name}", 0o644, (ROOT / name).read_bytes()


def _plan(name: str, tables: str) -> None:
    """Writes a task and plans for it: ours, TorchRec's, and the best heuristic's by price."""
    warnings.simplefilter("ignore")
    objective = Objective("step", SHEET.link(RANKS))
    devices = Device.uniform(RANKS, RANK_BYTES)
    task = on_gpus(ShardingTask(load_tables(tables), devices, BATCH, objective=objective))
    costs = EstimatedCosts(
        roofline_model(SHEET, task.operator).for_objective(objective, RANKS), BATCH
    )
    context = SharderContext(costs, load_policy("cpu"), seconds=10.0)
    predictor = StepPredictor(costs, task)
    best = best_heuristic(task, predictor, 0)
    plans = {f"best-{best.name}": best.plan} if best else {}
    plans |= {
        each: make_sharder(each, context).shard(task) for each in ("autoshard", "torchrec_all")
    }
    task.save(KIT / "plans" / f"{name}.task.json")
    for sharder, plan in plans.items():
        plan.save(KIT / "plans" / f"{name}.{sharder}.plan.json")
        say(f"{tables} by {sharder}: {predictor.of(plan).expected_ms:.2f} ms by price")


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
