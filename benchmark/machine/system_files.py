"""Reads small text files of Linux, any of which may be missing.

Their readers take the root of the file tree, so that tests can simulate any machine.
"""

import re
from pathlib import Path

ROOT = Path("/")


def read_text(path: Path) -> str:
    """Returns the stripped text of a file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Returns the whole number in a file; None if it is missing or holds something else."""
    text = read_text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def read_numbers(path: Path) -> dict[str, int]:
    """Returns the lines "name number" of a file as a dictionary; other lines do not count."""
    found = re.findall(r"^(\w+)\s+(\d+)$", read_text(path), re.MULTILINE)
    return {name: int(number) for name, number in found}


def read_bytes(path: Path, name: str) -> int | None:
    """Returns the bytes of the line "name: number kB" of a file; None without such a line."""
    found = re.search(rf"\b{name}:\s*(\d+) kB", read_text(path))
    return int(found[1]) * 1024 if found else None


def read_list(path: Path) -> frozenset[int]:
    """Returns the numbers of a file that holds a list; none if it is missing."""
    return parsed_list(read_text(path))


def parsed_list(text: str) -> frozenset[int]:
    """Returns the numbers of a list like "0-3,8"."""
    parts = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(n for first, last in parts for n in range(int(first), int(last or first) + 1))
