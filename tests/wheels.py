"""The package as files: the source as git knows it, and what a wheel of it has to contain.

Needs nothing but Python: `make package` uses it before anything is installed.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Measurements that cost models are trained on, and files for `ray up`: who uses them has the
# repository.
LEFT_OUT = ("cost_model/hosts/", "experiments/cluster/")
_OWN = ("__init__.py", "__main__.py", "py.typed")  # what the package has in the root
_METADATA = {
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "licenses/LICENSE",
    "top_level.txt",
}


def source_files() -> list[str]:
    """Names of the files that git knows, or will once they are added."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def copy_source(folder: Path) -> Path:
    """Copies the source to a folder, without what an earlier build left behind."""
    for name in source_files():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    return folder


def build_wheel(folder: Path) -> Path:
    """Builds it there, from a copy of what git knows; without an index."""
    copy_source(folder / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=True)
    (found,) = folder.glob("autoshard-*.whl")
    return found


def installed_files() -> set[str]:
    """Names of the files of the source that a wheel contains: all that packages have."""
    packages = tuple(f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py"))
    found = {name for name in source_files() if name.startswith(packages)}
    return {*_OWN, *(name for name in found if not name.startswith(LEFT_OUT))}


def faults_of(wheel: Path) -> list[str]:
    """What is wrong with the contents of a wheel: files that it lacks, or has too much."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    name, version = wheel.name.split("-")[:2]
    wanted = {f"{name}/{path}" for path in installed_files()}
    wanted |= {f"{name}-{version}.dist-info/{path}" for path in _METADATA}
    lacking = [f"the wheel lacks {each}" for each in sorted(wanted - {*names})]
    return lacking + [f"the wheel has {each}" for each in sorted({*names} - wanted)]
