"""Several networks of one structure evaluated in one pass.

Their mean is the answer, their disagreement a doubt.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

State = dict[str, Tensor]


class Ensemble:
    """Networks with stacked weights: each weight has a first dimension of `members`.

    Args:
        network: any one of them; gives the structure.
        weights: stacked weights by name.
    """

    def __init__(self, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self.network = network
        self._buffers = dict(network.named_buffers())
        self.weights: State = dict(weights)

    @staticmethod
    def fresh(make: Callable[[], nn.Module], members: int, seed: int) -> "Ensemble":
        """Untrained networks, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            networks = [make() for _ in range(members)]
        weights, _ = stack_module_state(networks)
        return Ensemble(networks[0], {name: w.detach() for name, w in weights.items()})

    @property
    def members(self) -> int:
        """How many networks there are."""
        return len(next(iter(self.weights.values())))

    def with_weights(self, weights: Mapping[str, Tensor]) -> "Ensemble":
        """The same networks with other weights."""
        return Ensemble(self.network, weights)

    def weights_of(self, part: str) -> State:
        """The stacked weights of the networks' submodule `part`, by their names in it."""
        return _under(f"{part}.", self.weights)

    def __call__(self, part: str, *inputs: Tensor, apart: bool = False) -> Tensor:
        """Answers [members, ..., n] of the networks' submodule `part`.

        The inputs are [..., n] for all members, or with `apart` [..., members, n].
        """
        module: nn.Module = self.network.get_submodule(part)
        prefix = f"{part}." if part else ""
        weights = _under(prefix, self.weights)
        buffers = _under(prefix, self._buffers)

        def one(weights: State, *inputs: Tensor) -> Any:
            return functional_call(module, (weights, buffers), inputs)

        places: Sequence[int | None] = [-2 if apart else None] * len(inputs)
        answer: Tensor = vmap(one, in_dims=(0, *places))(weights, *inputs)
        return answer


def _under(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
