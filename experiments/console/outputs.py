"""Whether results can be written where they are to go: asked before the work, not after it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from autoshard.workload import UserError

PICTURES = (".png", ".svg")


def check_file(path: Path | None, option: str, suffixes: Sequence[str] = ()) -> None:
    """UserError unless the option names a file that can be written, or none."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path}: is a folder: name a file for {option}")
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{path}: name a file that ends in {' or '.join(suffixes)} for {option}")
    _check_writable(path, path.parent)


def check_folder(path: Path | None, option: str) -> None:
    """UserError unless the option names a folder that is there or can be made, or none."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file: name a folder for {option}")
    _check_writable(path, path)


def _check_writable(path: Path, folder: Path) -> None:
    """Try it in the nearest folder that is there, and leave nothing behind."""
    where = folder.absolute()
    while not where.exists():
        where = where.parent
    try:
        tempfile.TemporaryFile(dir=where).close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
