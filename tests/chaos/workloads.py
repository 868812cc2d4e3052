"""Commands that are disturbed: measuring, training, sweeping and verifying, all with one store."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TASKS = (
    "--tables synthetic:60:1:small --num-tables 6 --num-devices 2 --num-envs 8 --check-tasks 2 "
    "--check-every 2 --batch-size 256 --memory-fill 0.1-0.6 --store costs.db"
)
_SHARDS = "--num-shards 60 --max-tables 6 --batch-size 256 --num-exchanges 4 --store costs.db"
_MIXED = "--reward mixed --measured-share 0.3 --num-env-runners 1 --test-seconds 0"


@dataclass(frozen=True)
class Workload:
    """A command that is run again and again.

    Args:
        name: What it does.
        begin: Returns script and options of the command's run of that number.
        resume: Returns the same for a run that was lost; the folder is the working folder.
    """

    name: str
    begin: Callable[[int], tuple[str, str]]
    resume: Callable[[int, Path], tuple[str, str]]


def _measure(number: int) -> tuple[str, str]:
    return "collect_costs.py", f"--tables synthetic:60:1:small --seed {number} {_SHARDS}"


def _train(number: int) -> tuple[str, str]:
    return "ppo_shard.py", f"{_TASKS} {_MIXED} --seed {number} --iterations 12 --out run{number}"


def _train_on(number: int, folder: Path) -> tuple[str, str]:
    document = folder / f"run{number}" / "training.json"
    if document.exists() and json.loads(document.read_text())["checkpoint"]:
        return "ppo_shard.py", f"--resume --out run{number}"
    return _train(number)


def _sweep(number: int) -> tuple[str, str]:
    trials = "--num-samples 2 --max-iterations 4 --scheduler none --search random --reward mixed"
    return "tune_shard.py", f"{_TASKS} {trials} --seed {number} --storage sweep{number}"


def _sweep_on(number: int, folder: Path) -> tuple[str, str]:
    if (folder / f"sweep{number}" / "sweep.json").exists():
        return "tune_shard.py", f"--resume --storage sweep{number}"
    return _sweep(number)


def _verify(number: int) -> tuple[str, str]:
    task = f"--tables synthetic:16:{number}:small --num-devices 2 --memory-gb 1 --batch-size 256"
    how = f"--sharder autoshard_verified --measure --seconds 20 --out plan{number}.json"
    return "shard.py", f"{task} {how} --store costs.db"


WORKLOADS = (
    Workload("measuring", _measure, lambda number, _: _measure(number)),
    Workload("training", _train, _train_on),
    Workload("sweeping", _sweep, _sweep_on),
    Workload("verifying", _verify, lambda number, _: _verify(number)),
)
