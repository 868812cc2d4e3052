"""Trains by plans on one GPU, or on cores, in turns; each part runs whatever becomes of others.

Writes `rounds.jsonl` to the folder: a line for each round by a plan, as soon as it is made. Ends
before `--seconds` are over.
"""

import argparse
import itertools
import json
import logging
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from autoshard.benchmark.rehearsals.times import Rehearsal
from autoshard.integration.rehearsal.rank_group import RankGroup
from autoshard.workload import Device, EmbeddingTable, ShardingPlan, ShardingTask

_STEPS, _WARM_UP, _END_S = 10, 3, 15.0


def main() -> None:
    """Runs the parts."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--plans", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--kind", default="cuda")
    options.add_argument("--seconds", type=float, default=380.0)
    options.add_argument("--batch-size", type=int, help="by default that of the tasks")
    options.add_argument("--rows", type=float, default=1.0, help="of the rows of all tables")
    given = options.parse_args()
    deadline = time.monotonic() + given.seconds - _END_S
    signal.signal(signal.SIGALRM, _stop)
    given.out.mkdir(parents=True, exist_ok=True)
    gpus = {"num_gpus": 1} if given.kind == "cuda" else {}
    ray.init("local", include_dashboard=False, logging_level=logging.ERROR, **gpus)
    _part(time.monotonic() + given.seconds / 4, _learn_alike, given.kind)
    tasks = sorted(given.plans.glob("*.task.json"))
    for number, path in enumerate(tasks):
        now = time.monotonic()
        end = now + (deadline - now) / (len(tasks) - number)
        _part((end + deadline) / 2, _train, given, path, end)
    ray.shutdown()


def _part(end: float, function: Callable[..., None], *arguments: Any) -> None:
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, max(1.0, end - began))  # should a rank hang
    try:
        function(*arguments)
    except Exception:  # whatever it is, the next part is worth its time
        traceback.print_exc()
    signal.setitimer(signal.ITIMER_REAL, 0)
    _say(f"== {function.__name__} took {time.monotonic() - began:.1f} s")


def _stop(*_: object) -> None:
    raise TimeoutError("the time is over")


def _learn_alike(kind: str) -> None:
    """Compares losses of ranks in turns with those of ranks in turns on cores."""
    tables = tuple(EmbeddingTable(f"t{n}", 10_000 + n, 32, 5.0) for n in range(6))
    task = ShardingTask(tables, Device.uniform(2, 2**40), 512)
    plan = ShardingPlan.table_wise(task, [0, 1, 0, 1, 1, 0])
    losses = []
    for each in (kind, "cpu"):
        with closing(RankGroup(2, each, in_turns=True)) as ranks:  # type: ignore[arg-type]
            ranks.prepare("", task, plan)
            losses.append(ranks.train("", 8).losses)
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    _say(f"losses on {kind} and on cores differ by at most {worst:.2e}: {losses[0]}")


def _train(given: argparse.Namespace, path: Path, deadline: float) -> None:
    """Makes rounds by each plan of a task in turn until the deadline."""
    task, name = ShardingTask.load(path), path.name.removesuffix(".task.json")
    tables = tuple(replace(t, rows=max(8, round(t.rows * given.rows))) for t in task.tables)
    task = replace(task, tables=tables, batch_size=given.batch_size or task.batch_size)
    plans = {
        file.name.split(".")[1]: ShardingPlan.load(file)
        for file in sorted(path.parent.glob(f"{name}.*.plan.json"))
    }
    made, longest_s = dict[str, Rehearsal](), 0.0
    ranks: RankGroup | None = None
    numbered = itertools.takewhile(lambda _: plans, itertools.count())
    for number, sharder in ((n, each) for n in numbered for each in list(plans)):
        began = time.monotonic()
        if began + longest_s > deadline:
            break
        try:
            ranks = ranks or RankGroup(len(task.devices), given.kind, in_turns=True)
            ranks.prepare(sharder, task, plans[sharder])
            found = ranks.train(sharder, _STEPS, _WARM_UP)
            ranks.forget(sharder)
        except Exception:
            _say(f"{name} by {sharder} failed")
            traceback.print_exc()
            del plans[sharder]
            if ranks is not None:
                ranks.close()
            ranks = None
            continue
        line = {"task": name, "sharder": sharder, "round": number, "hardware": ranks.hardware}
        line |= {"rehearsal": found.to_json(), "made": found.rounds[0].to_json()}
        with (given.out / "rounds.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        rounds = (*made[sharder].rounds, *found.rounds) if sharder in made else found.rounds
        made[sharder] = replace(found, rounds=rounds)
        longest_s = max(longest_s, time.monotonic() - began)
        _say(f"{name} by {sharder}: {found.step_ms:.2f} ms, launched in {found.launch_ms:.2f} ms")
    if ranks is not None:
        ranks.close()
    for sharder, rehearsal in made.items():
        half = rehearsal.half_width if len(rehearsal.rounds) > 1 else float("nan")
        _say(f"{name} by {sharder}: {rehearsal.step_ms:.3f} ms (±{half:.1%})")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
