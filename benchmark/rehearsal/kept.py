"""Rehearsals in the store: no round is made twice on one kind of hardware."""

import hashlib
import json
from typing import Any

from autoshard.benchmark.rehearsal.times import Loop, Round
from autoshard.benchmark.store import MeasurementStore
from autoshard.workload import ShardingPlan, ShardingTask, documents

_SCHEMA = documents.Schema("autoshard.rehearsed", 1)


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
        # Versions of measurements do not name TorchRec's.
        level = self._store.level(self._hardware, self._versions.rpartition(", torchrec ")[0])
        return None if level is None else level.forward_ms + level.backward_ms

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
        return {
            "hardware": self._hardware,
            "versions": self._versions,
            "loop": self._loop,
            "ranks": len(task.devices),
            "batch_size": task.batch_size,
            "operator": task.operator.to_json(),
            "tables": [table.to_json() for table in task.tables],
            "plan": None if plan is None else plan.to_json(),
        }
