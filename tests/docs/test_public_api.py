"""What each package exports: names and signatures, held against `public_api.txt`.

A change of the interface shows there, in a diff. After a change that is meant to be, write the file
anew: `python tests/docs/test_public_api.py`.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_name("public_api.txt")
PACKAGES = ("workload", "benchmark", "cost_model", "envs", "sharders")


def public_api() -> str:
    """A line for each exported name, and for each method of an exported class."""
    lines = []
    for package in PACKAGES:
        module = importlib.import_module(f"autoshard.{package}")
        lines.append(f"autoshard.{package}")
        for name in sorted(module.__all__):
            lines += [f"  {line}" for line in described(name, getattr(module, name))]
    # Names alone: what they are is not known without TorchRec.
    theirs = importlib.import_module("autoshard.integration").__all__
    lines += ["autoshard.integration", *(f"  {name}" for name in sorted(theirs))]
    return "\n".join(lines) + "\n"


def described(name: str, found: Any) -> Iterator[str]:
    if not inspect.isclass(found):
        yield name + (signature(found) if callable(found) else "")
        return
    yield f"class {name}{signature(found)}"
    for member, value in sorted(vars(found).items()):
        if member.startswith("_"):
            continue
        method = getattr(value, "__func__", value)
        if inspect.isfunction(method):
            yield f"  {name}.{member}{signature(method)}"
        elif isinstance(method, property | cached_property):
            yield f"  {name}.{member}"


def signature(found: Any) -> str:
    """Names of parameters, and their defaults; types are for mypy."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:
        return ""  # some built-in classes have none
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(bare)))


def test_the_public_api_is_as_it_was_written_down() -> None:
    assert public_api() == SNAPSHOT.read_text(encoding="utf-8")


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api(), encoding="utf-8")
