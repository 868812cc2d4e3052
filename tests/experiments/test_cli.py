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
