"""One shard as one fused fbgemm operator, with its batch, ready to be timed."""

from typing import Any

import torch

from autoshard.benchmark import fbgemm
from autoshard.benchmark.measurement import MeasureSettings
from autoshard.workload import IndexBatch, OperatorOptions, Shard, shard_batch


class EmbeddingOp:
    """The operator of a shard on a device, and the batch and gradient that it runs on.

    Weights start at zero and take whatever the timed updates make of them: kernels take the same
    time for any finite numbers.
    """

    def __init__(self, shard: Shard, settings: MeasureSettings, device: torch.device) -> None:
        self.batch: IndexBatch = shard_batch(shard, settings.batch_size, settings.seed)
        self._indices = torch.from_numpy(self.batch.indices).to(device)
        self._offsets = torch.from_numpy(self.batch.offsets).to(device)
        self._weights = None
        if any(piece.table.weighted for piece in shard.slices):
            self._weights = torch.ones(len(self._indices), device=device)
        self.module = build_module(shard, settings.operator, device)
        self.gradient = torch.ones(settings.batch_size, shard.total_dim, device=device)

    def forward(self) -> torch.Tensor:
        """Pooled embeddings of the batch: [batch, sum of output widths]."""
        output: torch.Tensor = self.module(self._indices, self._offsets, self._weights)
        return output


def build_module(shard: Shard, options: OperatorOptions, device: torch.device) -> Any:
    """fbgemm's SplitTableBatchedEmbeddingBagsCodegen for the slices of a shard, in their order."""
    ops = fbgemm.training_ops()
    on_gpu = device.type == "cuda"
    location = ops.EmbeddingLocation.DEVICE if on_gpu else ops.EmbeddingLocation.HOST
    compute = ops.ComputeDevice.CUDA if on_gpu else ops.ComputeDevice.CPU
    optimizers = {
        "rowwise_adagrad": ops.OptimType.EXACT_ROWWISE_ADAGRAD,
        "adagrad": ops.OptimType.EXACT_ADAGRAD,
        "sgd": ops.OptimType.EXACT_SGD,
    }
    weights = {"fp32": ops.SparseType.FP32, "fp16": ops.SparseType.FP16}
    return ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(piece.table.rows, piece.width, location, compute) for piece in shard.slices],
        feature_table_map=[
            number for number, piece in enumerate(shard.slices) for _ in range(piece.table.features)
        ],
        weights_precision=weights[options.weights],
        optimizer=optimizers[options.optimizer],
        learning_rate=0.01,
        # Our batches are valid, and fbgemm's own benchmarks do not check theirs either.
        bounds_check_mode=ops.BoundsCheckMode.NONE,
        device=device,
    )
