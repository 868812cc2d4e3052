"""Which machine plans are for, where it is not one of the training data and cannot be probed."""

from pathlib import Path

import pytest

from autoshard.benchmark import probing
from autoshard.benchmark.fbgemm import InstallationError
from autoshard.benchmark.probe import ProbeError
from autoshard.cost_model import OtherHardware
from autoshard.experiments.console import machine
from autoshard.experiments.console.machine import MachineOptions


@pytest.mark.parametrize("error", [InstallationError, ProbeError])
def test_where_no_probe_can_be_run_plans_are_for_machines_of_the_training_data(
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As without FBGEMM, which planning does not need."""

    def fails() -> None:
        raise error("no FBGEMM here")

    monkeypatch.setattr(probing, "probe_here", fails)
    monkeypatch.setattr(machine, "fingerprint_here", lambda _: "cpu: of nobody, 1 MiB cache")
    with pytest.warns(OtherHardware, match="of nobody"):
        model = MachineOptions().model_for("cpu", tmp_path / "costs.db")
    assert model.probe is None
    said = " ".join("".join(capsys.readouterr()).split())
    assert "no FBGEMM here; plans are made without a probe" in said
