"""Training on one rank: a model sharded by a plan, a few batches, timed steps."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from autoshard.benchmark.backends.base import DeviceBackend
from autoshard.benchmark.rehearsals.times import Loop, Step
from autoshard.benchmark.rehearsals.trace import BACKWARD, DENSE, INPUT, REDUCE
from autoshard.integration import HotCold, to_torchrec, with_hot_rows
from autoshard.integration.checkpoints.states import local_parts
from autoshard.integration.models.names import FUSED_OPTIMIZERS
from autoshard.integration.rehearsal.model import (
    Batch,
    RehearsedModel,
    draw_batch,
    fill,
    in_model,
    most_used,
    plan_in_model,
)
from autoshard.integration.rehearsal.phases import Phases
from autoshard.integration.rehearsal.replicas import Replicas
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.tables.table import HOT

LEARNING_RATE = 0.1
_FUSED_EPS = 1e-8  # FBGEMM's default
_OF_TABLES = ".embedding_bags."  # in names of weights
BATCHES = 8  # batches that steps cycle through, so that the cache holds little of the next one


@dataclass(frozen=True)
class Part:
    """A part of a table on a rank, with its first row and column.

    `ids` are those rows of the table of which it is a part, if they are not all in order.
    """

    table: str
    row: int
    column: int
    weights: torch.Tensor
    ids: torch.Tensor | None = None


class Training:
    """The model of a task, sharded by a plan; all ranks build it at the same time.

    Args:
        task: Task, whose batch size is that of all ranks together.
        plan: Plan of this package, or of TorchRec's planner for `RehearsedModel`.
        backend: Backend that is bound to the device of this rank.
        phases: Traces its steps.
        batches: Batches of the task, which steps go through again and again.
        loop: `plain`: one batch after another. `pipelined`: TorchRec's `TrainPipelineSparseDist`,
            which distributes the lookups of the next batch beside the forward pass.
    """

    def __init__(
        self,
        task: ShardingTask,
        plan: ShardingPlan | TorchRecPlan,
        backend: DeviceBackend,
        phases: Phases,
        batches: Sequence[Batch],
        loop: Loop = "plain",
    ) -> None:
        ranks, device = dist.get_world_size(), backend.device
        self._task = task
        torch.manual_seed(0)  # seed of the dense layers: the same on all ranks
        self._replicas: Replicas | None = None
        model = RehearsedModel(task.tables, task.operator)
        if isinstance(plan, ShardingPlan):
            tables = {table.name: table for table in task.tables}
            named, names = plan_in_model(plan, task.tables), in_model(task.tables)
            hot_ids = {
                names[name]: most_used(tables[name], count, task.batch_size, range(BATCHES))
                for name, count in plan.copied_hot_rows.items()
            }
            with_hot_rows(model, named, hot_ids)
            if plan.replicas is not None:
                self._replicas = Replicas(plan.replicas, device)
            plan = to_torchrec(named, model, ranks, device.type)
        members = list(range(ranks)) if self._replicas is None else self._replicas.members
        self.model = DistributedModelParallel(
            model,
            env=None if self._replicas is None else self._replicas.env,
            device=device,
            plan=_on_device(plan, device, members),
            sharders=[_sharder(task)],
        )
        numbers = {table.name: number for number, table in enumerate(task.tables)}
        for part in self.parts():
            number = numbers[part.table]
            rows = task.tables[number].rows
            fill(part.weights, number, rows, part.row, part.column, part.ids)
        self._optimizer = _Optimizer(self.model, task, phases)
        self._inputs = (batch.inputs() for batch in itertools.cycle(batches))
        self._phases = phases
        phases.observe(self.model.module)
        self._pipeline: _Pipeline | None = None
        if loop == "pipelined":
            self._pipeline = _Pipeline(phases, self.model, self._optimizer, device)

    def parts(self) -> Iterator[Part]:
        """Yields all parts of tables on this rank."""
        names = {name: table for table, name in in_model(self._task.tables).items()}
        for path, child in self.model.module.named_children():
            module = child.hot_and_cold if isinstance(child, HotCold) else child
            if not isinstance(module, ShardedEmbeddingBagCollection):
                continue
            ids = child.ids_of_parts() if isinstance(child, HotCold) else {}
            for key, held in module.state_dict().items():
                part = key.split(".")[1]
                table, rows = names[f"{path}.{part.removesuffix(HOT)}"], ids.get(part)
                if isinstance(held, ShardedTensor | DTensor):
                    for (row, column), weights in local_parts(held).items():
                        yield Part(table, row, column, weights, rows)
                else:
                    yield Part(table, 0, 0, held, rows)

    def step(self, at_once: bool) -> Callable[[], Step]:
        """Runs a step; what is returned reads it, for which it waits until the device is done.

        Args:
            at_once: Whether all ranks begin at the same time.
        """
        if self._pipeline is None:
            inputs = next(self._inputs)
            self._optimizer.zero_grad()
        if at_once:
            dist.barrier()
        self._phases.start()
        if self._pipeline is not None:
            reported = self._pipeline.progress(self._inputs)
        else:
            loss, reported = self.model(inputs)
            loss.backward()
            self._optimizer.step()
        if self._replicas is not None:
            self._phases.begin(REDUCE)
            self._replicas.step(self.model)
        traced = self._phases.stop()
        return lambda: Step(traced(), reported.item())


class _Pipeline(TrainPipelineSparseDist):  # type: ignore[misc]  # TorchRec has no types
    """TorchRec's pipeline, which says what it does."""

    def __init__(self, phases: Phases, *arguments: Any) -> None:
        # With `HotCold`, lookups are told apart before they are distributed.
        super().__init__(*arguments, execute_all_batches=True, pipeline_postproc=True)
        self._phases = phases
        if phases.holds:  # what another stream would overlap is composed
            self._memcpy_stream = self._data_dist_stream = None

    def start_sparse_data_dist(self, *arguments: Any) -> None:
        """Begins to distribute the lookups of the next batch."""
        self._phases.begin(INPUT)
        super().start_sparse_data_dist(*arguments)
        self._phases.begin(DENSE)

    def wait_sparse_data_dist(self, *arguments: Any) -> None:
        """Goes on with it."""
        self._phases.begin(INPUT)
        super().wait_sparse_data_dist(*arguments)
        self._phases.begin(DENSE)


class _Optimizer:
    """Optimizers of what is not trained in the backward pass: dense layers, and copied tables.

    The update of copies is counted as a part of the backward pass, where that of others is.
    """

    def __init__(self, model: nn.Module, task: ShardingTask, phases: Phases) -> None:
        kept = dict(in_backward_optimizer_filter(model.named_parameters()))
        copies = {name: kept.pop(name) for name in list(kept) if _OF_TABLES in name}
        self._phases = phases
        self._dense = torch.optim.SGD(kept.values(), lr=LEARNING_RATE)
        self._copies: torch.optim.Optimizer | None = None
        if copies and task.operator.optimizer == "sgd":
            self._copies = torch.optim.SGD(copies.values(), lr=LEARNING_RATE)
        elif copies:  # row-wise Adagrad has no dense form
            self._copies = torch.optim.Adagrad(copies.values(), lr=LEARNING_RATE, eps=_FUSED_EPS)

    def zero_grad(self) -> None:
        """Clears all gradients."""
        self._dense.zero_grad()
        if self._copies is not None:
            self._copies.zero_grad()

    def step(self) -> None:
        """Updates dense layers and copies."""
        self._phases.begin(DENSE)
        self._dense.step()
        if self._copies is not None:
            self._phases.begin(BACKWARD)
            self._copies.step()


def draw_batches(task: ShardingTask, device: torch.device, hot: bool) -> list[Batch]:
    """Returns this rank's samples of all batches of a task; `hot` as for `draw_batch`."""
    rank, share = dist.get_rank(), task.batch_size // dist.get_world_size()
    samples = slice(rank * share, (rank + 1) * share)
    return [
        draw_batch(task.tables, task.batch_size, s, samples, device, hot) for s in range(BATCHES)
    ]


def _on_device(plan: TorchRecPlan, device: torch.device, members: Sequence[int]) -> TorchRecPlan:
    """Returns the plan with the ranks that its devices are, and with the device that each rank
    sees, which on GPUs is its only one.
    """
    for module in plan.plan.values():
        for sharding in module.values():
            sharding.ranks = [members[rank] for rank in sharding.ranks or ()]
            for shard in getattr(sharding.sharding_spec, "shards", ()):
                rank = members[shard.placement.rank()]
                shard.placement = _remote_device(f"rank:{rank}/{device}")
    return plan


def _sharder(task: ShardingTask) -> EmbeddingBagCollectionSharder:
    optimizer = FUSED_OPTIMIZERS[task.operator.optimizer]
    return EmbeddingBagCollectionSharder(
        fused_params={"optimizer": optimizer, "learning_rate": LEARNING_RATE}
    )
