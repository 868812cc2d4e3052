"""`ray up`, `ray submit` and `ray job submit` for real: machines on the loopback, by ssh.

The cluster file is the shipped one, filled in, with other ports. What it does is done: files are
copied, an environment is made and installed into, Ray is started on the head and, by the head, on
two workers, of which one is for measuring, as machines with GPUs are. Only the packages that we
depend on are those of the running environment.
"""

import json
import os
import re
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from getpass import getuser
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import mlflow
import pytest
import ray.train
import yaml
from commands import environment, said_by, wait_until
from mlflow.entities import Run
from ports import free_port
from programs import find_program
from ssh import Machines, end_processes, processes_of, ssh_server
from trainings import SWEPT, write_ray_train
from wheels import build_wheel

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.machine.hardware import physical_cores
from autoshard.experiments.tracking.runs import EXPERIMENT
from autoshard.sharders import load_policy

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "experiments" / "cluster" / "local.yaml"
SCRIPT = "experiments/ppo_shard.py"
HEAD, WORKER, MEASURING = "127.0.0.2", "127.0.0.3", "127.0.0.4"
# 127.0.0.1 Ray would take for another name of this host
CORES = len(physical_cores())
PATIENCE = 480.0  # seconds, for any one command; all of this takes an eighth of that when alone
TINY = (
    "--tables synthetic:80:1:small --num-tables 6 --num-devices 2 --num-envs 8 --check-tasks 2 "
    "--check-every 2 --batch-size 256 --memory-fill 0.1-0.6 --reward estimated"
)


@dataclass(frozen=True)
class RunningCluster:
    """Where it is described, where its head's home is, where it logs, who may use it."""

    file: Path
    home: Path
    tracking_uri: str
    dashboard_port: int
    metrics_port: int
    environment: dict[str, str]

    def ray(self, *arguments: str, folder: Path = ROOT, code: int = 0) -> str:
        """What a command of Ray's says, typed in that folder."""
        return said_by(ray_command(*arguments), folder, code, PATIENCE, self.environment)

    def bring_up(self) -> None:
        """`ray up`; once more, as its user would, where Ray was too slow for its own patience."""
        up = ("up", "--yes", str(self.file))
        try:
            self.ray(*up)
        except AssertionError as fault:
            sys.stderr.write(f"{fault}\n")
            self.ray(*up)

    def submit(self, *arguments: str, code: int = 0) -> str:
        """`ray submit CLUSTER experiments/ppo_shard.py -- ARGUMENTS`."""
        return self.ray("submit", str(self.file), SCRIPT, "--", *arguments, code=code)

    def run_in_mlflow(self, out: Path) -> Run:
        """The one run that trained in a folder of the head."""
        mlflow.set_tracking_uri(self.tracking_uri)
        (found,) = mlflow.search_runs(
            experiment_names=[EXPERIMENT],
            filter_string=f"tags.out = '{out}'",
            output_format="list",
        )
        assert isinstance(found, Run)
        return found


def ray_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


def filled_in(
    machines: Machines, tracking_uri: str, dashboard_port: int, metrics_port: int
) -> dict[str, Any]:
    """The shipped file, filled in, with ports of our own and our way of ending Ray."""
    cluster: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    cluster["cluster_name"] = f"autoshard-test-{os.getpid()}"
    cluster["provider"].update(head_ip=HEAD, worker_ips=[WORKER, MEASURING])
    cluster["auth"].update(ssh_user=getuser(), ssh_private_key=str(machines.key))
    cluster["setup_commands"] = [
        # All that pyproject.toml asks for is there (see `furnish`); nothing is fetched.
        command.replace("pip install", "pip install --no-index --no-build-isolation").replace(
            "http://MLFLOW_ADDRESS:5000", tracking_uri
        )
        for command in cluster["setup_commands"]
    ]
    port = str(free_port())
    # One machine has to do for three, and others run Ray on it too.
    own = (
        "--node-ip-address=$ADDRESS --num-cpus=2 --temp-dir=$HOME/tmp/ray "
        "--dashboard-agent-listen-port=$AGENT_PORT"
    )
    for kind in ("head", "worker"):
        commands = cluster[f"{kind}_start_ray_commands"]
        assert any("ray start" in command for command in commands)
        cluster[f"{kind}_start_ray_commands"] = [
            command.replace("6379", port)
            .replace("ray start", f"ray start {own}")
            .replace("/dev/nvidia0", "$HOME/for_measuring")
            for command in commands
        ]
    cluster["head_start_ray_commands"][-1] += (
        f" --dashboard-port={dashboard_port} --ray-client-server-port={free_port()}"
        f" --metrics-export-port={metrics_port}"
    )
    return cluster


def furnish(machines: Machines) -> None:
    """Programs on PATH of every machine, and the packages that we depend on."""
    machines.program("python3.11", f'exec "{sys._base_executable}" "$@"')  # type: ignore[attr-defined]
    ours = Path(__file__).with_name("ssh.py")
    machines.program(
        "ray",
        f'if [ "$1" = stop ]; then exec "{sys.executable}" "{ours}"; fi\n'
        'exec python -m ray.scripts.scripts "$@"',
    )
    # Not our own packages: an editable install is not found through PYTHONPATH.
    line = f'export PATH="{machines.bin}:$PATH" PYTHONPATH="{site.getsitepackages()[0]}"'
    for address, home in machines.homes.items():
        own = f"ADDRESS={address} AGENT_PORT={free_port()}"
        (home / ".bashrc").write_text(f"{line} {own}\n")
    (machines.homes[MEASURING] / "for_measuring").touch()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningCluster]:
    """A head and two workers, brought up by `ray up`."""
    sshd = find_program("sshd", "openssh-server", "/usr/sbin")
    for name, package in (("ssh", "openssh-client"), ("rsync", "rsync")):
        find_program(name, package)
    with ExitStack() as stack:
        # A short path: sockets of Ray lie in it.
        folder = Path(tempfile.mkdtemp(prefix="autoshard-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        machines = Machines(folder, (HEAD, WORKER, MEASURING))
        port = free_port()
        stack.enter_context(ssh_server(sshd, machines, port))
        wait_until("sshd", lambda: answers(port))
        furnish(machines)
        tracking_uri = f"sqlite:///{folder}/mlflow.db"
        ports = free_port(), free_port()
        description = filled_in(machines, tracking_uri, *ports)
        file = folder / "local.yaml"
        file.write_text(yaml.safe_dump(description))
        client = folder / "client"  # where Ray remembers what is up
        client.mkdir()
        stack.callback(forget_connections, description["cluster_name"])
        stack.callback(end_processes, client)
        ours = {
            "PATH": f"{machines.bin}:{os.environ['PATH']}",
            "RAY_TMPDIR": str(client),
            "TMPDIR": str(client),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        known = {k: v for k, v in environment().items() if k != "RAY_ADDRESS"}
        cluster = RunningCluster(
            file, machines.homes[HEAD], tracking_uri, *ports, {**known, **ours}
        )
        cluster.bring_up()
        yield cluster


def answers(port: int, host: str = HEAD) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def forget_connections(cluster_name: str) -> None:
    """Remove the folder in which Ray keeps its ssh connections to a cluster."""
    user, cluster = (sha256(name.encode()).hexdigest()[:10] for name in (getuser(), cluster_name))
    shutil.rmtree(f"/tmp/ray_ssh_{user}/{cluster}", ignore_errors=True)


def check_trained(running: RunningCluster, out: Path, iterations: int, folder: Path) -> None:
    """MLflow has all of the run that trained there, and the policy in it can be used."""
    run = running.run_in_mlflow(out)
    assert run.info.status == "FINISHED"
    client = mlflow.MlflowClient()
    curve = client.get_metric_history(run.info.run_id, "episodes/step_over_bound")
    assert {point.step for point in curve} == set(range(1, iterations + 1))
    assert "git_commit" not in run.data.tags  # it was the copy on the head that ran
    kept = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"plans", "policy", "checkpoint"} <= kept
    policy = client.download_artifacts(run.info.run_id, "policy", str(folder))
    assert load_policy(Path(policy)).trained["tables"] == "synthetic:80:1:small"


def test_submitted_scripts_train_and_log_to_mlflow(running: RunningCluster, tmp_path: Path) -> None:
    running.submit(*TINY.split(), "--iterations", "1")
    # As after a loss. The settings are the run's own, its folder is in the head's home.
    said = running.submit("--resume", "--iterations", "2")
    assert "resuming after iteration 1" in said
    out = running.home / "runs" / "autoshard"
    check_trained(running, out, 2, tmp_path)
    assert (running.home / "ppo_shard.py").exists()  # only the script was copied
    assert not (running.home / "experiments").exists()
    running.ray("rsync-up", str(running.file), "README.md", "~/tables.csv")
    assert (running.home / "tables.csv").read_text() == (ROOT / "README.md").read_text()
    running.ray("rsync-down", str(running.file), "~/runs/autoshard/", str(tmp_path / "run"))
    assert load_policy(tmp_path / "run").trained["tables"] == "synthetic:80:1:small"


def test_a_fault_is_one_line_and_an_exit_code(running: RunningCluster) -> None:
    said = running.submit("--iterations", "0", code=1)
    assert "\n--iterations must be at least 1" in said
    assert "Traceback" not in said


@pytest.fixture
def job_server(running: RunningCluster) -> Iterator[str]:
    """The head's, through ssh: `ray dashboard CLUSTER` in another terminal."""
    port = free_port()
    ports = ["--port", str(port), "--remote-port", str(running.dashboard_port)]
    forwarding = subprocess.Popen(
        ray_command("dashboard", str(running.file), *ports),
        env=running.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until("the dashboard", lambda: answers(port, "127.0.0.1"))
    yield f"http://localhost:{port}"
    forwarding.terminate()
    forwarding.wait(20)


def test_the_head_starts_ray_on_the_workers(running: RunningCluster) -> None:
    def all_three() -> bool:
        return "3 local.cluster.node" in running.ray("exec", str(running.file), "ray status")

    wait_until("the workers", all_three)


def test_a_job_that_is_stopped_loses_nothing(
    running: RunningCluster, job_server: str, tmp_path: Path
) -> None:
    out, shared = running.home / "job", tmp_path / "shared"
    where = ["--out", str(out), "--storage", str(shared)]

    def job(command: str, *words: str, folder: Path = ROOT) -> str:
        return running.ray("job", command, "--address", job_server, *words, folder=folder)

    # From a folder that holds the script alone: it runs with what is installed on the nodes.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(ROOT / SCRIPT, elsewhere)
    measured = TINY.replace("--reward estimated", "--reward mixed --measured-share 0.3")
    patient = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}})  # others use the cores
    given = ["--submission-id", "stopped", "--no-wait", "--runtime-env-json", patient]
    given += ["--working-dir", ".", "--", "python"]
    options = [*measured.split(), "--iterations", "1000", *where]
    job("submit", *given, "ppo_shard.py", *options, folder=elsewhere)
    wait_until("iterations", lambda: re.search(r"\n +3/1000", job("logs", "stopped")))
    job("stop", "stopped")
    assert "was stopped" in job("status", "stopped")
    said = job("logs", "stopped")
    assert "interrupted" in said
    assert "Traceback" not in said
    done, copied = iteration(out), iteration(shared / "job")
    assert done >= int(
        re.findall(r"\n +(\d+)/1000", said)[-1]
    )  # every iteration in the log is saved
    assert done - copied <= 2  # it was checked, and then copied, every two
    assert running.run_in_mlflow(out).info.status == "KILLED"
    assert measurements(running) == stored(out) > 0

    shutil.rmtree(out)  # as if the head had been lost
    # From the repository, which is uploaded.
    again = ["--working-dir", ".", "--", "python", SCRIPT, "--resume", *where]
    said = job("submit", *again, "--iterations", str(done + 1))
    assert f"resuming after iteration {copied}" in said
    check_trained(running, out, done + 1, tmp_path)
    assert stored(out) > 0
    said = job("list")
    assert "STOPPED" in said
    assert "SUCCEEDED" in said
    assert "FAILED" not in said


def iteration(run: Path) -> int:
    """After which a run would go on."""
    checkpoint: str = json.loads((run / "training.json").read_text())["checkpoint"]
    return int(checkpoint.removeprefix("checkpoint-"))


def stored(folder: Path) -> int:
    """How many shards are in the measurements there."""
    with MeasurementStore(folder / "costs.db") as store:
        return len(store)


def measurements(running: RunningCluster) -> int:
    """How many shards the pool has measured, by what Prometheus gets of the head, once it rests."""

    def metrics() -> dict[str, float]:
        url = f"http://{HEAD}:{running.metrics_port}/metrics"
        text = build_opener(ProxyHandler({})).open(url, timeout=60).read().decode()
        line = r'^ray_autoshard_pool_(\w+)\{.*WorkerId="(\w+)".*pool="benchmark-pool"\} (.*)$'
        found = re.findall(line, text, re.MULTILINE)
        # Of pools that have ended, counters are left.
        now = [worker for name, worker, _ in found if name == "devices"]
        return {name: float(value) for name, worker, value in found if worker in now}

    def rests() -> object:
        said = running.ray("exec", str(running.file), "python -m autoshard.experiments.pool show")
        measured = metrics().get("shards_measured_total", 0)
        return measured and f"{measured:.0f} shards measured, 0 failed" in said

    wait_until("metrics of all that the pool has measured", rests)
    last = metrics()
    assert (last["devices"], last["devices_busy"], last["shards_waiting"]) == (CORES, 0, 0)
    assert 0 <= last["duty"] <= 1
    return int(last["shards_measured_total"])


# All in one job, with the code of a wheel.
EVERYTHING = """
set -e
python -c 'import importlib.util; print(importlib.util.find_spec("autoshard").origin)'
python -m autoshard collect-costs --tables synthetic:80:1:small --num-shards 12 --devices cpu \\
    --store "$1/costs.db"
python -m autoshard tune-shard {SWEPT} --num-samples 2 --max-iterations 2 --reward mixed \\
    --measured-share 0.3 --storage "$1/sweep" --json "$1/sweep.json"
job=$PWD
cd "$1" && python "$job/train_with_ray.py" 3
"""


def test_one_job_measures_sweeps_and_trains_with_a_wheel(
    running: RunningCluster, job_server: str, tmp_path: Path
) -> None:
    running.ray("exec", str(running.file), "python -m autoshard.experiments.pool stop")
    code, work, shared = (tmp_path / name for name in ("code", "work", "shared"))
    for folder in (code, work, shared):
        folder.mkdir()
    zipfile.ZipFile(build_wheel(code)).extractall(code / "wheel")
    write_ray_train(work)
    (work / "everything.sh").write_text(EVERYTHING.replace("{SWEPT}", SWEPT))
    modules = json.dumps({"py_modules": [str(code / "wheel" / "autoshard")]})
    given = ["--working-dir", ".", "--runtime-env-json", modules, "--submission-id", "everything"]
    script = ["sh", "everything.sh", str(shared)]
    job = ["job", "submit", "--address", job_server, *given, "--", *script]
    said = running.ray(*job, folder=work)
    assert "Job 'everything' succeeded" in said
    assert re.search(r"/py_modules_files/.*/autoshard/__init__\.py", said)
    assert stored(shared) >= 12
    sweep = json.loads((shared / "sweep.json").read_text())
    assert [(each["status"], each["iterations"]) for each in sweep["trials"]] == [
        ("finished", 2)
    ] * 2
    assert load_policy(shared / "sweep" / "winner").trained["iterations"] >= 0
    measured = measurements(running)
    assert measured == stored(shared) + stored(shared / "sweep") > 12
    table = ray.train.Result.from_path(shared / "run").metrics_dataframe
    assert [*zip(table["step"], table["ranks"], strict=True)] == [(step, 4) for step in range(3)]


def test_ray_down_ends_the_head(running: RunningCluster) -> None:
    assert processes_of(running.home / "tmp")
    running.ray("down", "--yes", str(running.file))
    wait_until("the head's end", lambda: not processes_of(running.home / "tmp"))
