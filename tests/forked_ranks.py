"""Ranks that are forked from a process which has TorchRec: they start in a tenth of a second."""

import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
multiprocessing.util.get_temp_dir()  # before tests have a folder that is gone when it is cleaned
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(  # of libraries only: it knows no folder of tests
    ["pytest", "torch.distributed.optim", "torchrec", "torchrec.distributed"]
    + [f"autoshard.integration.checkpoints.{name}" for name in ("folders", "states")]
    + [f"autoshard.integration.plans.{name}" for name in ("conversion", "hot_cold")]
)


def run_forked(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    of_node: int | None = None,
    killed: int | None = None,
) -> list[Any]:
    """What a function returns on each rank of a process group over gloo; it is in a module.

    An AssertionError has what was said if one fails; the others are ended.

    `of_node`: Ranks of a node, by default all. `killed`: Rank that kills itself, by intention; then
    the others end, too, and nothing is returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = [_CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            _CONTEXT.Process(
                target=_rank,
                args=(rank, ranks, of_node or ranks, folder, results[rank][1], function, arguments),
            )
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            if killed is not None:
                processes[killed].join(PATIENCE_S)
                assert processes[killed].exitcode == -signal.SIGKILL
                for process in processes:
                    process.join(PATIENCE_S)
                return []
            found = dict[int, Any]()
            end = time.monotonic() + PATIENCE_S
            while len(found) < ranks:
                for rank, (receiver, _) in enumerate(results):
                    if rank not in found and receiver.poll(0.005):
                        failed, found[rank] = receiver.recv()
                        assert not failed, f"rank {rank}: {found[rank]}"
                assert time.monotonic() < end, f"only ranks {sorted(found)} have ended"
                dead = [n for n, each in enumerate(processes) if each.exitcode and n not in found]
                assert not dead, f"ranks {dead} are dead"
            return [found[rank] for rank in range(ranks)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    rank: int,
    ranks: int,
    of_node: int,
    folder: str,
    result: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    from torch import distributed

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank % of_node),
        LOCAL_WORLD_SIZE=str(of_node),
    )
    torch.set_num_threads(1)
    try:
        store = distributed.FileStore(str(Path(folder) / "store"), ranks)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE_S)
        )
        found = function(*arguments)
        distributed.barrier()
        result.send((False, found))
    except BaseException:
        result.send((True, traceback.format_exc()))
    os._exit(0)  # without the end of groups, for which a rank that failed would wait
