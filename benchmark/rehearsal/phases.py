"""Times the phases of a step on a rank, by hooks on the sharded model.

Each phase lasts until the next begins, so phases add up to the step. Timing adds only reads of the
clock.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from autoshard.benchmark import fbgemm
from autoshard.benchmark.backends.base import Stopwatch
from autoshard.benchmark.rehearsal.times import PHASES

_INPUT, _FORWARD, _FORWARD_EXCHANGE, _DENSE, _BACKWARD_EXCHANGE, _BACKWARD, _REDUCE = range(
    len(PHASES)
)


class Phases:
    """Times the phases of steps.

    Args:
        model: Sharded model with layers `bottom` and `in_order` as in `RehearsedModel`.
        watch: Stopwatch of its device.
    """

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        self._watch = watch
        self._marks: list[Any] = []
        self._begun: list[int] = []  # the phase that begins at each mark
        ops = fbgemm.training_ops()
        operators = (
            ops.SplitTableBatchedEmbeddingBagsCodegen,
            ops.DenseTableBatchedEmbeddingBagsCodegen,
        )
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingBagCollection):
                module.register_forward_pre_hook(self._beginning(_INPUT))
                for lookup in module._lookups:
                    lookup.register_forward_pre_hook(self._beginning(_FORWARD))
                    lookup.register_forward_hook(self._beginning(_FORWARD_EXCHANGE))
                    for part in lookup.modules():
                        if isinstance(part, operators):
                            part.register_forward_hook(self._watch_operator)
        model.get_submodule("in_order").register_forward_pre_hook(self._watch_pooled)
        model.get_submodule("bottom").register_forward_hook(self._watch_bottom)

    def start(self) -> None:
        """Begins a step."""
        self._marks, self._begun = [], []
        self._begin(_DENSE)

    def stop(self) -> tuple[tuple[float, ...], float]:
        """Ends a step.

        Returns:
            Milliseconds of each phase, and the share of operator time that other processes took.
        """
        self._begin(_DENSE)
        found, ours = [0.0] * len(PHASES), [0.0] * len(PHASES)
        passed = self._watch.between(self._marks)
        for phase, (milliseconds, had) in zip(self._begun, passed, strict=False):
            found[phase] += milliseconds
            ours[phase] += had
        ran = found[_FORWARD] + found[_BACKWARD]
        had = ours[_FORWARD] + ours[_BACKWARD]
        return tuple(found), max(0.0, 1 - had / ran) if ran else 0.0

    def reduced(self) -> None:
        """Notes that the backward pass is over and dense gradients are reduced."""
        self._begin(_DENSE)

    def _begin(self, phase: int) -> None:
        self._marks.append(self._watch.mark())
        self._begun.append(phase)

    def _beginning(self, phase: int) -> Callable[..., None]:
        return lambda *_: self._begin(phase)

    def _watch_operator(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        """Hooks into the backward pass of a fused operator, which updates its weights."""
        node = output.grad_fn
        if node is not None:
            node.register_prehook(self._beginning(_BACKWARD))
            node.register_hook(self._beginning(_BACKWARD_EXCHANGE))

    def _watch_pooled(self, _: nn.Module, inputs: tuple[list[Any], Any]) -> None:
        """Notes that all embeddings have arrived, and hooks into sending their gradients."""
        self._begin(_DENSE)
        for values in inputs[0]:
            values.register_hook(self._beginning(_BACKWARD_EXCHANGE))

    def _watch_bottom(self, _: nn.Module, __: Any, output: Any) -> None:
        """Hooks into the gradient of the first layer, with which the backward pass ends."""
        output.register_hook(self._beginning(_REDUCE))
