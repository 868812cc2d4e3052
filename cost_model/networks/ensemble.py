"""Several networks of one structure that are evaluated in one pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

State = dict[str, Tensor]


class Ensemble:
    """Networks with stacked weights: the first dimension of each weight is `members`.

    Args:
        network: Any of the networks; gives the structure.
        weights: Stacked weights by name.
    """

    def __init__(self, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self.network = network
        self._buffers = dict(network.named_buffers())
        self.weights: State = dict(weights)

    @staticmethod
    def fresh(make: Callable[[], nn.Module], members: int, seed: int) -> "Ensemble":
        """Returns networks with random weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            networks = [make() for _ in range(members)]
        weights, _ = stack_module_state(networks)
        return Ensemble(networks[0], {name: w.detach() for name, w in weights.items()})

    @property
    def members(self) -> int:
        """Number of networks."""
        return len(next(iter(self.weights.values())))

    def with_weights(self, weights: Mapping[str, Tensor]) -> "Ensemble":
        """Returns networks of the same structure with other weights."""
        return Ensemble(self.network, weights)

    def weights_of(self, part: str) -> State:
        """Returns the stacked weights of the submodule `part`, by their names in it."""
        return _under(f"{part}.", self.weights)

    def __call__(self, part: str, *inputs: Tensor, apart: bool = False) -> Tensor:
        """Returns the outputs of the submodule `part`, shape [members, ..., n].

        Inputs have shape [..., n] for all members, or with `apart` [..., members, n].
        """
        module: nn.Module = self.network.get_submodule(part)
        buffers = _under(f"{part}.", self._buffers)

        def member(weights: State, *inputs: Tensor) -> Any:
            return functional_call(module, (weights, buffers), inputs)

        in_dims: Sequence[int | None] = [-2 if apart else None] * len(inputs)
        outputs: Tensor = vmap(member, in_dims=(0, *in_dims))(self.weights_of(part), *inputs)
        return outputs


def _under(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
