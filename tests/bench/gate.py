"""Speed gate: is this checkout slower than another one?

    .venv/bin/python tests/bench/gate.py BASE [--only REGEX] [--pairs N] [--current PATH]

BASE is a checkout with an environment of its own in `.venv`, usually of commit 748108b. A worker
process in each checkout does the same work alternately, so that disturbances affect both. Times
are processor seconds of one thread. For each measure the table shows the time in BASE, the median
of the ratios current/base of the pairs, and its 95 % interval. The exit code is 1 if a median is
above 1.03 and its interval above 1. Use an idle machine: on a busy one intervals are too wide.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

LIMIT = 1.03  # a median ratio above it counts as slower
_SECONDS = 0.3  # minimum time of a measurement
_BATCH_SIZE = 1024
_NUM_DEVICES = 8  # for each table
_SHARDERS = (
    "round_robin", "random", "dim", "size", "lookup", "size_lookup", "cost", "cost_fused",
    "neuroshard", "policy", "cost_fused_search", "autoshard", "annealing",
)  # fmt: skip
_OF_MANY = ("size_lookup", "dim", "policy", "autoshard")
_PROPOSALS = 2000

Work = Callable[[], object]


# --- What is measured: runs in either checkout ----------------------------------------------------
# All names of the project are strings here. Where a name has changed, `_find` takes the old and the
# new one; where more has changed, the function tries the new way first.


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _find(*names: str) -> Any:
    """Returns what the first of these names, `module:attribute`, refers to."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(f"autoshard.{module}"), attribute)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(names)} is in this checkout: add its new name")


def _oracle() -> Any:
    model = _find("cost_model:load_model")("cpu")
    return _find("cost_model:EstimatedCosts")(model, _BATCH_SIZE)


def _tables(source: str) -> Any:
    return _find("workload:load_tables")(source)


def episodes(envs: int, tables: tuple[int, int]) -> Work:
    """Returns steps of a batch of episodes with random valid actions."""
    catalog = _find("envs:TableCatalog", "envs:Deck").of_tables(
        _find("cost_model:load_model")("cpu"), _tables("synthetic:320:1:small"), _BATCH_SIZE, True
    )
    drawn = _find("envs:RandomTaskSampler", "envs:RandomDeals")(tables, (4, 4), (0.05, 0.2))
    env = _find("envs:ShardingVectorEnv")(catalog, envs, drawn)
    seen, _ = env.reset(seed=0)
    preferences = np.random.default_rng(0).random((61, envs, 4)) + 0.01

    def play() -> None:
        nonlocal seen
        for preference in preferences:
            actions = (env.layout.split(seen)["allowed"] * preference).argmax(1)
            seen, *_ = env.step(actions)

    return play


def prices(scenarios: int = 0) -> Work:
    """Returns predictions of device plus table, by the mean or in scenarios."""
    import torch

    oracle, tables = _oracle(), _tables("synthetic:200:1:small")
    pieces = [table.whole() for table in tables]
    pricing = oracle.scenarios(tables, scenarios) if scenarios else oracle.model.compute
    amounts = (pricing if scenarios else oracle).amounts(pieces)
    sums = torch.zeros(_NUM_DEVICES, *amounts.shape[1:])
    sums.index_add_(0, torch.arange(len(pieces)) % _NUM_DEVICES, amounts)
    return lambda: pricing.price(sums + amounts[:, None])


def plan(sharder: str, tables: int, devices: int) -> Work:
    """Returns planning by a sharder, with table features already computed."""
    chosen = _tables("synthetic:5500:11:small")[:tables]
    task_of, device = _find("workload:ShardingTask"), _find("workload:Device")
    loose = task_of(chosen, device.uniform(devices, 2**50), _BATCH_SIZE)
    memory = int(sum(map(loose.table_bytes, chosen)) / devices / 0.3)
    task = task_of(chosen, device.uniform(devices, memory), _BATCH_SIZE)
    oracle = _oracle()
    if sharder == "annealing":
        made = _find("sharders:AnnealingSharder")(oracle, 1e9, _PROPOSALS)
    else:
        context = _find("sharders:SharderContext", "sharders:Means")
        policy = _find("sharders:load_policy")("cpu")
        made = _find("sharders:make_sharder")(sharder, context(oracle, policy))
    return lambda: made.shard(task)


MEASURES: Mapping[str, Callable[[], Work]] = {
    "episodes, 512 equal": partial(episodes, 512, (60, 60)),
    "episodes, 512 mixed": partial(episodes, 512, (20, 100)),
    "episodes, 128 equal": partial(episodes, 128, (60, 60)),
    "episodes, 128 mixed": partial(episodes, 128, (20, 100)),
    "prices, mean": prices,
    "prices, 16 scenarios": partial(prices, 16),
    **{f"{name}, 100 on 8": partial(plan, name, 100, 8) for name in _SHARDERS},
    **{f"{name}, 1000 on 32": partial(plan, name, 1000, 32) for name in _OF_MANY},
}


def work() -> None:
    """Runs the worker: reads lines `[measure, times]` and prints processor seconds."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ready: dict[str, Work] = {}
    for line in sys.stdin:
        name, times = json.loads(line)
        if name not in ready:
            ready[name] = MEASURES[name]()
            ready[name]()  # warm-up, such as computing table features
        started = time.process_time()
        for _ in range(times):
            ready[name]()
        _say(json.dumps(time.process_time() - started))


# --- The comparison -------------------------------------------------------------------------------


class Worker:
    """A worker process in a checkout."""

    def __init__(self, checkout: Path) -> None:
        python = checkout.resolve() / ".venv" / "bin" / "python"
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # Otherwise chance decides whether a process gives large buffers back to the system and
        # faults them in again, which doubles the time of prices.
        keep = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**30))
        self._process = subprocess.Popen(
            [str(python), "-P", str(Path(__file__).resolve()), "--worker", "."],
            cwd=checkout,
            env={**os.environ, **one, **keep},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, measure: str, times: int) -> float:
        """Returns the processor seconds of so many repetitions."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([measure, times]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"gate: the worker in {self._process.args!r} failed at {measure!r}")
        return float(json.loads(answer))


def compare(base: Worker, current: Worker, measure: str, pairs: int) -> bool:
    """Prints a line of the table; returns whether the current checkout is slower."""
    current.seconds(measure, 1)
    times = max(1, round(_SECONDS / base.seconds(measure, 1)))
    ratios, base_s = [], []
    for number in range(pairs):
        pair = (base, current) if number % 2 else (current, base)
        found = {worker: worker.seconds(measure, times) / times for worker in pair}
        ratios.append(found[current] / found[base])
        base_s.append(found[base])
    median = float(np.median(ratios))
    interval = bootstrap((ratios,), np.median, method="percentile").confidence_interval
    slower = median > LIMIT and interval.low > 1
    mark = "" if median <= LIMIT else "   SLOWER" if slower else "   unclear: more pairs are needed"
    _say(
        f"{measure:28}{1e3 * float(np.median(base_s)):10.2f} ms{median:8.3f}   "
        f"{interval.low:.3f} to {interval.high:.3f}{mark}"
    )
    return slower


def main() -> int:
    """Compares two checkouts; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", type=Path, help="checkout to compare with")
    parser.add_argument("--current", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--only", default="", help="regular expression of measures")
    parser.add_argument("--pairs", type=int, default=15, help="of measurements")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    base, current = Worker(options.base), Worker(options.current)
    _say(f"{'measure':28}{'base':>13}{'ratio':>8}   95 % interval")
    chosen = [measure for measure in MEASURES if re.search(options.only, measure)]
    slower = [measure for measure in chosen if compare(base, current, measure, options.pairs)]
    _say(f"{len(slower)} of {len(chosen)} are slower by more than {LIMIT - 1:.0%}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
