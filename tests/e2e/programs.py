"""Programs beside Python that these tests start, and what a test does where one is missing."""

import os
import shutil
from pathlib import Path

import pytest


def find_program(name: str, package: str, *folders: str) -> Path:
    """The program, on PATH or in one of the folders (or patterns such as /usr/lib/x/*/bin).

    Where it is missing the test is skipped, and says which Debian package has it. Where everything
    must run (CI=true) a missing program is a failure: a skipped test is easily overlooked there.
    """
    found = [shutil.which(name)]
    for folder in folders:  # the newest version last
        found += sorted(str(path) for path in Path("/").glob(f"{folder.lstrip('/')}/{name}"))
    if path := next((path for path in found if path), None):
        return Path(path)
    reason = f"{name} is missing: install Debian's {package}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
