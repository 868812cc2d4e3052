"""Trains by several plans of one task on all devices of the cluster at once, in real time.

Arguments: the address of Ray, a folder with a task and plans. Prints the median milliseconds of a
step by each plan, as JSON.
"""

import json
import logging
import statistics
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import ray

from autoshard.integration.rehearsal.rank_group import Effort, RankGroup
from autoshard.workload import ShardingPlan, ShardingTask


def main(address: str, folder: Path) -> None:
    """Trains a round by each plan."""
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    task = ShardingTask.load(folder / "task.json")
    plans = {path.stem: ShardingPlan.load(path) for path in sorted((folder / "plans").glob("*"))}
    with closing(RankGroup(len(task.devices), "cpu", in_turns=False)) as ranks:
        here = replace(task, devices=ranks.devices())
        effort = Effort(seconds=0.0, min_rounds=1, precision=1.0)
        rehearsals = ranks.train_interleaved(here, plans, effort)
    steps = {
        name: [ms for r in found.rounds for ms in r.wall_ms] for name, found in rehearsals.items()
    }
    sys.stdout.write(json.dumps({name: statistics.median(ms) for name, ms in steps.items()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
