"""PPO with a leave-one-out baseline instead of a critic.

The advantage of an episode is its return minus the mean return of the other episodes of the same
task, divided by the root mean square of these differences within the task (cf. RLOO, POMO, GRPO).
All tasks thus contribute on the same scale.
"""

from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate, GeneralAdvantageEstimation
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing

_MIN_SPREAD = 1e-3  # minimum spread of a task's returns; an ideal plan's return is -1


class GroupAdvantages(ConnectorV2):
    """Writes each episode's advantage over the others of its task into the learner's batch.

    Without the division by the spread within a task, episodes without a plan, whose return is a
    hundred times as far from the mean as that of a plan, would outweigh all tasks without any.
    Rows of an episode that had ended and waited for the others of its round are removed.
    """

    def __call__(  # type: ignore[override]
        self, *, batch: dict[str, Any], episodes: list[SingleAgentEpisode], **_context: Any
    ) -> dict[str, Any]:
        """Returns the batch with advantages for the rows in which an action was taken."""
        last_infos = [episode.get_infos(-1) for episode in episodes]
        returns = np.array([episode.get_return() for episode in episodes])
        _, tasks = np.unique([info["task"] for info in last_infos], return_inverse=True)
        counts = np.bincount(tasks)[tasks]
        others = (np.bincount(tasks, returns)[tasks] - returns) / np.maximum(1, counts - 1)
        advantages = np.where(counts > 1, returns - others, 0.0)
        spread = np.sqrt(np.bincount(tasks, advantages**2)[tasks] / counts)
        advantages /= np.maximum(_MIN_SPREAD, spread)

        lengths = np.array([len(episode) for episode in episodes])
        actions = np.array([info["actions"] for info in last_infos])
        step = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        acted = torch.from_numpy(step < np.repeat(actions, lengths))
        rows = torch.from_numpy(np.repeat(advantages, lengths)).float()
        for module, columns in batch.items():
            columns[Postprocessing.ADVANTAGES] = rows
            columns[Postprocessing.VALUE_TARGETS] = torch.zeros_like(rows)
            batch[module] = {name: values[acted] for name, values in columns.items()}
        return batch


class GroupBaselineLearner(PPOTorchLearner):
    """RLlib's PPO learner with `GroupAdvantages` in place of generalised advantage estimation."""

    def build(self) -> None:
        """Replaces RLlib's estimation, and the connector that it needs before it."""
        super().build()
        pipeline = self._learner_connector
        assert pipeline is not None
        pipeline.remove(AddOneTsToEpisodesAndTruncate)
        pipeline.remove(GeneralAdvantageEstimation)
        pipeline.append(GroupAdvantages())
