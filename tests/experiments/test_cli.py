"""How commands start and end."""

import sys
from dataclasses import dataclass

import pytest

from autoshard.experiments.console import cli


@dataclass(frozen=True)
class Config:
    """A command."""

    new_name: int = 1
    """A number."""


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def writes(config: Config) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"a checkpoint")

    monkeypatch.setattr(sys, "argv", ["command.py"])
    with pytest.raises(SystemExit) as left:
        cli.run_command(writes, Config)
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        "the disk is full, or a quota is: free some space and run again\n"
    )
