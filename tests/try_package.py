"""Builds the package and tries it as a user does who has no repository: make package.

An sdist is built of what git knows, and a wheel of the sdist; both are left in dist/. Then the
wheel is installed into an empty environment, with the versions of `constraints/`, and its commands
run in an empty folder. Some 2 GB are installed from the index, which takes minutes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from wheels import ROOT, copy_source, faults_of

DIST = ROOT / "dist"
PINS = ROOT / "constraints" / "torch-2.13.txt"
PLANNING = "shard --tables synthetic:100:1:small --num-devices 4 --memory-gb 1"
MEASURING = "collect-costs --tables synthetic:40:1:small --num-shards 4 --devices cpu --seconds 60"
# As `twine check` does, and also whether each field may be in metadata of its version.
VALID = """
import sys, zipfile
from packaging.metadata import Metadata
archive = zipfile.ZipFile(sys.argv[1])
(name,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
found = Metadata.from_email(archive.read(name), validate=True)
assert found.description and found.description_content_type == "text/markdown", found
print(found.name, found.version, "metadata", found.metadata_version)
"""
SCRIPT = """
from autoshard.sharders import make_sharder
from autoshard.workload import Device, ShardingTask, load_tables
task = ShardingTask(load_tables("synthetic:12:1:small"), Device.uniform(2, 2**30), 64)
print(make_sharder("size_lookup").shard(task).num_devices)
"""
WRONG = """
from autoshard.workload import Device
Device.uniform("two", 2**30)
"""


def main() -> None:
    """Builds, checks and tries the package."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--demo", action="store_true", help="run the demo, too: five minutes")
    demo = parser.parse_args().demo
    with tempfile.TemporaryDirectory(prefix="autoshard-package-") as name:
        folder = Path(name)
        tools = _environment(folder / "tools")
        _pip(tools, "build", "mypy")
        wheel = _built(folder, tools)
        user, empty = _environment(folder / "user"), folder / "empty"
        empty.mkdir()
        begun = time.monotonic()
        _pip(user, "-c", str(PINS), str(wheel))
        say(f"installed without extras in {time.monotonic() - begun:.0f} s")
        _plan(user, empty)
        _type(tools, user, empty)
        begun = time.monotonic()
        _pip(user, "-c", str(PINS), f"autoshard[cpu] @ {wheel.as_uri()}")
        say(f"installed the extra cpu in {time.monotonic() - begun:.0f} s")
        _run([user / "autoshard", *MEASURING.split()], empty, num_lines=4)
        if demo:
            begun = time.monotonic()
            _run([user / "autoshard", "demo"], empty, num_lines=20)
            say(f"the demo took {time.monotonic() - begun:.0f} s")
    say(f"{wheel.relative_to(ROOT)} can be installed, plans and measures")


def _built(folder: Path, tools: Path) -> Path:
    """Builds into dist/, and returns the wheel."""
    for old in (*DIST.glob("autoshard-*.whl"), *DIST.glob("autoshard-*.tar.gz")):
        old.unlink()
    source = copy_source(folder / "source")
    _run([tools / "python", "-m", "build", "--outdir", DIST, source], folder)
    (wheel,), (sdist,) = DIST.glob("autoshard-*.whl"), DIST.glob("autoshard-*.tar.gz")
    faults = faults_of(wheel)
    if faults:
        sys.exit("\n".join(faults))
    _run([tools / "python", "-c", VALID, wheel], folder)
    for each in (wheel, sdist):
        say(f"{each.relative_to(ROOT)}: {each.stat().st_size / 1e6:.2f} MB")
    infos = zipfile.ZipFile(wheel).infolist()
    data = [info for info in infos if not info.filename.endswith(".py")]
    say(
        f"{len(infos)} files: {len(infos) - len(data)} modules, "
        f"{sum(info.compress_size for info in data) / 1e6:.2f} MB of others"
    )
    return wheel


def _plan(user: Path, empty: Path) -> None:
    """Plans without fbgemm, and lists the commands."""
    place = "import autoshard; print(autoshard.__file__)"
    found = _run([user / "python", "-c", place], empty)
    assert Path(found.strip()).is_relative_to(user.parent), found
    _run([user / "python", "-m", "autoshard", "--help"], empty, num_lines=3)
    _run([user / "autoshard", *PLANNING.split()], empty, num_lines=12)
    assert (empty / "plan.json").is_file()


def _type(tools: Path, user: Path, empty: Path) -> None:
    """Checks scripts of users by the types of what is installed."""
    mypy = [tools / "mypy", "--strict", "--python-executable", user / "python"]
    (empty / "script.py").write_text(SCRIPT)
    _run([user / "python", "script.py"], empty, num_lines=1)
    _run([*mypy, "script.py"], empty, num_lines=1)
    (empty / "wrong.py").write_text(WRONG)
    said = _run([*mypy, "wrong.py"], empty, code=1, num_lines=2)
    assert "[arg-type]" in said, said


def _environment(folder: Path) -> Path:
    """Makes an environment and returns the folder of its programs."""
    _run([sys.executable, "-m", "venv", folder], folder.parent)
    return folder / "bin"


def _pip(programs: Path, *wanted: str) -> None:
    _run([programs / "python", "-m", "pip", "install", "--quiet", *wanted], programs)


def _run(command: Sequence[str | Path], folder: Path, code: int = 0, num_lines: int = 0) -> str:
    """Runs a command that does not see the checkout, and returns its output.

    Args:
        command: Program and arguments.
        folder: Folder to run it in.
        code: Exit code that is expected of it.
        num_lines: Number of lines to print of the end of its output.
    """
    said = " ".join(map(str, command)).replace("\n", " ")
    say(f"$ {said[:160]}{'...' if len(said) > 160 else ''}")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        # Actors of a cluster that others have started would run in their environment.
        env={**kept, "RAY_ADDRESS": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines()[-num_lines:] if num_lines else ():
        say(f"  {line}")
    if done.returncode != code:
        sys.exit(f"exit code {done.returncode}, not {code}:\n{done.stdout}")
    return done.stdout


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
