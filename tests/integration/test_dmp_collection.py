"""Replica groups in TorchRec's DMPCollection: two copies on two ranks each learn as one model does.

DMPCollection is for GPUs only. What keeps it from CPUs are an assertion, the numbers that it gives
to devices, and an average that gloo has not: without these it trains here.
"""

import re
import types
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_forked
from small_model import CPU, TABLES, SmallModel, Training, plan_of
from torch import distributed, nn
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor
from torchrec.distributed import model_parallel

from autoshard.integration import replica_options, to_torchrec
from autoshard.integration.checkpoints.states import local_parts
from autoshard.workload import PlanError, ShardingPlan
from autoshard.workload.plans.replicas import ReplicaGroups

PAGE = (Path(__file__).parents[2] / "docs" / "torchrec.md").read_text()
(PAGE_CODE,) = [c for c in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "DMPCollection" in c]
RANKS, SIZE, STEPS = 4, 2, 12
PLAN = plan_of(
    SIZE, ("a", 0, 8, 1), ("b", 0, 8, 0), ("b", 8, 16, 1), ("c", 0, 16, 0, 2), copied="d"
)


def grouped(consecutive: bool, interval: int = 1) -> ShardingPlan:
    return replace(PLAN, replicas=ReplicaGroups(RANKS, SIZE, consecutive, interval))


def collection(model: nn.Module, plan: ShardingPlan) -> Any:
    """Returns a DMPCollection on CPUs, made by the code in docs/torchrec.md."""
    source, module = Path(model_parallel.__file__).read_text(), types.ModuleType("on_cpus")
    exec(compile(source, model_parallel.__file__, "exec", optimize=1), vars(module))

    class OnCpus(module.DMPCollection):  # type: ignore[misc,name-defined]
        def _remap_sharding_plan(self, plan: Any, **options: Any) -> None:
            super()._remap_sharding_plan(plan=plan, **options)
            for tables in plan.plan.values():
                for table in tables.values():
                    for shard in getattr(table.sharding_spec, "shards", ()):
                        shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    def average(tensors: Sequence[torch.Tensor]) -> None:
        holders = made._default_ctx.replica_pg
        for tensor in tensors:
            distributed.all_reduce(tensor, group=holders)
            tensor.div_(distributed.get_world_size(holders))

    names: dict[str, Any] = {}
    exec(PAGE_CODE, names)
    names["DMPCollection"] = partial(OnCpus, custom_all_reduce=average)
    made = names["sharded"](model, plan, CPU)
    return made


def parts_of(state: Any) -> dict[tuple[int, int], torch.Tensor]:
    """Returns the parts of a weight on this rank, by first row and column."""
    if isinstance(state, DTensor):
        return local_parts(state)
    return {(0, 0): state.reshape(len(state), -1)}


def learned(plan: ShardingPlan) -> tuple[Any, list[float], dict[str, Any], list[bool]]:
    """Returns layout, losses, parts of tables in the end, and after which steps copies agree."""
    training = Training(plan, "sgd", sharded=collection)
    model, groups, equal = training.model, plan.replicas, list[bool]()
    assert groups is not None

    def after(number: int) -> None:
        if (number + 1) % groups.sync_interval == 0:
            model.sync()
        worst = torch.zeros(())
        for state in model.state_dict().values():
            for part in parts_of(state).values():
                mean = part.clone()
                distributed.all_reduce(mean, group=model._default_ctx.replica_pg)
                worst = torch.maximum(worst, (part - mean / groups.count).abs().max())
        distributed.all_reduce(worst, distributed.ReduceOp.MAX)
        equal.append(worst.item() < 1e-6)

    losses = training.steps(range(STEPS), after)
    parts = {name: parts_of(state) for name, state in model.state_dict().items()}
    found = {n: {key: part.numpy() for key, part in held.items()} for n, held in parts.items()}
    return model.device_mesh.mesh.tolist(), losses, found, equal


def in_one_piece() -> tuple[list[float], dict[str, Any]]:
    """Returns the losses, and the weights in the end, of a model that is not sharded."""
    training = Training.__new__(Training)
    training.tables, training.model = TABLES, SmallModel(TABLES)
    training.dense = torch.optim.SGD(training.model.parameters(), lr=0.5)
    losses = training.steps(range(STEPS))
    return losses, {name: state.numpy() for name, state in training.model.state_dict().items()}


@pytest.mark.parametrize("consecutive", [False, True])
def test_two_copies_learn_what_one_model_learns(consecutive: bool) -> None:
    plan = grouped(consecutive)
    expected, weights = run_forked(1, in_one_piece)[0]
    for mesh, losses, parts, equal in run_forked(RANKS, learned, plan):
        assert plan.replicas is not None
        assert mesh == [list(plan.replicas.ranks(group)) for group in range(2)]
        assert losses == pytest.approx(expected, abs=1e-5)
        assert all(equal)
        for name, held in parts.items():
            whole = weights[name].reshape(len(weights[name]), -1)
            for (row, column), part in held.items():
                wanted = whole[row : row + len(part), column : column + part.shape[1]]
                assert part == pytest.approx(wanted, abs=1e-5)


def test_copies_agree_after_each_average() -> None:
    for *_, equal in run_forked(RANKS, learned, grouped(True, interval=3)):
        assert equal == [False, False, True] * (STEPS // 3)


def test_what_cannot_be_handed_out_is_told_in_one_line() -> None:
    model = SmallModel(TABLES)
    with pytest.raises(PlanError, match="for 2 replica groups of 2 ranks, and 8 ranks train: make"):
        to_torchrec(grouped(True), model, world_size=8, device_type="cpu")
    with pytest.raises(PlanError, match="no replica groups: train by DistributedModelParallel"):
        replica_options(PLAN)
