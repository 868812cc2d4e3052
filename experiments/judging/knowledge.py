"""What a store and a pool know of a task's tables: measured before, and measured now."""

from collections.abc import Sequence

from autoshard.benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from autoshard.cost_model import CostDataset, CostModel, EstimatedCosts, TableFactors
from autoshard.cost_model.calibration import FEWEST, calibrate
from autoshard.experiments.judging.shard_visits import SEEDS, ShardVisits, told_as, verifying_seeds
from autoshard.workload import Shard, ShardingPlan, ShardingTask

_CALIBRATED_AGAIN = 1.5  # times as many shards as the last time are worth it


class Knowledge:
    """A `Measurer` on the cluster's pool, for tasks of one batch size.

    What is measured stays in the pool's store, where others learn from it; and what they measured
    is learned from here. Where the pool measures other hardware than the model's, the model is
    calibrated as soon as there is enough to do so.

    Args:
        pool: measures.
        model: that oracles go by.
        settings: of all shards.
        visits: how the pool is asked.
        unseen: seeds of index batches that are not looked at: those that plans are judged by.
    """

    def __init__(
        self,
        pool: BenchmarkPool,
        model: CostModel,
        settings: MeasureSettings,
        visits: ShardVisits | None = None,
        unseen: Sequence[int] = (),
    ) -> None:
        told = told_as(model, pool)
        self._visits = visits or ShardVisits(pool, settings, verifying_seeds(SEEDS), told=told)
        self._settings = settings
        devices = pool.devices()
        self._room = min(device.memory_bytes for device in devices)
        self.devices = len(devices)
        with MeasurementStore(pool.store) as store:
            self._before = [
                told(measurement)
                for measurement in store.measurements()
                if measurement.ok
                and (measurement.hardware, measurement.versions) == pool.make()
                and measurement.settings.operator == settings.operator
                and measurement.settings.batch_size == settings.batch_size
                and measurement.settings.seed not in unseen
            ]
        self._foreign = pool.make()[0] != model.provenance.hardware
        self._calibrated: tuple[int, CostModel] | None = None

    @property
    def seconds(self) -> float:
        """That measuring took by now."""
        return self._visits.seconds

    @property
    def shards(self) -> int:
        """How many different ones are known."""
        return len({measurement.shard.digest for measurement in self._measurements()})

    def fits(self, shard: Shard) -> bool:
        """Whether one of the devices that measure has room for it."""
        operator, batch = self._settings.operator, self._settings.batch_size
        return operator.shard_bytes(shard) + operator.working_bytes(shard, batch) <= self._room

    def learn(self, shards: Sequence[Shard], seconds: float) -> int:
        """Measure the first of these, as far as the time goes; how many are new."""
        before = self._visits.visits
        self._visits.measure(shards, deadline=self._visits.now_s + seconds)
        return self._visits.visits - before

    def informed(self, oracle: EstimatedCosts) -> EstimatedCosts:
        """The oracle, by all that has been measured."""
        measurements = self._measurements()
        if not measurements:
            return oracle
        data, model = CostDataset.of(measurements), oracle.model
        if self._foreign and len(data) >= FEWEST:
            model = self._of_this_machine(model, data)
        factors = TableFactors(model.compute, oracle.batch_size).learn(data)
        return EstimatedCosts(model, oracle.batch_size, factors)

    def max_ms(
        self, task: ShardingTask, plans: Sequence[ShardingPlan], visits: int
    ) -> Sequence[float]:
        """The slowest device of each plan; infinite where one cannot be measured."""
        return self._visits.max_ms(task, plans, visits)

    def _of_this_machine(self, model: CostModel, data: CostDataset) -> CostModel:
        if self._calibrated is None or len(data) > _CALIBRATED_AGAIN * self._calibrated[0]:
            self._calibrated = len(data), calibrate(model, data)
        return self._calibrated[1]

    def _measurements(self) -> list[Measurement]:
        """One of each shard and index batch, the latest."""
        answers = [*self._before, *self._visits.answers()]
        return list({(m.shard.digest, m.settings): m for m in answers}.values())
