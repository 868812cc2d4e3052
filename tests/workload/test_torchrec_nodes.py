"""Rows on all ranks and on those of a node: real ranks over gloo, as on two nodes of two."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("torchrec")

PROGRAM = """
import json
import torch
from torch import distributed
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import SGD, Adagrad
from autoshard.workload import Placement, ShardingPlan
from autoshard.workload.torchrec import from_torchrec, load_state, to_torchrec
from autoshard.workload import Device, EmbeddingTable, ShardingTask

SIZES = {"whole": (30, 8), "slices": (40, 16), "rows": (23, 12), "node": (31, 8), "grid": (50, 24)}
PLACED = (
    Placement("whole", 0, 8, 3),
    Placement("slices", 0, 12, 2), Placement("slices", 12, 4, 0),
    Placement("rows", 0, 12, 0, 4),
    Placement("node", 0, 8, 2, 2),
    Placement("grid", 0, 8, 2, 2), Placement("grid", 8, 16, 0, 2),
)
RANKS, SAMPLES, STEPS, LR = 4, 6, 20, 0.1
distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(5)
weights = {name: torch.randn(size) for name, size in SIZES.items()}
steps = [
    {name: torch.randint(rows, (RANKS, SAMPLES, 3)) for name, (rows, _) in SIZES.items()}
    for _ in range(STEPS)
]

def collection():
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=[n])
        for n, (rows, dim) in SIZES.items()
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))

def batch(step, ranks):
    ids = torch.cat([steps[step][name][ranks].flatten() for name in SIZES])
    lengths = torch.full((len(SIZES) * SAMPLES * len(ranks),), 3)
    return KeyedJaggedTensor(list(SIZES), ids, lengths=lengths)

def loss_of(pooled):
    return sum((pooled[name].sin() ** 2).mean() for name in SIZES)

def learned(optimizer, kwargs, sharded):
    model = collection()
    state = {f"embedding_bags.{name}.weight": weight for name, weight in weights.items()}
    model.load_state_dict(state)
    if sharded:
        fused = {torch.optim.SGD: SGD, torch.optim.Adagrad: Adagrad}[optimizer]
        _apply_optimizer_in_backward(fused, model.parameters(), dict(kwargs))
        plan = ShardingPlan(PLACED, RANKS)
        made = to_torchrec(plan, model)
        model = DistributedModelParallel(model, device=torch.device("cpu"), plan=made)
        load_state(model, state)
        found = tuple(EmbeddingTable(name, *size, 3.0) for name, size in SIZES.items())
        task = ShardingTask(found, Device.uniform(RANKS, 2**30), SAMPLES * RANKS)
        assert sorted(from_torchrec(model.plan, task).placements) == sorted(PLACED)
    else:
        own = optimizer(model.parameters(), **kwargs)
    losses = []
    for step in range(STEPS):
        ranks = [rank] if sharded else list(range(RANKS))
        if not sharded:
            own.zero_grad()
        loss = loss_of(model(batch(step, ranks)))
        loss.backward()
        if sharded:
            total = loss.detach().clone()
            distributed.all_reduce(total)
            losses.append(total.item() / RANKS)
        else:
            own.step()
            losses.append(loss.item())
    return losses, model

worst = {}
for name, optimizer, kwargs in (
    ("sgd", torch.optim.SGD, {"lr": LR}), ("adagrad", torch.optim.Adagrad, {"lr": LR, "eps": 1e-8})
):
    ours, model = learned(optimizer, kwargs, True)
    theirs, whole = learned(optimizer, kwargs, False)
    far = max(abs(a - b) for a, b in zip(ours, theirs))
    moved = 0.0
    for key, held in model.state_dict().items():
        for shard in held.local_shards():
            (row, column), (rows, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            wanted = whole.state_dict()[key][row : row + rows, column : column + width]
            before = weights[key.split(".")[1]][row : row + rows, column : column + width]
            far = max(far, (shard.tensor - wanted).abs().max().item())
            moved = max(moved, (wanted - before).abs().max().item())
    worst[name] = far, moved, ours[0] - ours[-1]
print(json.dumps(worst))
distributed.barrier()
distributed.destroy_process_group()
"""


def test_rows_of_nodes_and_grids_learn_what_the_model_in_one_piece_learns(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for output in run_ranks(tmp_path / "program.py", 4, of_node=2):
        for far, moved, gained in json.loads(output.splitlines()[-1]).values():
            assert far < 1e-5
            assert moved > 1e-3
            assert gained > 0
