"""Kinds of devices: each is a `DeviceBackend` in a module of its own.

May be imported where neither torch nor Ray is loaded.
"""

from collections.abc import Iterable
from typing import Literal, get_args

from autoshard.benchmark.backends.base import DeviceBackend, Node, Place
from autoshard.benchmark.backends.cpu import CpuBackend
from autoshard.benchmark.backends.cuda import CudaBackend

__all__ = [
    "KINDS",
    "AskedKind",
    "DeviceBackend",
    "Place",
    "asked_backend",
    "backend_of",
    "best_backend",
    "fingerprint_here",
]

# auto: the first of _BACKENDS that the cluster has
AskedKind = Literal["auto", "cpu", "cuda"]
KINDS: tuple[str, ...] = get_args(AskedKind)
_BACKENDS: dict[str, type[DeviceBackend]] = {"cuda": CudaBackend, "cpu": CpuBackend}


def backend_of(kind: str) -> DeviceBackend:
    """Returns a new backend of this kind."""
    return _BACKENDS[kind]()


def asked_backend(kind: str) -> DeviceBackend | None:
    """Returns the backend that one of `KINDS` asks for; None for "auto"."""
    return backend_of(kind) if kind in _BACKENDS else None


def best_backend(nodes: Iterable[Node]) -> DeviceBackend:
    """Returns the backend that "auto" stands for on these nodes."""
    nodes = list(nodes)
    return next(found for kind in _BACKENDS if (found := backend_of(kind)).is_on(nodes))


def fingerprint_here(like: str) -> str:
    """Returns the fingerprint of this machine's device of the kind that `like` is of, else of
    its CPU.
    """
    asked = asked_backend(like.partition(":")[0])
    found = asked if asked is not None and asked.is_here() else CpuBackend()
    return found.fingerprint()
