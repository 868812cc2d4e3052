import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray

from autoshard.benchmark.machine.device_lock import DeviceBusy, claimed, this_pool

CORE, OTHER = "core 10000", "core 10001"  # no machine has them: nobody is kept from measuring


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def told(device: str = CORE) -> str:
    """What one is told who finds the core held."""
    with pytest.raises(DeviceBusy) as raised, claimed(device, "late", patience_s=0):
        pass
    return str(raised.value)


def test_a_held_core_says_who_holds_it_and_since_when() -> None:
    where = re.escape(f"{CORE} of {socket.gethostname()} is held by")
    with claimed(CORE, "the pool of A", 0), claimed(OTHER, "the pool of B", 0):
        for _ in range(2):  # who asked in vain has not written over it
            pattern = rf"{where} the pool of A \(process {os.getpid()}, for \d+ s\)"
            assert re.fullmatch(pattern, told())
        assert "the pool of B" in told(OTHER)
    with claimed(CORE, "next", patience_s=0):
        assert "next" in told()


def test_after_an_error_a_core_is_free_and_its_file_names_nobody(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed(CORE, "broken", patience_s=0):
        raise ZeroDivisionError
    assert [file.read_bytes() for file in tmp_path.glob("*/core*.lock")] == [b""]
    with claimed(CORE, "next", patience_s=0):
        pass


HOLD = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from autoshard.benchmark.machine.device_lock import claimed
with claimed(sys.argv[2], "a pool with a long label that is killed", 0):
    print("held", flush=True)
    sys.stdin.read()
"""


def start_holder() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, tempfile.gettempdir(), CORE]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_one_who_was_killed_holds_nothing_and_is_not_named() -> None:
    holder = start_holder()
    assert f"a pool with a long label that is killed (process {holder.pid}, for" in told()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with claimed(CORE, "heir", patience_s=0):
        assert re.search(r"held by heir \(process \d+, for \d+ s\)$", told())


def test_one_who_waits_gets_it_as_soon_as_it_is_free() -> None:
    holder = start_holder()
    assert holder.stdin is not None
    holder.stdin.close()  # it lets go
    with claimed(CORE, "patient", patience_s=60):
        assert "held by patient" in told()
    holder.wait()


@pytest.mark.parametrize("left", ["", "{", "[1]", '{"label": "x"}', "\udcff"])
def test_a_lock_file_that_says_nothing_names_nobody(tmp_path: Path, left: str) -> None:
    with claimed(CORE, "unheard", patience_s=0):
        (file,) = tmp_path.glob("*/core*.lock")
        file.write_bytes(left.encode(errors="surrogateescape"))
        assert told().endswith("is held by another process")


def test_an_actor_is_known_by_its_cluster(cluster: Any) -> None:
    label = ray.get(ray.remote(num_cpus=0)(this_pool).remote())
    assert label == f"the pool of Ray cluster {cluster.address}"
