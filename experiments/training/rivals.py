"""Advantages over rivals: how much better a game ended than others of the same task.

RLlib's PPO takes the advantage over a critic, normalised over a whole batch. Where tasks differ in
how much there is to be won, what games of the same task come to is the better baseline, and needs
nothing to be learned. (As in POMO and GRPO; the mean is that of the others, which leaves no bias.)
"""

from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import (
    AddOneTsToEpisodesAndTruncate,
    GeneralAdvantageEstimation,
)
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing

BEST = "best"  # column: whether a row is of the best game of its task
_LEAST_DEVIATION = 1e-4  # of the worth of games, relative to the best: equal ones teach nothing


class RivalAdvantages(ConnectorV2):
    """Puts into each row how much more its game was worth than the mean of its rivals.

    Divided by one number for the batch, the deviation within tasks. What was done while a game
    waited for the others of its round does not count.
    """

    def __call__(  # type: ignore[override]
        self, *, batch: dict[str, Any], episodes: list[SingleAgentEpisode], **_told: Any
    ) -> dict[str, Any]:
        """The batch with advantages; rows that do not count are masked out of the loss."""
        lasts = [episode.get_infos(-1) for episode in episodes]
        worth = np.array([episode.get_return() for episode in episodes])
        _, tasks = np.unique([last["task"] for last in lasts], return_inverse=True)
        counts = np.bincount(tasks)[tasks]
        others = (np.bincount(tasks, worth)[tasks] - worth) / np.maximum(1, counts - 1)
        ahead = np.where(counts > 1, worth - others, 0.0)
        ahead /= max(_LEAST_DEVIATION, float(np.sqrt(np.mean(ahead**2))))
        most = np.full(len(counts), -np.inf)
        np.maximum.at(most, tasks, worth)
        best = (worth == most[tasks]) & (ahead > 0)
        lengths = np.array([len(episode) for episode in episodes])
        actions = np.array([last["actions"] for last in lasts])
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        counted = torch.from_numpy(place < np.repeat(actions, lengths))
        for columns in batch.values():
            rows = torch.from_numpy(np.repeat(ahead, lengths)).float()
            columns[Postprocessing.ADVANTAGES] = rows * counted
            columns[Postprocessing.VALUE_TARGETS] = torch.zeros_like(rows)
            columns[Columns.LOSS_MASK] = counted
            columns[BEST] = counted & torch.from_numpy(np.repeat(best, lengths))
        return batch


class RivalLearner(PPOTorchLearner):
    """PPO with advantages over rivals in place of a critic's."""

    def build(self) -> None:
        """Replace RLlib's estimation, and what it needs before it."""
        super().build()
        pipeline = self._learner_connector
        assert pipeline is not None
        pipeline.remove(AddOneTsToEpisodesAndTruncate)
        pipeline.remove(GeneralAdvantageEstimation)
        pipeline.append(RivalAdvantages())
