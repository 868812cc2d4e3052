"""Real servers for tests: MLflow, PostgreSQL, a browser. Each ends with its `with` block."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from commands import environment, wait_until
from ports import free_port
from programs import find_program
from selenium import webdriver

PATIENCE = 240.0  # seconds; starting MLflow's server takes 5 to 15 of them on two busy cores


@contextmanager
def mlflow_server(log: Path, *options: str, command: str = "server") -> Iterator[str]:
    """`mlflow server` or `mlflow ui` with these options; its URL once it answers.

    Without MLflow's job runner, which starts seven processes for what nobody asks of it here.
    """
    port = free_port()
    words = [sys.executable, "-m", "mlflow", command, "--port", str(port), "--workers", "2"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*words, *options],
            env={**environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=output,
            stderr=output,
            start_new_session=True,  # it starts workers: all of them are one process group
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, log.read_text()
        try:
            with build_opener(ProxyHandler({})).open(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    try:
        wait_until(f"mlflow {command}, which says in {log} what it does", answers)
        yield url
    finally:
        _end_group(server)


def _end_group(server: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, politely at first."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)
        os.killpg(server.pid, signal.SIGKILL)  # whoever of the group is still there
    server.wait()


@contextmanager
def postgres_server() -> Iterator[str]:
    """A PostgreSQL of this test's own; the URI of its database.

    It refuses to run as root; then it runs as the user `postgres` that Debian's package makes.
    """
    programs = find_program("initdb", "postgresql", "/usr/lib/postgresql/*/bin").parent
    # Not in pytest's folders: those are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="autoshard-postgres-"))
    as_user: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]

    def run(name: str, *options: str) -> None:
        # What it starts would keep a pipe open for ever: output goes to a file.
        with (folder.parent / f"{folder.name}.log").open("a") as log:
            done = subprocess.run(
                [*as_user, str(programs / name), "-D", str(folder / "data"), *options],
                stdout=log,
                stderr=log,
                cwd="/",
                timeout=PATIENCE,
                check=False,
            )
        assert done.returncode == 0, Path(log.name).read_text()

    port = free_port()
    # Neither durable nor secret: it lives for one test, and listens on the loopback only.
    settings = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder} -c fsync=off"
    try:
        run("initdb", "--username", "autoshard", "--auth", "trust", "--no-sync", "-E", "UTF8")
        run("pg_ctl", "start", "--wait", "-l", str(folder / "server.log"), "-o", settings)
        try:
            yield f"postgresql://autoshard@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "stop", "--wait", "-m", "fast")
    finally:
        shutil.rmtree(folder)
        (folder.parent / f"{folder.name}.log").unlink(missing_ok=True)


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """Headless Chromium with pages of 1600 x 1000; it keeps what they write to its console."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(find_program("chromium", "chromium"))
    service = webdriver.ChromeService(str(find_program("chromedriver", "chromium-driver")))
    for flag in ("--headless=new", "--disable-gpu"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with it
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, service)
    try:
        # A window's size would count a title bar and tabs that nobody sees.
        page = {"width": 1600, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", page)
        yield driver
    finally:
        driver.quit()
