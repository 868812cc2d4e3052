"""The policy as an RLModule, for RLlib's learners and env runners."""

from typing import Any

from gymnasium.spaces import Discrete
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from torch import Tensor

from autoshard.envs import Layout
from autoshard.envs.options import OPTION_KINDS
from autoshard.sharders.policy.network import PolicyNetwork, PolicyShape


class PolicyModule(TorchRLModule, ValueFunctionAPI):
    """A `PolicyNetwork` as an RLModule; `model_config["shape"]` has its `PolicyShape`."""

    def setup(self) -> None:
        """Builds the network for the spaces of the environment."""
        assert isinstance(self.action_space, Discrete)
        assert isinstance(self.model_config, dict)
        self.layout = Layout(int(self.action_space.n) - len(OPTION_KINDS))
        self.network = PolicyNetwork(PolicyShape.from_json(self.model_config["shape"]))

    def _forward(self, batch: dict[str, Any], **_options: Any) -> dict[str, Tensor]:
        logits, known = self.network(self.layout.split(batch[Columns.OBS]))
        return {Columns.ACTION_DIST_INPUTS: logits, Columns.EMBEDDINGS: known}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Returns the value of each state."""
        if embeddings is None:
            _, embeddings = self.network(self.layout.split(batch[Columns.OBS]))
        return self.network.values(embeddings)
