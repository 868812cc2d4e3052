"""Two network namespaces of this run's own, joined by a cable that can be cut."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.93.41.1", "10.93.41.2")
_NAMES = (f"chaos-{os.getpid()}-a", f"chaos-{os.getpid()}-b")
_ENDS = ("cable-a", "cable-b")


@contextmanager
def none() -> Iterator[bool]:
    """Provides the machine's own network."""
    yield False


@contextmanager
def two_namespaces() -> Iterator[bool]:
    """Provides two namespaces; yields whether they are permitted, which needs root."""
    made = os.geteuid() == 0 and _make()
    try:
        yield made
    finally:
        if made:
            _remove()


def inside(node: int) -> list[str]:
    """Returns the words before a command that is to run as a host in a node's namespace."""
    name = _NAMES[node]
    host = f'hostname {name}; exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", host, "sh"]


def cut() -> None:
    """Cuts the cable."""
    _ip(f"-n {_NAMES[0]} link set {_ENDS[0]} down")


def mend() -> None:
    """Mends the cable."""
    _ip(f"-n {_NAMES[0]} link set {_ENDS[0]} up")
    _add_routes()


def _make() -> bool:
    _remove()
    steps = [f"netns add {name}" for name in _NAMES]
    steps.append(
        f"link add {_ENDS[0]} netns {_NAMES[0]} type veth peer name {_ENDS[1]} netns {_NAMES[1]}"
    )
    for name, end, address in zip(_NAMES, _ENDS, ADDRESSES, strict=True):
        steps += [f"-n {name} addr add {address}/24 dev {end}"]
        steps += [f"-n {name} link set lo up", f"-n {name} link set {end} up"]
    return all(map(_ip, steps)) and _add_routes()


def _add_routes() -> bool:
    """Adds the routes by which Ray finds the address of its own host; they go with the cable."""
    routes = [f"-n {n} route replace default dev {e}" for n, e in zip(_NAMES, _ENDS, strict=True)]
    return all(map(_ip, routes))


def _remove() -> None:
    for name in _NAMES:
        _ip(f"netns del {name}")


def _ip(words: str) -> bool:
    return subprocess.run(["ip", *words.split()], capture_output=True, check=False).returncode == 0
