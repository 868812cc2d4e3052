"""A shard as fused fbgemm operators with their batch, ready to be timed."""

from typing import Any

import torch

from autoshard.benchmark.backends.base import DeviceBackend
from autoshard.benchmark.measurement import MeasureSettings
from autoshard.benchmark.operator import fbgemm
from autoshard.workload import OperatorOptions, Shard


class EmbeddingOp:
    """The operators of a shard on a device, with their batch and gradient.

    A fused operator has weights for all its lookups or for none. So where tables with and without
    weights meet in a shard, each kind has its own operator, as in TorchRec's modules.
    """

    def __init__(self, shard: Shard, settings: MeasureSettings, backend: DeviceBackend) -> None:
        kinds = [
            tuple(piece for piece in shard.pieces if piece.table.weighted == weighted)
            for weighted in (False, True)
        ]
        self.parts = [FusedPart(Shard.in_order(kind), settings, backend) for kind in kinds if kind]
        self.gradient = torch.ones(settings.batch_size, shard.total_dim, device=backend.device)

    def forward(self) -> torch.Tensor:
        """Returns pooled embeddings of the batch, shape [batch, sum of output widths]."""
        outputs = [part.forward() for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class FusedPart:
    """The pieces of a shard that run in one fused operator: all with weights, or all without.

    Weights of tables start at zero and change by the timed updates: kernels take the same time for
    any finite numbers.
    """

    def __init__(self, shard: Shard, settings: MeasureSettings, backend: DeviceBackend) -> None:
        device = backend.device
        self.indices, self.offsets = backend.batch(shard, settings.batch_size, settings.seed)
        self._weights = None
        if shard.pieces[0].table.weighted:
            self._weights = torch.ones(len(self.indices), device=device)
        self.module = build_module(shard, settings.operator, backend)

    def forward(self) -> torch.Tensor:
        """Returns pooled embeddings of the batch, shape [batch, sum of output widths]."""
        output: torch.Tensor = self.module(self.indices, self.offsets, self._weights)
        return output


def build_module(
    shard: Shard,
    options: OperatorOptions,
    backend: DeviceBackend,
    weights: torch.Tensor | None = None,
) -> Any:
    """Returns fbgemm's SplitTableBatchedEmbeddingBagsCodegen for the pieces of a shard.

    Args:
        shard: The pieces.
        options: Type of weights, and optimizer.
        backend: The device.
        weights: Weights to use, one after the other, in place of new ones.
    """
    ops = fbgemm.training_ops()
    location = ops.EmbeddingLocation[backend.operator.location]
    compute = ops.ComputeDevice[backend.operator.compute]
    optimizers = {
        "rowwise_adagrad": ops.OptimType.EXACT_ROWWISE_ADAGRAD,
        "adagrad": ops.OptimType.EXACT_ADAGRAD,
        "sgd": ops.OptimType.EXACT_SGD,
    }
    precisions = {"fp32": ops.SparseType.FP32, "fp16": ops.SparseType.FP16}
    given = {} if weights is None else {"preallocated_host_buffers": {"weights": weights}}
    module = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(piece.table.rows, piece.width, location, compute) for piece in shard.pieces],
        feature_table_map=[
            number for number, piece in enumerate(shard.pieces) for _ in range(piece.table.features)
        ],
        weights_precision=precisions[options.weights],
        optimizer=optimizers[options.optimizer],
        learning_rate=0.01,
        bounds_check_mode=ops.BoundsCheckMode[backend.operator.bounds_check],
        device=backend.device,
        **given,
    )
    if weights is not None and module.weights_dev.numel():  # those above are for host memory alone
        module.weights_dev = torch.nn.Parameter(weights)
    return module
