"""Which fused operator runs a shard, and the memory it needs."""

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from autoshard.workload.errors import FieldError
from autoshard.workload.tables import Shard

Weights = Literal["fp32", "fp16"]
Optimizer = Literal["rowwise_adagrad", "adagrad", "sgd"]

WEIGHT_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2}
STATE_BYTES = 4  # optimizer state, outputs and gradients are fp32 whatever the weights are
INDEX_BYTES = 8


@dataclass(frozen=True)
class OperatorOptions:
    """What the fused operator stores: the type of its weights and its optimizer's state."""

    weights: Weights = "fp32"
    optimizer: Optimizer = "rowwise_adagrad"

    def __post_init__(self) -> None:
        for field, value, known in (
            ("weights", self.weights, get_args(Weights)),
            ("optimizer", self.optimizer, get_args(Optimizer)),
        ):
            if value not in known:
                raise FieldError(field, f"must be one of {', '.join(known)}, got {value!r}")

    def to_json(self) -> dict[str, str]:
        """The options by name."""
        return asdict(self)

    def stored_bytes(self, rows: int, width: int) -> int:
        """Bytes of weights and optimizer state of `rows` vectors of `width` numbers."""
        state_numbers = {"rowwise_adagrad": rows, "adagrad": rows * width, "sgd": 0}
        weights = rows * width * WEIGHT_BYTES[self.weights]
        return weights + state_numbers[self.optimizer] * STATE_BYTES

    def shard_bytes(self, shard: Shard) -> int:
        """Bytes of weights and optimizer state that the shard keeps on its device."""
        return sum(self.stored_bytes(s.table.rows, s.width) for s in shard.slices)

    def working_bytes(self, shard: Shard, batch_size: int) -> int:
        """Bytes of the batch's indices and offsets, and of the output and its gradient."""
        lookups = sum(round(s.table.pooling_factor * batch_size) for s in shard.slices)
        indices = (lookups + len(shard) * batch_size + 1) * INDEX_BYTES
        return indices + 2 * shard.total_dim * batch_size * STATE_BYTES
