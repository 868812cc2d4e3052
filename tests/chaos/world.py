"""What a chaos run starts, and alone may kill: a Ray cluster, MLflow's server, the command."""

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
from namespaces import Machine, missing, two_machines
from ports import free_port

PATIENCE = 300.0  # seconds; for hangs alone
_DISK_MB = 192
_STARTS = 3  # tries to start a node
_EXPERIMENTS = Path(__file__).parents[2] / "experiments"
# Read by every Python of the cluster when it starts: a clock that only its own processes see.
_CLOCK = """
import mmap, os, struct, time
_file = open(os.environ["CHAOS_CLOCK"], "rb")
_jump, _time = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ), time.time
time.time = lambda: _time() + struct.unpack_from("d", _jump)[0]
time.time_ns = lambda: int(time.time() * 1e9)
"""


def wait_until(what: str, condition: Callable[[], object], patience: float = PATIENCE) -> None:
    """Returns as soon as the condition holds; TimeoutError if it never does."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience:.0f} s for {what}")
        time.sleep(0.1)


class World:
    """A head node, a second node, an MLflow server and one command, all started here.

    Args:
        folder: Folder for Ray, MLflow, temporary files; a short path, because sockets are in it.
        machines: Where the nodes are, joined by a cable; None if both are here.
    """

    def __init__(self, folder: Path, machines: tuple[Machine, Machine] | None) -> None:
        self.folder, self.work, self.machines = folder, folder / "work", machines
        self.work.mkdir()
        self.on_small_disk = _mount(self.work)
        self.store = self.work / "costs.db"
        self.command: subprocess.Popen[bytes] | None = None
        self.output, self.errors = folder / "stdout", folder / "stderr"
        self._seen: set[psutil.Process] = set()
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "clock").write_bytes(struct.pack("d", 0.0))
        (folder / "path").mkdir()
        (folder / "path" / "sitecustomize.py").write_text(_CLOCK)
        self._addresses = [each.address for each in machines or ()] or ["127.0.0.1"] * 2
        self._port, self._mlflow_port = free_port(), free_port()

    # --- servers --------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts MLflow's server and both nodes."""
        self.start_mlflow(wait=False)  # which takes about as long as the nodes
        self.start_head()
        self.start_node()
        self.wait_for_mlflow()

    def start_mlflow(self, wait: bool = True) -> None:
        """Starts MLflow's server, and waits until it answers."""
        backend = f"sqlite:///{self.folder}/mlflow.db"
        artifacts = str(self.folder / "artifacts")
        words = f"-m mlflow server --port {self._mlflow_port} --workers 1 --backend-store-uri"
        place = ["--artifacts-destination", artifacts]
        self._start("mlflow", [sys.executable, *words.split(), backend, *place], node=0)
        if wait:
            self.wait_for_mlflow()

    def wait_for_mlflow(self) -> None:
        """Waits until MLflow's server answers."""
        probe = f"import socket; socket.create_connection(('127.0.0.1', {self._mlflow_port}), 2)"
        words = self._placed([sys.executable, "-S", "-c", probe], 0)

        def answers() -> bool:
            self._alive("mlflow")
            return subprocess.run(words, capture_output=True, check=False).returncode == 0

        wait_until("MLflow's server", answers)

    def start_head(self) -> None:
        """Starts the head node, and waits until it answers."""
        options = f"--head --port {self._port} --temp-dir {self.folder}/r --include-dashboard=false"
        self._start_ray("head", options, 0)

    def start_node(self) -> None:
        """Starts the second node, and waits until it has joined."""
        self._start_ray("node", f"--address {self._addresses[0]}:{self._port}", 1)

    def _start_ray(self, name: str, options: str, node: int) -> None:
        ray = Path(sys.executable).with_name("ray")
        memory = "--object-store-memory 100000000 --disable-usage-stats --num-cpus"
        words = f"{ray} start --block {options} --node-ip-address {self._addresses[node]} {memory}"
        started = "Ray runtime started"
        for attempt in range(_STARTS):
            self._start(name, [*words.split(), str(2 - node)], node)
            try:
                wait_until(f"the {name}'s start", lambda: started in self._alive(name).read_text())
                break
            except RuntimeError:  # Ray gives its own processes 30 s, which a busy host exceeds
                if attempt + 1 == _STARTS:
                    raise
        self.processes()

    def _start(self, name: str, words: Sequence[str], node: int) -> None:
        with (self.folder / f"{name}.log").open("w") as log:
            self._servers[name] = subprocess.Popen(
                self._placed(words, node),
                cwd=self.folder,
                env=self._environment(node),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _alive(self, name: str) -> Path:
        """Returns the log of a server; RuntimeError if it has ended."""
        log = self.folder / f"{name}.log"
        if self._servers[name].poll() is not None:
            raise RuntimeError(f"{name} has ended: {log.read_text()[-2000:]}")
        return log

    def _placed(self, words: Sequence[str], node: int) -> list[str]:
        return list(words) if self.machines is None else self.machines[node].command(words)

    def _environment(self, node: int) -> dict[str, str]:
        temporary = self.folder / f"t{node}"  # with the locks on cores, which nodes have each
        temporary.mkdir(exist_ok=True)
        path = [str(self.folder / "path"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {
            "CHAOS_CLOCK": str(self.folder / "clock"),
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self._mlflow_port}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "PYTHONPATH": os.pathsep.join(path),
            "RAY_ADDRESS": f"{self._addresses[0]}:{self._port}",
            "RAY_AUTH_MODE": "disabled",  # no token is shared between two hosts
            "RAY_worker_niceness": "0",
            "TMPDIR": str(temporary if self.machines else self.folder / "t0"),
        }

    # --- the command ----------------------------------------------------------------------------

    def start_command(self, script: str, options: str) -> None:
        """Starts a command in the working folder."""
        (self.folder / "t0").mkdir(exist_ok=True)
        words = [sys.executable, str(_EXPERIMENTS / script), *options.split()]
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.command = subprocess.Popen(
                self._placed(words, 0),
                cwd=self.work,
                env=self._environment(0),
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def end_command(self) -> None:
        """Kills the command, with -9."""
        if self.command is not None:
            self.command.kill()
            self.command.wait()

    def set_clock(self, seconds: float) -> None:
        """Sets how far the clock of all processes is ahead."""
        with (self.folder / "clock").open("r+b") as file:
            file.write(struct.pack("d", seconds))

    # --- processes ------------------------------------------------------------------------------

    def processes(self, name: str | None = None) -> list[psutil.Process]:
        """Returns the living processes of a server, or of all and the command."""
        started = [*self._servers.values(), *filter(None, [self.command])]
        roots = started if name is None else [self._servers[name]]
        found: list[psutil.Process] = []
        for root in roots:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(root.pid)
                found += [parent, *parent.children(recursive=True)]
        self._seen.update(found)
        return found

    def actors(self, *classes: str) -> list[psutil.Process]:
        """Returns the living actors whose class has one of these names in its own."""
        titles = re.compile(f"ray::.*({'|'.join(classes)})")
        return [process for process in self.processes() if titles.match(_title(process))]

    def kill(self, name: str) -> None:
        """Kills a server and all that it started, with -9."""
        kill(self.processes(name))
        self._servers[name].wait()

    def close(self) -> None:
        """Kills what is left, and removes the folder."""
        self.processes()
        kill(list(self._seen))
        for process in [*self._servers.values(), *filter(None, [self.command])]:
            process.wait()
        if self.on_small_disk:
            subprocess.run(["umount", "--lazy", str(self.work)], check=False)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kills processes with -9, unless their numbers are those of others by now."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def world(apart: bool) -> Iterator[World]:
    """Provides a world, with two networks if this is wanted and permitted."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    permitted = apart and missing() is None
    with two_machines("chaos", folder) if permitted else nullcontext() as machines:
        made = World(folder, machines)
        try:
            made.start()
            yield made
        finally:
            made.close()
            shutil.rmtree(folder, ignore_errors=True)


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str((process.cmdline() or [""])[0])
    return ""


def _mount(folder: Path) -> bool:
    """Mounts a small disk there; returns whether that is permitted."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "chaos", str(folder)]
    return os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0
