"""Which machine plans are for, where it is not one of the training data and cannot be probed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.benchmark.machine.hardware import physical_cores
from autoshard.benchmark.operator.fbgemm import InstallationError
from autoshard.benchmark.probe import probing
from autoshard.benchmark.probe.report import ProbeError
from autoshard.cost_model import OtherHardware, hardware
from autoshard.experiments.console.machine import MachineOptions


@pytest.mark.parametrize("error", [InstallationError, ProbeError])
def test_where_no_probe_can_be_run_plans_are_for_machines_of_the_training_data(
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As without FBGEMM, which planning does not need."""

    def fails(**_: object) -> None:
        raise error("no FBGEMM here")

    monkeypatch.setattr(probing, "probe_here", fails)
    monkeypatch.setattr(hardware, "fingerprint_here", lambda _: "cpu: of nobody, 1 MiB cache")
    with pytest.warns(OtherHardware, match="of nobody"):
        model = MachineOptions(store=tmp_path / "costs.db").model_for()
    assert model.probe is None
    said = " ".join(capsys.readouterr().err.split())
    assert "no FBGEMM here; plans are made without a probe" in said


HOLD = """
import sys
from autoshard.benchmark.machine.device_lock import claimed
with claimed(f"core {sys.argv[1]}", "a pool that measures", 0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_probe_says_what_it_waits_for_and_plans_are_made_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "fingerprint_here", lambda _: "cpu: of nobody, 1 MiB cache")
    monkeypatch.setattr(probing, "CLAIM_SECONDS", 1.5)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(physical_cores()[0])]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.warns(OtherHardware, match="of nobody"):
            model = MachineOptions(store=tmp_path / "costs.db").model_for()
        holder.communicate("")
    assert model.probe is None
    begins, waits, ends = capsys.readouterr().err.splitlines()
    assert begins.startswith("note: this machine is probed, which takes 5 s")
    held = rf"core \d+ of .* is held by a pool that measures \(process {holder.pid}, for \d+ s\)"
    assert re.fullmatch(rf"note: the probe waits: {held}; after 2 s, plans are made .*", waits)
    assert re.search(rf"{held}: run again when that has ended; plans are made without", ends)
    assert "as by --no-probe (probe.py FILE makes one for --hardware FILE)" in ends


def test_a_probe_that_others_slow_down_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "fingerprint_here", lambda _: "cpu: of nobody, 1 MiB cache")
    monkeypatch.setattr(hardware, "_MAX_PROBE_SECONDS", 0.0)
    with pytest.warns(OtherHardware, match="of nobody"):
        model = MachineOptions(store=tmp_path / "costs.db").model_for()
    assert model.probe is None
    assert "was not probed within 0 s, since other programs use it" in capsys.readouterr().err
