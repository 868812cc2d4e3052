"""Learning from plans that turned out well: of the policy itself, and of its teachers.

A plan is many choices, and which of them was worth how much need not be known to repeat them all:
the best of several games of one task is played again, and so is what a search made of it. (As in
self-labelling; what is never allowed is never labelled, and devices that are alike share a label.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from torch import Tensor

from autoshard.experiments.training.rivals import BEST, RivalLearner
from autoshard.experiments.training.teacher import Lessons

REINFORCED = "reinforced"  # in a learner's configuration: PPO's loss counts as well
_REMEMBERED = 100_000  # choices that lessons are remembered for
_SURPRISE = 20.0  # nats: a choice that was thought less likely counts no more than that


class ImitatingLearner(RivalLearner):
    """PPO over rivals, if it is `reinforced`, and imitation.

    `weight` is how much imitation counts: it may fade.
    """

    weight: float = 1.0
    _seen: Tensor | None = None
    _right: Tensor | None = None

    def teach(self, lessons: Sequence[Lessons], weight: float) -> None:
        """Remember these as well; the earliest are forgotten."""
        self.weight = weight
        seen, right = ([getattr(some, name) for some in lessons] for name in ("seen", "right"))
        if self._seen is not None and self._right is not None:
            seen, right = [self._seen, *seen], [self._right, *right]
        if seen:
            self._seen = torch.cat(seen)[-_REMEMBERED:]
            self._right = torch.cat(right)[-_REMEMBERED:]

    def compute_loss_for_module(
        self,
        *,
        module_id: str,
        config: PPOConfig,  # type: ignore[override]
        batch: dict[str, Any],
        fwd_out: dict[str, Any],
    ) -> Tensor:
        """PPO's, if it counts, and the surprise at what was right."""
        loss = torch.zeros(())
        reinforced: bool = config.learner_config_dict[REINFORCED]
        if reinforced:
            ppo: Any = super().compute_loss_for_module(
                module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
            )
            loss = ppo
        if not self.weight:
            return loss
        surprises = [self._surprise_at_lessons(module_id, len(batch[Columns.ACTIONS]))]
        if not reinforced:
            chosen = batch[Columns.ACTIONS][:, None].long()
            likely = fwd_out[Columns.ACTION_DIST_INPUTS].log_softmax(1).gather(1, chosen)[:, 0]
            surprises.append(-likely[batch[BEST]].clamp_min(-_SURPRISE))
        imitation = torch.cat(surprises).mean().nan_to_num()
        assert self.metrics is not None
        self.metrics.log_value((module_id, "imitation"), imitation.item(), window=1)
        return loss + self.weight * imitation

    def _surprise_at_lessons(self, module_id: str, count: int) -> Tensor:
        if self._seen is None or self._right is None:
            return torch.zeros(0)
        rows = torch.randint(len(self._seen), (count,))
        module: Any = self.module[module_id].unwrapped()
        out = module.forward_train({Columns.OBS: self._seen[rows]})
        likely: Tensor = out[Columns.ACTION_DIST_INPUTS].log_softmax(1)
        right = likely.masked_fill(~self._right[rows], -torch.inf).logsumexp(1)
        return -right.clamp_min(-_SURPRISE)
