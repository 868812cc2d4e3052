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


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ("--new-name 2", 0, ""),
        ("--old-name 2", 2, "--old-name no longer exists: use --new-name"),
        ("--old_name=2", 2, "--old-name no longer exists: use --new-name"),
        ("--learner=both", 2, "--learner both no longer exists: leave it out"),
    ],
)
def test_a_dropped_option_names_what_to_use_instead(
    arguments: str,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[Config] = []
    monkeypatch.setattr(sys, "argv", ["command.py", *arguments.split()])
    dropped = {"--old-name": "use --new-name", "--learner both": "leave it out"}
    with pytest.raises(SystemExit) as ended:
        cli.run_command(found.append, Config, dropped=dropped)
    assert ended.value.code == code
    assert capsys.readouterr().err.strip() == line
    assert found == ([] if code else [Config(2)])


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
