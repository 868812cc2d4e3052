"""Teachers in processes of their own: they prepare the next lessons while the policy learns."""

from collections.abc import Mapping
from typing import Any

import ray

from autoshard.experiments.training.hyperparameters import Hyperparameters
from autoshard.experiments.training.setting import Setting
from autoshard.experiments.training.teacher import Lessons, Teacher
from autoshard.sharders.policy_network import PolicyNetwork, PolicyShape

_CPUS = 0.5  # of a teacher: it gives way to what measures and plays
_SEEDS_APART = 1_000_003


class School:
    """A teacher for each CPU of the cluster but one, at least one.

    Which lessons come of which weights does not depend on who is faster: each time those are handed
    out that were asked for the time before.

    Args:
        setting: what is played, in Ray's store.
        hyperparameters: how many tasks are prepared at a time; the policy's shape.
        seed: of the tasks.
    """

    def __init__(
        self, setting: "ray.ObjectRef[Setting]", hyperparameters: Hyperparameters, seed: int
    ) -> None:
        cpus = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
        remote = ray.remote(_Teaching).options(num_cpus=_CPUS, max_restarts=-1, max_task_retries=-1)
        self._told = ([setting], hyperparameters.shape)
        self._teachers: list[Any] = [remote.remote() for _ in range(max(1, cpus - 1))]
        self._tasks = hyperparameters.lessons
        self._seed = seed * _SEEDS_APART
        self._prepared: list[ray.ObjectRef[Lessons]] = []

    def lessons(self, network: PolicyNetwork) -> list[Lessons]:
        """Those that were prepared; nothing the first time. The next ones go by this network."""
        found: list[Lessons] = ray.get(self._prepared)
        weights = ray.put({name: w.detach().clone() for name, w in network.state_dict().items()})
        share = -(-self._tasks // len(self._teachers))
        self._prepared = []
        for teacher in self._teachers:
            self._seed += 1
            asked = teacher.lessons.remote(*self._told, weights, share, self._seed)
            self._prepared.append(asked)
        return found

    def close(self) -> None:
        """End the teachers."""
        for teacher in self._teachers:
            ray.kill(teacher)


class _Teaching:
    """A `Teacher` as a Ray actor. What it goes by comes with each question, as it lies in Ray's
    store: an actor that starts again would miss what it was made with (ray-project/ray#53727).
    """

    def __init__(self) -> None:
        self._teacher: Teacher | None = None

    def lessons(
        self,
        setting: "list[ray.ObjectRef[Setting]]",
        shape: PolicyShape,
        weights: Mapping[str, Any],
        count: int,
        seed: int,
    ) -> Lessons:
        """Of so many tasks, by the policy with these weights."""
        self._teacher = self._teacher or Teacher(ray.get(setting[0]), shape)
        return self._teacher.lessons(weights, count, seed)
