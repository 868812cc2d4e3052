"""What a store and a pool know of a task's tables: measured before, and measured now."""

from collections.abc import Sequence
from functools import cached_property

from autoshard.benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from autoshard.cost_model import CostDataset, CostModel, EstimatedCosts, TableFactors
from autoshard.cost_model.calibration import FEWEST, calibrate
from autoshard.cost_model.dataset import stored_costs
from autoshard.cost_model.table_factors import few
from autoshard.experiments.judging.shard_visits import SEEDS, ShardVisits, told_as, verifying_seeds
from autoshard.workload import EmbeddingTable, Shard, ShardingPlan, ShardingTask

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
        tables: of tasks: if the store has more than can be learned, these come first.
        unseen: seeds of index batches that are not looked at: those that plans are judged by.
    """

    def __init__(
        self,
        pool: BenchmarkPool,
        model: CostModel,
        settings: MeasureSettings,
        visits: ShardVisits | None = None,
        tables: Sequence[EmbeddingTable] = (),
        unseen: Sequence[int] = (),
    ) -> None:
        self._pool, self._told = pool, told_as(model, pool)
        self._visits = visits or ShardVisits(
            pool, settings, verifying_seeds(SEEDS), told=self._told
        )
        self._settings, self._tables, self._unseen = settings, tables, frozenset(unseen)
        devices, self._make = pool.devices(), pool.make()
        self._room = min(device.memory_bytes for device in devices)
        self.devices = len(devices)
        self._foreign = self._make[0] != model.provenance.hardware
        self._calibrated: tuple[int, CostModel] | None = None

    @cached_property
    def _before(self) -> list[Measurement]:
        """What the store had when it was first asked."""
        settings = self._settings
        with MeasurementStore(self._pool.store) as store:
            found = stored_costs(store, self._make, settings.operator, settings.batch_size)
        return [self._told(m) for m in found if m.settings.seed not in self._unseen]

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
        return self._settings.needed_bytes(shard) <= self._room

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
        factors = TableFactors(model.compute, oracle.batch_size).learn(data, self._tables)
        return EstimatedCosts(model, oracle.batch_size, factors)

    def step_ms(
        self, task: ShardingTask, plans: Sequence[ShardingPlan], visits: int
    ) -> Sequence[float]:
        """What a step takes by each plan; infinite where a shard cannot be measured."""
        return self._visits.step_ms(task, plans, visits)

    def _of_this_machine(self, model: CostModel, data: CostDataset) -> CostModel:
        if self._calibrated is None or len(data) > _CALIBRATED_AGAIN * self._calibrated[0]:
            # Strange tables stay strange: what they cost is known by their factors.
            self._calibrated = len(data), calibrate(model, few(data), acquaint=False)
        return self._calibrated[1]

    def _measurements(self) -> list[Measurement]:
        """Those of the store, but for what is known better by now."""
        answers = self._visits.answers()
        again = {(answer.shard.digest, answer.settings) for answer in answers}
        return [m for m in self._before if (m.shard.digest, m.settings) not in again] + answers
