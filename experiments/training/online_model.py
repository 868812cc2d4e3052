"""The cost model while a policy trains: it learns from what was measured for the rewards."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoshard.benchmark import Measurement, MeasurementStore
from autoshard.cost_model import CostDataset, CostModel
from autoshard.cost_model.calibration import adapted
from autoshard.cost_model.training import one_thread
from autoshard.workload import OperatorOptions
from autoshard.workload.parts import part_of_shard

_FEWEST = 30  # shards before the model is touched: with fewer it would learn noise
_MOST = 240  # of the latest ones that it is adapted to


@dataclass(frozen=True)
class Update:
    """What measuring taught. `error_before`: of the model on shards it had not learned from."""

    model: CostModel
    new_shards: int
    error_before: float


class OnlineModel:
    """Adapts a cost model to the shards of a store, and says how wrong it was about them.

    Shards of test tables in the store teach nothing.

    Args:
        base: the model that training began with; each update starts from it.
        store: where measurements arrive.
        batch_size: of those that count.
    """

    def __init__(self, base: CostModel, store: Path, batch_size: int) -> None:
        self._base = self.model = base
        self._store = store
        self._batch_size = batch_size
        self._operator: OperatorOptions = base.provenance.operator
        self._seen: set[str] = {m.shard.digest for m in self._measured()}

    @one_thread()
    def update(self) -> Update | None:
        """Adapt the model if there are new shards; None if there are none."""
        measured = self._measured()
        new = [m for m in measured if m.shard.digest not in self._seen]
        if not new or len(measured) < _FEWEST:
            return None
        self._seen.update(m.shard.digest for m in new)
        level = self.model.provenance.quiet
        told = np.array([m.told_at(level).total_ms for m in new])
        batches = [self._batch_size] * len(new)
        said = self.model.compute.predict([m.shard for m in new], batches).total_ms.numpy()
        data = CostDataset.of(sorted(measured, key=lambda m: m.measured_at)[-_MOST:])
        compute = adapted(self._base.compute, data)
        provenance = replace(
            self._base.provenance,
            quiet=data.quiet,
            hardware=data.hardware,
            versions=data.versions,
            batch_sizes=tuple(sorted({*self._base.provenance.batch_sizes, self._batch_size})),
            num_shards=self._base.provenance.num_shards + len(measured),
        )
        self.model = replace(self._base, compute=compute, provenance=provenance)
        return Update(self.model, len(new), float(np.median(np.abs(said / told - 1))))

    def _measured(self) -> list[Measurement]:
        if not self._store.exists():
            return []
        with MeasurementStore(self._store) as store:
            found = store.measurements()
        latest = max((m.measured_at for m in found), default=0.0)
        here = {(m.hardware, m.versions) for m in found if m.measured_at == latest}
        return [
            m
            for m in found
            if m.ok
            and (m.hardware, m.versions) in here
            and m.settings.batch_size == self._batch_size
            and m.settings.operator == self._operator
            and part_of_shard(m.shard) == "train"
        ]
