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
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing

BEST = "best"  # column: whether a row is of the best game of its task
_LEAST_DEVIATION = 1e-3  # of the worth of games, relative to the best: equal ones teach nothing


class RivalAdvantages(ConnectorV2):
    """Puts into each row how much more its game was worth than the mean of its rivals.

    Divided by their deviation within the task: else dead ends, which cost a hundred times what
    plans differ by, would drown all that tasks without any could teach. What was done while a game
    waited for the others of its round is left out.
    """

    def __call__(  # type: ignore[override]
        self, *, batch: dict[str, Any], episodes: list[SingleAgentEpisode], **_told: Any
    ) -> dict[str, Any]:
        """The batch with advantages, and without the rows that do not count."""
        lasts = [episode.get_infos(-1) for episode in episodes]
        worth = np.array([episode.get_return() for episode in episodes])
        _, tasks = np.unique([last["task"] for last in lasts], return_inverse=True)
        counts = np.bincount(tasks)[tasks]
        others = (np.bincount(tasks, worth)[tasks] - worth) / np.maximum(1, counts - 1)
        ahead = np.where(counts > 1, worth - others, 0.0)
        spread = np.sqrt(np.bincount(tasks, ahead**2)[tasks] / counts)
        ahead /= np.maximum(_LEAST_DEVIATION, spread)
        most = np.full(len(counts), -np.inf)
        np.maximum.at(most, tasks, worth)
        best = (worth == most[tasks]) & (ahead > 0)
        lengths = np.array([len(episode) for episode in episodes])
        actions = np.array([last["actions"] for last in lasts])
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        counted = torch.from_numpy(place < np.repeat(actions, lengths))
        for module, columns in batch.items():
            rows = torch.from_numpy(np.repeat(ahead, lengths)).float()
            columns[Postprocessing.ADVANTAGES] = rows
            columns[Postprocessing.VALUE_TARGETS] = torch.zeros_like(rows)
            columns[BEST] = torch.from_numpy(np.repeat(best, lengths))
            batch[module] = {name: values[counted] for name, values in columns.items()}
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
