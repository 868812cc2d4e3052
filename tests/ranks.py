"""Several processes that train together, as torchrun starts them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

PATIENCE = 480.0  # seconds


def run_ranks(script: Path, world_size: int, of_node: int | None = None) -> list[str]:
    """What each rank prints; an AssertionError with all that was said if one fails.

    `of_node`: Ranks of a node, by default all; TorchRec takes the nodes from the environment.
    """
    of_node = of_node or world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            cwd=script.parent,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % of_node),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(of_node),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), said
    return [output for output, _ in said]
