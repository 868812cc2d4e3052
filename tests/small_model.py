"""A small TorchRec model whose training is the same on any number of ranks and by any plan."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import SGD, Adagrad, RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from autoshard.integration import load_state, to_torchrec, with_hot_rows
from autoshard.workload import Placement, ShardingPlan
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

CPU = torch.device("cpu")
TABLES = {"a": (40, 8), "b": (60, 24), "c": (30, 16), "d": (20, 8)}  # rows and dim
SAMPLES = 24  # of all ranks together
OPTIMIZERS = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}
_LR = 0.5


def plan_of(
    ranks: int, *placements: tuple[Any, ...], copied: str = "", hot: dict[str, int] | None = None
) -> ShardingPlan:
    """Plan of slices: table, first column, width, first rank and number of blocks of rows."""
    pieces = tuple(sorted(Placement(f"bags.{table}", *rest) for table, *rest in placements))
    options = {f"bags.{name}": DATA_PARALLEL for name in copied}
    options |= {f"bags.{n}": ShardingOption(hot_rows=count) for n, count in (hot or {}).items()}
    return ShardingPlan(pieces, ranks, options)


class SmallModel(nn.Module):
    """Tables and a linear layer."""

    def __init__(self, tables: Mapping[str, tuple[int, int]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name]
                )
                for name, (rows, dim) in tables.items()
            ],
            device=CPU,
        )
        self.top = nn.Linear(sum(dim for _, dim in tables.values()), 1)
        self._names = list(tables)

    def forward(self, lookups: KeyedJaggedTensor) -> torch.Tensor:
        """Returns a score of each sample."""
        scores: torch.Tensor = self.top(KeyedTensor.regroup([self.bags(lookups)], [self._names])[0])
        return scores.squeeze(1)


def sharded_model(model: nn.Module, plan: ShardingPlan) -> DistributedModelParallel:
    """Returns a model that is sharded over all ranks."""
    made = to_torchrec(plan, model, device_type="cpu")
    return DistributedModelParallel(model, device=CPU, plan=made)


class Training:
    """A model that is sharded by a plan, with the optimizers of all its parts."""

    def __init__(
        self,
        plan: ShardingPlan,
        optimizer: str,
        hot_ids: Mapping[str, torch.Tensor] | None = None,
        tables: Mapping[str, tuple[int, int]] = TABLES,
        sharded: Callable[[nn.Module, ShardingPlan], DistributedModelParallel] = sharded_model,
    ) -> None:
        self.tables = tables
        model: nn.Module = SmallModel(tables)
        apply_optimizer_in_backward(OPTIMIZERS[optimizer], model.bags.parameters(), {"lr": _LR})
        model = with_hot_rows(model, plan, hot_ids or {})
        weights = model.state_dict()
        self.model = sharded(model, plan)
        load_state(self.model, weights)
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        copies = {name: rest.pop(name) for name in list(rest) if "embedding_bags." in name}
        dense = [KeyedOptimizerWrapper(rest, lambda some: torch.optim.SGD(some, lr=_LR))]
        if copies and optimizer == "sgd":
            dense.append(KeyedOptimizerWrapper(copies, lambda some: torch.optim.SGD(some, lr=_LR)))
        elif copies:
            dense.append(
                KeyedOptimizerWrapper(
                    copies, lambda some: torch.optim.Adagrad(some, lr=_LR, eps=1e-8)
                )
            )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, *dense])
        self.dense = CombinedOptimizer(dense)

    @property
    def state(self) -> dict[str, object]:
        """Returns what a checkpoint has."""
        return {"model": self.model, "optimizer": self.optimizer}

    def steps(self, numbers: Iterable[int], after: Callable[[int], object] = abs) -> list[float]:
        """Trains by these batches; returns the losses, means over all samples.

        `after`: Called with the number of each batch, once weights are updated.
        """
        losses = []
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        own = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        for number in numbers:
            drawn = torch.Generator().manual_seed(number)
            ids = [
                torch.randint(rows, (SAMPLES, 2), generator=drawn)[own].reshape(-1)
                for rows, _ in self.tables.values()
            ]
            labels = torch.randint(2, (SAMPLES,), generator=drawn).float()[own]
            lengths = torch.full((len(ids) * len(labels),), 2)
            lookups = KeyedJaggedTensor(list(self.tables), torch.cat(ids), lengths=lengths)
            self.dense.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(lookups), labels)
            loss.backward()
            self.dense.step()
            after(number)
            mean = loss.detach().clone()
            distributed.all_reduce(mean)
            losses.append(mean.item() / ranks)
        return losses
