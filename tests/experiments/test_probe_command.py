"""The command that probes a machine."""

from pathlib import Path

import pytest
from commands import run

from autoshard.benchmark import load_probe
from autoshard.benchmark.machine.hardware import cpu_fingerprint
from autoshard.experiments import probe
from autoshard.experiments.probe import ProbeConfig
from autoshard.workload import UserError


def test_a_machine_is_probed_without_ray(tmp_path: Path) -> None:
    done = run("probe.py", "here.json --seconds 10", tmp_path, RAY_ADDRESS="127.0.0.1:1")
    found = load_probe(tmp_path / "here.json", "cpu")
    assert f"probed {cpu_fingerprint()} in" in " ".join(done.stdout.split())
    assert found.hardware == cpu_fingerprint()
    assert found.shards
    assert [entry.name for entry in tmp_path.iterdir()] == ["here.json"]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for config, says in (
        (ProbeConfig(tmp_path / "probe.txt"), "probe.txt"),
        (ProbeConfig(tmp_path), "is a folder"),
        (ProbeConfig(tmp_path / "probe.json", seconds=0.0), "--seconds must be more than 0"),
    ):
        with pytest.raises(UserError, match=says):
            probe.main(config)
    assert not list(tmp_path.iterdir())
