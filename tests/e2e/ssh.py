"""Machines for tests: addresses of the loopback, each with a home folder, reached by real ssh.

An sshd of the test's own, with its own keys and its own port, runs as the user who runs the tests
and gives each address a HOME and a temporary folder for Ray, so that nothing is read or left in
the real ones. `RAY_TMPDIR` is what all processes of a machine have in common and nobody else has:
it tells which ones are the machine's.

Run as a program it is what `ray stop` is on these machines: Ray's own would end all processes of
Ray that this user has, those of other clusters too.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = "RAY_TMPDIR"
_PATIENCE = 60.0  # seconds

_SERVER = """\
Port {port}
{listen}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PrintMotd no
PrintLastLog no
MaxSessions 50
"""

# A session would start in the home folder that the system knows, whatever HOME says.
_MACHINE = """\
Match LocalAddress {address}
    SetEnv HOME={home} RAY_TMPDIR={home}/tmp RAY_USAGE_STATS_ENABLED=0
    ForceCommand cd "$HOME" && eval "$SSH_ORIGINAL_COMMAND"
"""

# ssh takes ~ for the home folder that the system knows, and so does Ray's autoscaler name its key.
_CLIENT = """\
for word; do
    [ "$before" = -i ] && word=${{word/#\\~/$HOME}}
    before=$word
    words+=("$word")
done
exec /usr/bin/ssh -F none -p {port} "${{words[@]}}"
"""


class Machines:
    """Reached by whoever has `bin` on PATH: the `ssh` in there knows port and keys."""

    def __init__(self, folder: Path, addresses: Sequence[str]) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.key = folder / "client_key"
        # Short names: a socket's path, which Ray makes long, may have 107 characters.
        self.homes = {address: folder / f"m{i}" for i, address in enumerate(addresses)}

    def make(self, port: int) -> None:
        """Homes, keys, programs, and the server's configuration."""
        self.bin.mkdir()
        for home in self.homes.values():
            (home / "tmp").mkdir(parents=True)
        for key in ("host_key", "client_key"):
            path = self.folder / key
            make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
            subprocess.run(make_key, check=True)
        self.program("ssh", _CLIENT.format(port=port))
        listen = "\n".join(f"ListenAddress {address}" for address in self.homes)
        text = _SERVER.format(port=port, listen=listen, folder=self.folder)
        text += "".join(_MACHINE.format(address=a, home=home) for a, home in self.homes.items())
        (self.folder / "sshd_config").write_text(text)

    def program(self, name: str, script: str) -> None:
        """A shell script in `bin`."""
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def end_processes(self) -> None:
        """End all processes of all machines."""
        for home in self.homes.values():
            end_processes(home / "tmp")


@contextmanager
def ssh_server(sshd: Path, machines: Machines, port: int) -> Iterator[None]:
    """The machines, reachable; at the end, whatever still runs on them is ended."""
    machines.make(port)
    if os.geteuid() == 0:
        # Where sshd, run by root, locks itself in; the system's own server makes it when it starts.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    log = machines.folder / "sshd.log"
    with log.open("w") as output:
        config = str(machines.folder / "sshd_config")
        server = subprocess.Popen([sshd, "-D", "-e", "-f", config], stderr=output)
    try:
        yield
    finally:
        machines.end_processes()
        server.terminate()
        server.wait(20)


def end_processes(ray_folder: Path) -> None:
    """End the processes whose RAY_TMPDIR is that folder, except us and those that started us."""
    deadline = time.monotonic() + _PATIENCE
    while victims := processes_of(ray_folder):
        assert time.monotonic() < deadline, f"processes that do not end: {victims}"
        for process in victims:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def processes_of(ray_folder: Path) -> set[int]:
    """The processes whose RAY_TMPDIR is that folder, except us and those that started us."""
    mark = f"{_MARK}={ray_folder}".encode()
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found - set(_ourselves())


def _ourselves() -> Iterator[int]:
    process = os.getpid()
    while process:
        yield process
        status = Path(f"/proc/{process}/status").read_text()
        process = int(status.split("PPid:")[1].split()[0])


if __name__ == "__main__":
    own = Path(os.environ[_MARK])
    end_processes(own)
    (own / "ray" / "ray_current_cluster").unlink(missing_ok=True)  # as Ray's own does
