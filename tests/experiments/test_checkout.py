"""Which version of the code runs."""

import subprocess
from pathlib import Path

import pytest

from autoshard.experiments.console import checkout


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_checkout_tells_its_commit_and_whether_code_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "room" / "code.py"
    monkeypatch.setattr(checkout, "__file__", str(code))
    code.parent.mkdir()
    code.write_text("one = 1\n")
    (tmp_path / "README.md").write_text("first\n")
    assert (checkout.git_commit(), checkout.is_changed()) == (None, False)  # no checkout
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "README.md")
    git(tmp_path, "commit", "--quiet", "--message", "of another project")
    assert (checkout.git_commit(), checkout.is_changed()) == (None, False)  # as if installed there
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    assert checkout.git_commit() == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "README.md").write_text("second\n")
    assert not checkout.is_changed()
    code.write_text("one = 2\n")
    assert checkout.is_changed()
