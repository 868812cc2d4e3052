"""Which version of the code runs, where it runs from a checkout."""

import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """The commit of the code that runs, if it runs from a checkout."""
    told = _git("rev-parse", "HEAD")
    return told and told.strip()


def is_changed() -> bool:
    """Whether code differs from that commit; documents may, for they are what is being written."""
    told = _git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*/pretrained/*")
    return bool(told)


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *arguments],  # noqa: S607 - whichever git the user has
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
