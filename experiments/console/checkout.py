"""The version of the code, where it runs from a Git checkout."""

import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """Returns the commit of the code; None outside a checkout.

    An environment may lie in the checkout of another project, which does not know this file.
    """
    return (_git("ls-files", Path(__file__).name) and _git("rev-parse", "HEAD")) or None


def is_changed() -> bool:
    """Returns whether code differs from its commit; documents are not compared."""
    changed = ("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*/pretrained/*")
    return git_commit() is not None and bool(_git(*changed))


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments],  # noqa: S607 - whichever git the user has
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
