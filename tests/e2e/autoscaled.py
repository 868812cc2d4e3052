"""A pool that wants GPUs on a cluster of its own that has none, but a real autoscaler.

The autoscaler's nodes are Ray processes on this machine whose GPUs are numbers: it can be seen that
they were asked for and came, and that an actor that finds no CUDA on them says so. Run by
`test_autoscaling`, since a process can be in one cluster only. Prints what it saw as JSON.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Read by the autoscaler when Ray starts it.
os.environ.update(
    AUTOSCALER_UPDATE_INTERVAL_S="1",
    RAY_FAKE_CLUSTER="1",
    RAY_OVERRIDE_NODE_ID_FOR_TESTING=f"{'f' * 51}00000",
)

import ray
from ray.cluster_utils import Cluster
from ray.experimental.internal_kv import _internal_kv_get

from autoshard.benchmark import BenchmarkPool, MeasureSettings, PoolError
from autoshard.workload import random_shards, synthetic_tables

MOST = 2


def main(folder: Path) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "autoscaling.json"
    config.write_text(json.dumps(autoscaling(f"{ray.util.get_node_ip_address()}:{port}")))
    head = {"num_cpus": 1, "gcs_server_port": port, "autoscaling_config": str(config)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        sys.stdout.write(json.dumps(watch(folder)))
        ray.shutdown()
    finally:
        session = cluster.head_node.get_session_dir_path()
        cluster.shutdown()
        end_nodes(session)


def watch(folder: Path) -> dict[str, object]:
    """Ask for shards: what the pool says, what was asked for, which GPUs came."""
    pool = BenchmarkPool(folder / "costs.db", kind="cuda", max_devices=MOST)
    before, said = gpus(), ""
    try:
        shards = random_shards(synthetic_tables(10, seed=0, profile="small"), 8, 4)
        pool.measure(shards, MeasureSettings(64))
    except PoolError as error:
        said = str(error)
    asked = wishes()
    wait_for(lambda: gpus() == MOST)
    came = gpus()
    pool.shutdown()
    wait_for(lambda: wishes() == [])
    return {"before": before, "said": said, "asked": asked, "came": came}


def autoscaling(address: str) -> dict[str, object]:
    nodes = {"node_config": {}, "min_workers": 0}
    lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands")
    commands = ("setup_commands", "start_ray_commands")
    return {
        "cluster_name": "autoscaled",
        "max_workers": 4,
        "provider": {"type": "fake_multinode", "gcs_address": address, "launch_multiple": True},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": {"CPU": 1, "GPU": 1}, "max_workers": 4, **nodes},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "setup_commands": [],
        **{name: [] for name in lists},
        **{f"{kind}_{name}": [] for kind in ("head", "worker") for name in commands},
    }


def gpus() -> float:
    return sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])


def wishes() -> list[dict[str, float]]:
    """What the autoscaler is asked for, as Ray keeps it."""
    return json.loads(_internal_kv_get("autoscaler_resource_request") or b"[]")


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)


def end_nodes(session: str) -> None:
    """The autoscaler leaves its nodes behind when it is ended itself."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended by itself
            if session.encode() in command.read_bytes():
                os.kill(int(command.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
