"""How a policy is learned: which learner, and its numbers."""

from dataclasses import dataclass, field
from typing import Literal

from autoshard.sharders.policy_network import PolicyShape
from autoshard.workload.bounds import check_bounds

LearnerName = Literal["critic", "rivals", "reinforce", "imitation", "both"]


@dataclass(frozen=True)
class Hyperparameters:
    """Of PPO and of the policy.

    Args:
        learning_rate: of Adam.
        epochs: passes over what an iteration has sampled; of all learners but `reinforce`, like the
            next two.
        minibatch: steps in a gradient.
        clip: how far the odds of a choice may move in an iteration.
        entropy: weight of staying undecided.
        gae_lambda: of generalised advantages; 1 trusts returns alone, 0 the critic alone.
        rivals: games of one task, whose mean is the baseline of learners without a critic.
        lessons: tasks a teacher prepares for an iteration of those that imitate.
        imitation: weight of imitation beside PPO; it fades to nothing over the run.
        shape: of the network.
    """

    learning_rate: float = 1e-3
    epochs: int = 3
    minibatch: int = 1024
    clip: float = 0.2
    entropy: float = 0.0
    gae_lambda: float = 0.98
    rivals: int = 8
    lessons: int = 16
    imitation: float = 0.1
    shape: PolicyShape = field(default_factory=PolicyShape)

    def check(self) -> None:
        """UserError unless the numbers make sense."""
        positive = (
            "learning_rate", "epochs", "minibatch", "clip", "shape.hidden", "shape.encoded",
        )  # fmt: skip
        check_bounds(
            self,
            "hyper.",
            at_least={
                "entropy": 0,
                "gae_lambda": 0,
                "rivals": 2,
                "lessons": 1,
                "imitation": 0,
                "shape.sharpness": 0,
            },
            more_than=dict.fromkeys(positive, 0),
            up_to={"gae_lambda": 1},
        )
