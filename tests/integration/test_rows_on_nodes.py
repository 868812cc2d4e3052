"""Rows on all ranks and on those of a node: real ranks over gloo, as on two nodes of two."""

import torch
from forked_ranks import run_forked
from small_model import CPU, sharded_model
from torch import distributed, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.optim import SGD, Adagrad

from autoshard.integration import from_torchrec, load_state
from autoshard.workload import Device, EmbeddingTable, Placement, ShardingPlan, ShardingTask

SIZES = {"whole": (30, 8), "slices": (40, 16), "rows": (23, 12), "node": (31, 8), "grid": (50, 24)}
PLACED = (
    Placement("whole", 0, 8, 3),
    Placement("slices", 0, 12, 2), Placement("slices", 12, 4, 0),
    Placement("rows", 0, 12, 0, 4),
    Placement("node", 0, 8, 2, 2),
    Placement("grid", 0, 8, 2, 2), Placement("grid", 8, 16, 0, 2),
)  # fmt: skip
RANKS, SAMPLES, STEPS, LR = 4, 6, 20, 0.1
OPTIMIZERS = {
    "sgd": (SGD, torch.optim.SGD, {"lr": LR}),
    "adagrad": (Adagrad, torch.optim.Adagrad, {"lr": LR, "eps": 1e-8}),
}


class Learning:
    """The same weights and batches for the sharded model and for the unsharded one."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.weights = {name: torch.randn(size) for name, size in SIZES.items()}
        self._steps = [
            {name: torch.randint(rows, (RANKS, SAMPLES, 3)) for name, (rows, _) in SIZES.items()}
            for _ in range(STEPS)
        ]

    def model(self) -> EmbeddingBagCollection:
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=[n])
            for n, (rows, dim) in SIZES.items()
        ]
        made = EmbeddingBagCollection(tables=tables, device=CPU)
        made.load_state_dict(self.state)
        return made

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {f"embedding_bags.{name}.weight": weight for name, weight in self.weights.items()}

    def loss(self, model: nn.Module, step: int, ranks: list[int]) -> torch.Tensor:
        ids = torch.cat([self._steps[step][name][ranks].flatten() for name in SIZES])
        lengths = torch.full((len(SIZES) * SAMPLES * len(ranks),), 3)
        pooled: KeyedTensor = model(KeyedJaggedTensor(list(SIZES), ids, lengths=lengths))
        return torch.stack([(pooled[name].sin() ** 2).mean() for name in SIZES]).sum()

    def in_pieces(self, optimizer: str) -> tuple[list[float], nn.Module]:
        fused, _, options = OPTIMIZERS[optimizer]
        whole = self.model()
        apply_optimizer_in_backward(fused, whole.parameters(), dict(options))
        model = sharded_model(whole, ShardingPlan(PLACED, RANKS))
        load_state(model, self.state)
        found = tuple(EmbeddingTable(name, *size, 3.0) for name, size in SIZES.items())
        task = ShardingTask(found, Device.uniform(RANKS, 2**30), SAMPLES * RANKS)
        assert sorted(from_torchrec(model.plan, task).placements) == sorted(PLACED)
        losses = []
        for step in range(STEPS):
            loss = self.loss(model, step, [distributed.get_rank()])
            loss.backward()
            total = loss.detach().clone()
            distributed.all_reduce(total)
            losses.append(total.item() / RANKS)
        return losses, model

    def in_one_piece(self, optimizer: str) -> tuple[list[float], nn.Module]:
        _, usual, options = OPTIMIZERS[optimizer]
        model = self.model()
        own = usual(model.parameters(), **options)
        losses = []
        for step in range(STEPS):
            own.zero_grad()
            loss = self.loss(model, step, list(range(RANKS)))
            loss.backward()
            own.step()
            losses.append(loss.item())
        return losses, model


def differences() -> dict[str, tuple[float, float, float]]:
    """By optimizer: the largest difference, the largest update, what the loss has gained."""
    found = {}
    learning = Learning()
    for name in OPTIMIZERS:
        ours, model = learning.in_pieces(name)
        theirs, whole = learning.in_one_piece(name)
        far = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        moved = 0.0
        for key, held in model.state_dict().items():
            for shard in held.local_shards():
                (row, column), size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                own = (slice(row, row + size[0]), slice(column, column + size[1]))
                wanted, before = whole.state_dict()[key][own], learning.state[key][own]
                far = max(far, (shard.tensor - wanted).abs().max().item())
                moved = max(moved, (wanted - before).abs().max().item())
        found[name] = far, moved, ours[0] - ours[-1]
    return found


def test_rows_of_nodes_and_grids_learn_what_the_model_in_one_piece_learns() -> None:
    for of_rank in run_forked(RANKS, differences, of_node=2):
        assert set(of_rank) == set(OPTIMIZERS)
        for far, moved, gained in of_rank.values():
            assert far < 1e-5
            assert moved > 1e-3
            assert gained > 0
