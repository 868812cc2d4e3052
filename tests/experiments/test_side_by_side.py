"""Work in forked processes."""

import signal
import subprocess
import sys

import psutil
import pytest
import ray
from commands import wait_until

from autoshard.experiments.console import side_by_side as module
from autoshard.experiments.console.side_by_side import processes_for

SCRIPT = """
import os, signal, sys, time
from autoshard.experiments.console import side_by_side as module
from autoshard.workload import PlanError

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one + two)

def fail(n):
    if n == 5:
        raise PlanError("no plan for 5")
    time.sleep(600)

def odd(n):
    raise Odd("a", "b")

def end(n):
    os.kill(os.getpid(), signal.SIGKILL)

def last(n):
    return time.sleep(600)

def triple(n):
    time.sleep(0.2 if n == 0 else 0.0)  # the first comes last
    return 3 * n, os.getpid() != parent

parent = os.getpid()
module.processes_for = lambda items: min(items, 2)
try:
    print(list(module.side_by_side(globals()[sys.argv[1]], [int(n) for n in sys.argv[2:]])))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def run(work: str, *items: int) -> str:
    """What it says in a process of its own, which has not joined a cluster."""
    words = [sys.executable, "-c", SCRIPT, work, *map(str, items)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout


def test_results_come_in_order_from_other_processes() -> None:
    assert run("triple", 0, 1, 2, 3).strip() == str([(3 * n, True) for n in range(4)])
    assert run("triple", 7).strip() == "[(21, False)]"
    assert run("triple").strip() == "[]"


@pytest.mark.parametrize(
    ("work", "says"),
    [
        ("fail", "PlanError: no plan for 5"),  # and nobody waits for the other, which sleeps
        ("end", "UserError: one of 2 processes was killed, most likely because memory ran out"),
        ("odd", "RuntimeError: Odd: ab"),  # which cannot be sent as it is
    ],
)
def test_the_first_error_ends_all(work: str, says: str) -> None:
    assert run(work, 5, 6, 7).startswith(says)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_first(number: signal.Signals) -> None:
    words = [sys.executable, "-c", SCRIPT, "last", "1", "2", "3"]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until("two more", lambda: len(psutil.Process(first.pid).children()) == 2)
        others = psutil.Process(first.pid).children()
    finally:
        first.send_signal(number)
    first.communicate(timeout=60)
    _, left = psutil.wait_procs(others, timeout=60)
    assert not left


def test_processes_for_cores_unless_ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "physical_cores", lambda: (0, 2, 4))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert processes_for(8) == 1
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert [processes_for(items) for items in (8, 2, 1)] == [3, 2, 1]
    monkeypatch.setattr(module, "physical_cores", lambda: (0,))
    assert processes_for(8) == 1
