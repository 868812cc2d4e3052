"""Weights go into sharded models whatever the widths of their slices; real ranks over gloo."""

from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("torchrec")

PROGRAM = """
import copy
import torch
from torch import distributed, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from autoshard.workload import Placement, ShardingPlan, UserError
from autoshard.workload.torchrec import load_state, to_torchrec, with_even_columns

distributed.init_process_group("gloo")
rank = distributed.get_rank()

def model(seed):
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=dim, feature_names=[name])
        for name, dim in (("a", 8), ("b", 24), ("c", 16))
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    return nn.ModuleDict({"bags": bags, "dense": nn.Linear(3, 3)})

def sharded(*b, even=False):
    pieces = (Placement("bags.b", *each) for each in b)
    plan = ShardingPlan((Placement("bags.a", 0, 8, 1), *pieces, Placement("bags.c", 0, 16, 0)), 2)
    plan = with_even_columns(plan) if even else plan
    return DistributedModelParallel(
        model(1), device=torch.device("cpu"), plan=to_torchrec(plan, model(1), device_type="cpu")
    )

def check(target, source):
    for name, own in target.state_dict().items():
        wanted = source.state_dict()[name]
        if not hasattr(own, "local_shards"):
            assert torch.equal(own, wanted), name
            continue
        for shard in own.local_shards():
            start, width = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
            assert torch.equal(shard.tensor, wanted[:, start : start + width]), name

def refused(target, state):
    try:
        load_state(target, state)
    except UserError as error:
        return str(error)

whole, uneven = model(2), sharded((0, 20, 0), (20, 4, 1))
load_state(uneven, whole.state_dict())
check(uneven, whole)
again = sharded((0, 20, 0), (20, 4, 1))
load_state(again, uneven.state_dict())
check(again, whole)
evens = [sharded((0, 20, 0), (20, 4, 1), even=True) for _ in range(2)]
load_state(evens[0], whole.state_dict())
evens[1].load_state_dict(evens[0].state_dict())  # TorchRec's own
check(evens[1], whole)
state = whole.state_dict()
weight = "bags.embedding_bags.b.weight"
print(refused(uneven, {**state, weight: state[weight][:, :8]}))
print(refused(uneven, {name: value for name, value in state.items() if name != weight}))
print(refused(uneven, {**state, "more": torch.zeros(1)}))
print(refused(sharded((0, 4, 0), (4, 20, 1)), uneven.state_dict()))
distributed.barrier()
distributed.destroy_process_group()
"""


def test_weights_go_into_slices_of_any_width_and_by_torchrec_itself_into_even_ones(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for output in run_ranks(tmp_path / "program.py", 2):
        narrow, missing, unknown, other = output.splitlines()
        assert "embedding_bags.b.weight is (20, 8) in the state and (20, 24) in the" in narrow
        assert "embedding_bags.b.weight is not in the state" in missing
        assert "weight more is not in the model" in unknown
        assert "is sharded by another plan" in other or "(20, 20) in the state and (20, 4)" in other
