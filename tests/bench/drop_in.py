"""`AutoShardPlanner` beside TorchRec's planner: time of a plan, and its price."""

import logging
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim import RowWiseAdagrad

from autoshard.integration import AutoShardPlanner, from_torchrec
from autoshard.integration.models.names import lookups_of
from autoshard.workload import EmbeddingTable, load_tables
from bench.metric import Metric
from bench.workbench import say

_SIZES = ((26, 8), (100, 8), (100, 16), (500, 16))  # tables and ranks
_BATCH = 512  # of a rank
_GB = 2**30


def drop_in_metrics() -> list[Metric]:
    """Times plans of both for models of synthetic tables, on CPU ranks, and prices them."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    found = list[Metric]()
    _plans(load_tables("synthetic:10:1:full"), 2)  # loads what both need
    for count, ranks in _SIZES:
        say(f"plans for {count} tables on {ranks} ranks")
        ours_s, theirs_s, price = _plans(load_tables(f"synthetic:{count}:21:full"), ranks)
        what = f"{count} tables on {ranks} ranks"
        found += [
            Metric(f"plan() by AutoShardPlanner, {what}", "", ours_s, "s"),
            Metric(f"plan() over TorchRec's, {what}", "at most 0.5", ours_s / theirs_s),
            Metric(f"predicted step over TorchRec's planner, {what}", "at most 0.95", price),
        ]
    return found


def _plans(tables: tuple[EmbeddingTable, ...], ranks: int) -> tuple[float, float, float]:
    """Returns the seconds of our plan and of TorchRec's, and the ratio of their prices."""
    memory = int(4 * sum(table.rows * table.dim for table in tables) * 4 / ranks + 4 * _GB)
    topology = Topology(ranks, "cpu", ddr_cap=memory, created_by_factory=True)
    constraints = {table.name: lookups_of(table) for table in tables}
    known: dict[str, Any] = {
        "topology": topology, "batch_size": _BATCH, "constraints": constraints, "debug": False
    }  # fmt: skip
    ours = AutoShardPlanner(**known)
    seconds, made = [], []
    for planner in (ours, EmbeddingShardingPlanner(**known)):
        bags, sharders = _model(tables), get_default_sharders()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            made.append(planner.plan(bags, sharders))
            seconds.append(time.perf_counter() - began)
    assert ours.planning is not None
    assert ours.planning.context is not None
    assert ours.task is not None
    task, costs = replace(ours.task, rules=()), ours.planning.context.costs
    steps = [costs.step_ms(from_torchrec(plan, task), task) for plan in made]
    return seconds[0], seconds[1], steps[0] / steps[1]


def _model(tables: tuple[EmbeddingTable, ...]) -> nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[f"{table.name} {number}" for number in range(table.features)],
        )
        for table in tables
    ]
    made: nn.Module = EmbeddingBagCollection(configs, device=torch.device("meta"))
    _apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    return made
