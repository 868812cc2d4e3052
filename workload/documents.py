"""JSON documents that carry their schema, and one clear line when they are off."""

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
    """The name and version that a document must carry."""

    name: str
    version: int

    def stamp(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The document: the body under this schema."""
        return {"schema": self.name, "version": self.version, **body}

    def check(self, document: Any) -> None:
        """UserError unless the document is of this schema and version."""
        if not isinstance(document, Mapping) or document.get("schema") != self.name:
            raise UserError(f'is not a document of schema "{self.name}"')
        version = document.get("version")
        if version != self.version:
            raise UserError(
                f"has version {version} of {self.name}, this autoshard reads version "
                f"{self.version}: write it again with this one, or read it with the other"
            )


def read(path: Path | str) -> Any:
    """The JSON value in a file; UserError if there is none."""
    try:
        return parse(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from error


def parse(text: bytes) -> Any:
    """The JSON value that a file holds; UserError says where it is off."""
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError("is not a UTF-8 text file") from error
    except json.JSONDecodeError as error:
        raise UserError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error


def write(path: Path | str, document: Any) -> None:
    """Write a JSON file whole or not at all."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Put the file's name before what a UserError says."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


@contextmanager
def fields_of(what: str) -> Iterator[None]:
    """Turn a missing or wrongly typed field of a document into a UserError."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{what} has no field {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{what} has a field of the wrong kind: {error}") from error
