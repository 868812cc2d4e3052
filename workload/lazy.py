"""Lazy exports: a package loads a module when one of its names is used."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of a package.

    The package's `__init__.py` imports its exports under `if TYPE_CHECKING:`, for readers and type
    checkers. These two functions parse the same imports.
    """
    module = sys.modules[package]

    @cache
    def homes() -> dict[str, str]:
        assert module.__spec__ is not None
        source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]
        imports = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
        return {
            name.name: node.module
            for node in imports
            if node.module is not None and node.module.startswith(f"{package}.")
            for name in node.names
        }

    def load(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(homes()[name]), name)
        setattr(module, name, found)
        return found

    return load, lambda: sorted({*vars(module), *homes()})
