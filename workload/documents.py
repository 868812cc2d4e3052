"""JSON documents with a schema and version, and their error messages."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.workload.errors import UserError


@dataclass(frozen=True)
class Schema:
    """The name and version that a document must carry.

    Args:
        name: Name.
        version: Version, of which alone documents are written and read.
    """

    name: str
    version: int

    def stamp(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the document: the body with schema and version."""
        return {"schema": self.name, "version": self.version, **body}

    def check(self, document: Any) -> None:
        """Raises UserError unless the document has this schema and version."""
        if not isinstance(document, Mapping) or document.get("schema") != self.name:
            raise UserError(f'is not a document of schema "{self.name}"')
        version = document.get("version")
        if version != self.version:
            raise UserError(
                f"has version {version} of {self.name}, this autoshard reads version "
                f"{self.version}: write it again with this one, or read it with the other"
            )


def read(path: Path | str) -> Any:
    """Reads the JSON value of a file; UserError if there is none."""
    try:
        return parse(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from error


def parse(text: bytes) -> Any:
    """Parses JSON; UserError names line and column of the fault."""
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError("is not a UTF-8 text file") from error
    except json.JSONDecodeError as error:
        raise UserError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits
        raise UserError("has numbers that are too long, or lists that are too deep") from error


def write(path: Path | str, document: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(document, indent=2) + "\n")


def write_text(path: Path | str, text: str, what: str = "") -> None:
    """Writes a UTF-8 text file atomically; UserError if that is not possible.

    Args:
        path: The file.
        text: The text.
        what: What an error calls it, as in `the report`.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        problem = f"{what} cannot be written".lstrip()
        raise UserError(f"{target}: {problem}: {error.strerror}") from error


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Prefixes the message of a UserError with the name of the file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


@contextmanager
def fields_of(what: str) -> Iterator[None]:
    """Raises a missing or wrongly typed field of a document as UserError."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{what} has no field {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{what} has a field of the wrong kind: {error}") from error
