"""Rehearsals in the store: no round is made twice on one kind of hardware."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.benchmark.rehearsals.times import Loop, RankReport, Rehearsal, Round
from autoshard.benchmark.store.measurements import MeasurementStore
from autoshard.workload import (
    Device,
    EmbeddingTable,
    OperatorOptions,
    ShardingPlan,
    ShardingTask,
    documents,
)
from autoshard.workload.arrays import Floats

COMPARABLE_S = 3600.0
_ANY_BYTES = 2**50
_SCHEMA = documents.Schema("autoshard.rehearsed", 2)


@dataclass(frozen=True)
class RehearsedPlan:
    """A plan that ranks in turns have trained by.

    Args:
        task: Its task; devices have no limit of memory.
        plan: The plan.
        passes_ms: Forward, backward, input and the rest of each rank, the mean of rounds:
            [ranks, 4].
        step_ms: Step without exchanges and dense part.
    """

    task: ShardingTask
    plan: ShardingPlan
    passes_ms: Floats
    step_ms: float

    def scaled(self, factor: float) -> "RehearsedPlan":
        """Returns the same with all times longer or shorter by a factor."""
        passes_ms, step_ms = self.passes_ms * factor, self.step_ms * factor
        return RehearsedPlan(self.task, self.plan, passes_ms, step_ms)


def rehearsed_plans(
    store: MeasurementStore, hardware: str, loop: Loop = "plain"
) -> list[RehearsedPlan]:
    """Returns the plans of this package that were rehearsed on a kind of hardware."""
    found = []
    with documents.naming(store.path), documents.fields_of("rehearsal"):
        for document in store.find_documents("rehearsals"):
            _SCHEMA.check(document)
            same = (document["hardware"], document["loop"]) == (hardware, loop)
            if not same or document["plan"] is None:
                continue
            plan = ShardingPlan.from_json(document["plan"])
            task = ShardingTask(
                tuple(EmbeddingTable.from_json(table) for table in document["tables"]),
                Device.uniform(document["ranks"], _ANY_BYTES),
                document["batch_size"],
                OperatorOptions(**document["operator"]),
            )
            rounds = tuple(Round.from_json(each) for each in document["rounds"])
            level_ms = level_of(store, hardware, document["versions"])
            ranks = tuple(RankReport(device.name, None, None) for device in task.devices)
            rehearsal = Rehearsal(ranks, rounds, in_turns=True, level_ms=level_ms, dense_ms=0.0)
            passes = np.mean([[t.passes_ms for t in each] for each in rehearsal.traces], axis=0)
            found.append(RehearsedPlan(task, plan, passes, rehearsal.step_ms))
    return found


def comparable(kept: Mapping[str, Sequence[Round]], count: int) -> dict[str, list[Round]] | None:
    """Returns the latest rounds within an hour of which there are at least `count` for each plan.

    On a shared host the same steps can take 20 % longer on another day, although the reference
    operator does not: what others leave of caches and memory bandwidth differs.

    Args:
        kept: Rounds of each plan.
        count: Rounds that are needed of each.

    Returns:
        Rounds of each plan; None if there are too few in any hour.
    """
    ends = {each.made_at for some in kept.values() for each in some if each.made_at}
    for end in sorted(ends, reverse=True):
        found = made_before(kept, end)
        if all(len(some) >= count for some in found.values()):
            return found
    return None


def made_before(kept: Mapping[str, Sequence[Round]], end: float) -> dict[str, list[Round]]:
    """Returns the rounds of the hour before a time, in seconds since the epoch."""
    return {
        name: [each for each in some if end - COMPARABLE_S <= each.made_at <= end]
        for name, some in kept.items()
    }


def level_of(store: MeasurementStore, hardware: str, versions: str) -> float | None:
    """Returns the time of the reference operator to which this hardware's costs are normalised."""
    # Versions of measurements do not name TorchRec's.
    level = store.level(hardware, versions.rpartition(", torchrec ")[0])
    return None if level is None else level.both_ms


class KeptRehearsals:
    """Rounds of plans that ranks in turns have trained by.

    Args:
        store: Store of measurements.
        hardware: Hardware of the ranks.
        versions: Versions of libraries, TorchRec's too.
        loop: Loop of training.
    """

    def __init__(self, store: MeasurementStore, hardware: str, versions: str, loop: Loop) -> None:
        self._store, self._hardware, self._versions = store, hardware, versions
        self._loop = loop

    @property
    def level_ms(self) -> float | None:
        """Time of the reference operator to which this hardware's costs are normalised."""
        return level_of(self._store, self._hardware, self._versions)

    def rounds(self, task: ShardingTask, plan: ShardingPlan | None) -> tuple[Round, ...]:
        """Returns the rounds of a plan; None stands for the plan of TorchRec's own planner."""
        found = self._store.find_documents("rehearsals", self._key(task, plan))
        with documents.naming(self._store.path), documents.fields_of("rehearsal"):
            for document in found:
                _SCHEMA.check(document)
            return tuple(Round.from_json(each) for d in found for each in d["rounds"])

    def add(self, task: ShardingTask, plan: ShardingPlan | None, new: Round) -> None:
        """Adds a round."""
        rounds = (*self.rounds(task, plan), new)
        body = self._subject(task, plan) | {"rounds": [each.to_json() for each in rounds]}
        self._store.put_document("rehearsals", self._key(task, plan), _SCHEMA.stamp(body))

    def _key(self, task: ShardingTask, plan: ShardingPlan | None) -> str:
        text = json.dumps(self._subject(task, plan), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _subject(self, task: ShardingTask, plan: ShardingPlan | None) -> dict[str, Any]:
        """Returns all that a rehearsal depends on."""
        # By the link TorchRec's own planner decides; it does not change how long passes take.
        link = None if plan is not None else task.objective.link
        return ({} if link is None else {"link": str(link)}) | {
            "hardware": self._hardware,
            "versions": self._versions,
            "loop": self._loop,
            "ranks": len(task.devices),
            "batch_size": task.batch_size,
            "operator": task.operator.to_json(),
            "tables": [table.without_access().to_json() for table in task.tables],
            "plan": None if plan is None else plan.to_json(),
        }
