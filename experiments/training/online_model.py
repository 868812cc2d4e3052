"""Adapts the cost model, while a policy trains, to what was measured for the rewards."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoshard.benchmark import Measurement, MeasurementStore
from autoshard.cost_model import CostDataset, CostModel
from autoshard.cost_model.calibration import adapted
from autoshard.cost_model.training import one_thread
from autoshard.workload import OperatorOptions
from autoshard.workload.parts import part_of_shard

_FEWEST = 30  # shards before the model is adapted: with fewer it would learn noise
_MOST = 240  # latest shards that it is adapted to


@dataclass(frozen=True)
class Update:
    """An adapted cost model.

    Args:
        model: The model.
        new_shards: Shards measured since the last update.
        error_before: Median relative error of the model before on these.
    """

    model: CostModel
    new_shards: int
    error_before: float


class OnlineModel:
    """Adapts a cost model to the shards of a store that are of training tables alone.

    Args:
        base: Model that training began with; each update starts from it.
        store: Where measurements arrive.
        batch_size: Samples of a batch; other measurements are ignored.
    """

    def __init__(self, base: CostModel, store: Path, batch_size: int) -> None:
        self._base = self.model = base
        self._store = store
        self._batch_size = batch_size
        self._operator: OperatorOptions = base.provenance.operator
        self._seen: set[str] = {m.shard.digest for m in self._measured()}

    @one_thread()
    def update(self) -> Update | None:
        """Adapts the model to new shards; returns None if there are none, or too few in all."""
        measured = self._measured()
        new = [m for m in measured if m.shard.digest not in self._seen]
        if not new or len(measured) < _FEWEST:
            return None
        self._seen.update(m.shard.digest for m in new)
        level = self.model.provenance.reference_level
        measured_ms = np.array([m.normalized_to(level).total_ms for m in new])
        batches = [self._batch_size] * len(new)
        shards = [m.shard for m in new]
        predicted_ms = self.model.compute.predict(shards, batches).total_ms.numpy()
        error = float(np.median(np.abs(predicted_ms / measured_ms - 1)))
        data = CostDataset.of(sorted(measured, key=lambda m: m.measured_at)[-_MOST:])
        compute = adapted(self._base.compute, data)
        provenance = replace(
            self._base.provenance,
            reference_level=data.reference_level,
            hardware=data.hardware,
            versions=data.versions,
            batch_sizes=tuple(sorted({*self._base.provenance.batch_sizes, self._batch_size})),
            num_shards=self._base.provenance.num_shards + len(measured),
        )
        self.model = replace(self._base, compute=compute, provenance=provenance)
        return Update(self.model, len(new), error)

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
