"""Two machines on this one: network namespaces, joined by a link as slow as wanted.

A process in a namespace has its own network, host name and folder for temporary files, so that its
Ray node passes for another machine with all of this one's cores.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from commands import said_by

_PATIENCE = 120.0  # seconds
_BURST, _LATENCY = "32kb", "50ms"  # of the token bucket
_RAY = Path(sys.executable).parent / "ray"
_NODE = "--num-cpus 2 --object-store-memory 200000000 --disable-usage-stats"


@dataclass(frozen=True)
class Machine:
    """A namespace.

    Args:
        name: Its name, and its host name.
        address: Its address on the link.
        folder: Its folder for temporary files.
        end: Its end of the cable, as a network device.
    """

    name: str
    address: str
    folder: Path
    end: str

    def plug_in(self) -> None:
        """Connects the cable, with a route by which Ray finds the address of its own host."""
        _run("ip", "-n", self.name, "link", "set", self.end, "up")
        _run("ip", "-n", self.name, "route", "replace", "default", "dev", self.end)

    def unplug(self) -> None:
        """Cuts the cable, for both machines."""
        _run("ip", "-n", self.name, "link", "set", self.end, "down")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command that runs another one on this machine."""
        inside = f'hostname {self.name}; exec "$@"'
        return [*_IN_NAMESPACE, self.name, "unshare", "-u", "sh", "-c", inside, "sh", *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        """Returns the environment of commands there."""
        return {**os.environ, "TMPDIR": str(self.folder), **more}

    def run(self, arguments: Sequence[str], patience_s: float = _PATIENCE, **more: str) -> str:
        """Returns what a command says; an AssertionError with it if it fails."""
        env = self.environment(**more)
        return said_by(self.command(arguments), patience=patience_s, env=env)


_IN_NAMESPACE = ("ip", "netns", "exec")


def missing() -> str | None:
    """Returns why there can be no namespaces here; None if there can."""
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    try:
        with TemporaryDirectory() as folder, two_machines("probe", Path(folder), "1gbit"):
            return None
    except subprocess.CalledProcessError as fault:
        return f"network namespaces are not permitted: {fault.stderr.strip()}"


@contextmanager
def two_machines(
    prefix: str, folder: Path, rate: str | None = None
) -> Iterator[tuple[Machine, Machine]]:
    """Yields two machines that are joined by a cable.

    Args:
        prefix: Of their names; with this process's number, so that several tests have their own.
        folder: Folder for their temporary files.
        rate: Bits a second of the cable, such as `1gbit`; None for as fast as it goes.
    """
    net = f"10.{50 + os.getpid() % 200}.77"

    def machine(place: int, side: str) -> Machine:
        name, end = f"{prefix}-{os.getpid()}-{side}", f"v{os.getpid()}{side}"
        return Machine(name, f"{net}.{place}", folder / side, end)

    pair = first, second = machine(1, "a"), machine(2, "b")
    with ExitStack() as stack:
        for each in pair:
            _run("ip", "netns", "add", each.name)
            stack.callback(_delete, each.name)
        peer = ("peer", "name", second.end, "netns", second.name)
        _run("ip", "link", "add", first.end, "netns", first.name, "type", "veth", *peer)
        for each in pair:
            _run("ip", "-n", each.name, "addr", "add", f"{each.address}/24", "dev", each.end)
            _run("ip", "-n", each.name, "link", "set", "lo", "up")
            each.plug_in()
            if rate is not None:
                bucket = ("tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
                _run("tc", "-n", each.name, "qdisc", "add", "dev", each.end, "root", *bucket)
            each.folder.mkdir(exist_ok=True)
        yield pair


@contextmanager
def two_nodes(prefix: str, rate: str, port: int) -> Iterator[tuple[Machine, str]]:
    """Yields the first of two such machines with a Ray node each, and the address of Ray."""
    # Paths of Ray's sockets may have 107 characters.
    with TemporaryDirectory(prefix="as", dir="/tmp") as folder, ExitStack() as stack:
        first, second = stack.enter_context(two_machines(prefix, Path(folder), rate))
        address = f"{first.address}:{port}"
        of_head = f"--head --port {port} --include-dashboard=false"
        for machine, of_node in ((first, of_head), (second, f"--address {address}")):
            words = f"{of_node} --node-ip-address {machine.address} {_NODE}"
            machine.run([str(_RAY), "start", *words.split()], RAY_AUTH_MODE="disabled")
        yield first, address


def processes_on(name: str) -> list[int]:
    """Returns the numbers of all processes on a machine."""
    return [int(number) for number in _run("ip", "netns", "pids", name).split()]


def _delete(name: str) -> None:
    """Ends what runs on a machine, and the machine."""
    with suppress(subprocess.CalledProcessError):
        for process in processes_on(name):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _run("ip", "netns", "del", name)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
