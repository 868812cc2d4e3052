"""Checks before the work that results can be written."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from autoshard.workload import UserError

PICTURES = (".png", ".svg")


def check_file(path: Path | None, option: str, suffixes: Sequence[str] = ()) -> None:
    """Raises UserError unless the option is None or a file that can be written."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path}: is a folder: name a file for {option}")
    if path.exists() and not path.is_file():  # root would replace it
        raise UserError(f"{path}: is a device: name a file for {option}")
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{path}: name a file that ends in {' or '.join(suffixes)} for {option}")
    _check_writable(path, path.parent)


def check_folder(path: Path | None, option: str) -> None:
    """Raises UserError unless the option is None or a folder that exists or can be created."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file: name a folder for {option}")
    _check_writable(path, path)


def _check_writable(path: Path, folder: Path) -> None:
    """Writes to the nearest folder that exists, and leaves nothing behind."""
    where = folder.absolute()
    while not where.exists():
        where = where.parent
    try:
        tempfile.TemporaryFile(dir=where).close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
