"""What a machine has, and what is missing on it."""

import pytest

from autoshard.benchmark.machine.hardware import physical_cores
from autoshard.benchmark.operator import fbgemm
from autoshard.experiments import doctor
from autoshard.workload import UserError


def test_it_measures_and_says_what_it_found(
    cluster: object, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.main(doctor.DoctorConfig())
    lines = capsys.readouterr().out.splitlines()
    subjects = [line[4:17].strip() for line in lines]
    once = ("libraries", "CPU", "disk", "Ray cluster", "measuring", "noise", "link")
    for subject in (*once, "all-to-all", "all-reduce") if len(physical_cores()) > 1 else once:
        assert subjects.count(subject) == 1, subject
    assert any("CPU cores: " in line for line in lines)


def test_what_is_missing_comes_with_its_mend_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise fbgemm.InstallationError("fbgemm is not installed: pip install 'autoshard[cpu]'")

    monkeypatch.setattr(doctor, "check_pair", fail)
    with pytest.raises(UserError, match="nothing can be measured here"):
        doctor.main(doctor.DoctorConfig())
    marked, mend = capsys.readouterr().out.splitlines()
    assert marked.startswith("  ! libraries")
    assert mend.strip() == "fbgemm is not installed: pip install 'autoshard[cpu]'"


def test_a_full_disk_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._disk().mend == ""
    monkeypatch.setattr(doctor, "_DISK_BYTES", float("inf"))
    assert "Ray stops working on a full disk" in doctor._disk().mend


def test_noise_is_that_of_repeats_and_unknown_without_any() -> None:
    for none in ([], [[3.0], [4.0]]):
        assert "no shard was measured more than once" in doctor._noise(none).says
    quiet = doctor._noise([[1.0, 1.02], [5.0, 5.0, 5.0]])
    assert quiet.says == "5 measurements of 2 shards deviate by 0.8%"
    assert quiet.mend == ""
    assert "other programs" in doctor._noise([[1.0, 1.5]]).mend
