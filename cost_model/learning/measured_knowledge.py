"""Corrects the oracle by measurements of a task's tables: those in the store, and new ones."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from autoshard.benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from autoshard.cost_model.learning.calibration import MIN_CALIBRATION_SHARDS, calibrate
from autoshard.cost_model.models.model import CostModel
from autoshard.cost_model.networks.dataset import CostDataset, stored_costs
from autoshard.cost_model.pricing.mixed_costs import MixedCosts
from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.cost_model.pricing.repeated_measurements import (
    SEEDS,
    RepeatedMeasurements,
    normalizer,
    selection_seeds,
)
from autoshard.cost_model.uncertainty.residuals import TableResiduals, subsample
from autoshard.workload import EmbeddingTable, Shard

_RECALIBRATION_GROWTH = 1.5  # times as many shards as at the last calibration


class MeasuredKnowledge:
    """A `Measurer` on the cluster's pool, for tasks of one batch size.

    New measurements go into the pool's store; those that the store holds are used too. If the pool
    measures other hardware than the model's, the model is calibrated once there are enough shards.

    Args:
        pool: Measures.
        model: Cost model of the oracles.
        settings: Settings of all shards.
        seeds: Number of index batches that repeat measurements are spread over.
        tables: Tables of the tasks: they come first if the store has too many.
        unseen: Seeds of the index batches by which plans are evaluated; their measurements are not
            used.
        notify: Receives one line for each reason why a shard cannot be measured.
    """

    def __init__(
        self,
        pool: BenchmarkPool,
        model: CostModel,
        settings: MeasureSettings,
        seeds: int = SEEDS,
        tables: Sequence[EmbeddingTable] = (),
        unseen: Sequence[int] = (),
        notify: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._pool, self._normalize = pool, normalizer(model, pool)
        self._repeated = RepeatedMeasurements(
            pool, settings, selection_seeds(seeds), normalize=self._normalize, notify=notify
        )
        self._settings, self._tables, self._unseen = settings, tables, frozenset(unseen)
        devices, self._make = pool.devices(), pool.make()
        self._free_bytes = min(device.memory_bytes for device in devices)
        self.devices = len(devices)
        self._foreign = self._make[0] != model.provenance.hardware or model.probe is not None
        self._calibrated: tuple[int, CostModel] | None = None

    @cached_property
    def _before(self) -> list[Measurement]:
        """The store's measurements when it was first read."""
        settings = self._settings
        with MeasurementStore(self._pool.store) as store:
            found = stored_costs(store, self._make, settings.operator, settings.batch_size)
        return [self._normalize(m) for m in found if m.settings.seed not in self._unseen]

    @property
    def seconds(self) -> float:
        """Seconds spent measuring so far."""
        return self._repeated.seconds

    @property
    def shards(self) -> int:
        """Number of distinct shards with a measurement."""
        return len({measurement.shard.digest for measurement in self._measurements()})

    def fits(self, shard: Shard) -> bool:
        """Returns whether every measuring device has memory for the shard."""
        return self._settings.needed_bytes(shard) <= self._free_bytes

    def learn(self, shards: Sequence[Shard], seconds: float) -> int:
        """Measures as many of these shards as the time allows; returns how many are new."""
        before = self._repeated.repeats
        self._repeated.measure(shards, deadline=self._repeated.now_s + seconds)
        return self._repeated.repeats - before

    def informed(self, oracle: EstimatedCosts) -> EstimatedCosts:
        """Returns the oracle, corrected by all measurements."""
        measurements = self._measurements()
        if not measurements:
            return oracle
        data, model = CostDataset.of(measurements), oracle.model
        if self._foreign and len(data) >= MIN_CALIBRATION_SHARDS:
            model = self._of_this_machine(model, data)
        residuals = TableResiduals(model.compute, oracle.batch_size).learn(data, self._tables)
        return EstimatedCosts(model, oracle.batch_size, residuals)

    def _of_this_machine(self, model: CostModel, data: CostDataset) -> CostModel:
        if self._calibrated is None or len(data) > _RECALIBRATION_GROWTH * self._calibrated[0]:
            # Out-of-distribution tables stay so: corrections hold what is known of their cost.
            self._calibrated = len(data), calibrate(model, subsample(data), extend_range=False)
        return self._calibrated[1]

    def _measurements(self) -> list[Measurement]:
        """Returns those of the store, replaced where the pool has measured again since."""
        answers = self._repeated.answers()
        again = {(answer.shard.digest, answer.settings) for answer in answers}
        return [m for m in self._before if (m.shard.digest, m.settings) not in again] + answers


class MixedKnowledge:
    """A `Measurer` for devices of several kinds, each on the pool of its hardware.

    The same shards are measured on all kinds, side by side.

    Args:
        kinds: Measurer of each kind by hardware, for oracles with as many kinds.
    """

    def __init__(self, kinds: Mapping[str, MeasuredKnowledge]) -> None:
        self._kinds = kinds
        self.devices = min(each.devices for each in kinds.values())

    @property
    def seconds(self) -> float:
        """Seconds spent measuring so far."""
        return max(each.seconds for each in self._kinds.values())

    @property
    def shards(self) -> int:
        """Number of distinct shards with a measurement, of all kinds together."""
        return sum(each.shards for each in self._kinds.values())

    def fits(self, shard: Shard) -> bool:
        """Returns whether every measuring device has memory for the shard."""
        return all(each.fits(shard) for each in self._kinds.values())

    def learn(self, shards: Sequence[Shard], seconds: float) -> int:
        """Measures as many of these shards as the time allows; returns how many are new."""
        with ThreadPoolExecutor(len(self._kinds)) as side_by_side:
            measured = [side_by_side.submit(each.learn, shards, seconds)
                        for each in self._kinds.values()]  # fmt: skip
        return sum(each.result() for each in measured)

    def informed(self, oracle: EstimatedCosts) -> EstimatedCosts:
        """Returns the oracle, corrected by all measurements."""
        parts = oracle.of_kinds()
        return MixedCosts({n: each.informed(parts[n]) for n, each in self._kinds.items()})
