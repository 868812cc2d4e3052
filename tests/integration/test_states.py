"""Weights go into sharded models whatever the widths of their slices; real ranks over gloo."""

from collections.abc import Mapping

import pytest
import torch
from forked_ranks import run_forked
from small_model import CPU, sharded_model
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel

from autoshard.integration import load_state, with_even_columns
from autoshard.workload import Placement, ShardingPlan, UserError

_WEIGHT = "bags.embedding_bags.b.weight"


def model_of(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=dim, feature_names=[name])
        for name, dim in (("a", 8), ("b", 24), ("c", 16))
    ]
    bags = EmbeddingBagCollection(tables=tables, device=CPU)
    return nn.ModuleDict({"bags": bags, "dense": nn.Linear(3, 3)})


def sharded(*b: tuple[int, int, int], even: bool = False) -> DistributedModelParallel:
    pieces = (Placement("bags.b", *each) for each in b)
    plan = ShardingPlan((Placement("bags.a", 0, 8, 1), *pieces, Placement("bags.c", 0, 16, 0)), 2)
    return sharded_model(model_of(1), with_even_columns(plan) if even else plan)


def check(target: nn.Module, source: nn.Module) -> None:
    for name, own in target.state_dict().items():
        wanted = source.state_dict()[name]
        if not hasattr(own, "local_shards"):
            assert torch.equal(own, wanted), name
            continue
        for shard in own.local_shards():
            start, width = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
            assert torch.equal(shard.tensor, wanted[:, start : start + width]), name


def refused(target: nn.Module, state: Mapping[str, object]) -> str:
    with pytest.raises(UserError) as error:
        load_state(target, state)
    return str(error.value)


def refusals() -> tuple[str, str, str, str]:
    """Returns the messages of this rank on states that do not fit, after those that do."""
    whole, uneven = model_of(2), sharded((0, 20, 0), (20, 4, 1))
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
    return (
        refused(uneven, {**state, _WEIGHT: state[_WEIGHT][:, :8]}),
        refused(uneven, {name: value for name, value in state.items() if name != _WEIGHT}),
        refused(uneven, {**state, "more": torch.zeros(1)}),
        refused(sharded((0, 4, 0), (4, 20, 1)), uneven.state_dict()),
    )


def test_weights_go_into_slices_of_any_width_and_by_torchrec_itself_into_even_ones() -> None:
    for narrow, missing, unknown, other in run_forked(2, refusals):
        assert "embedding_bags.b.weight is (20, 8) in the state and (20, 24) in the" in narrow
        assert "embedding_bags.b.weight is not in the state" in missing
        assert "weight more is not in the model" in unknown
        assert "is sharded by another plan" in other or "(20, 20) in the state and (20, 4)" in other
