"""Measurements during training, and the cost model that is adapted to them."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from autoshard.benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from autoshard.cost_model import CostDataset, CostModel, EstimatedCosts
from autoshard.cost_model.learning.calibration import adapted
from autoshard.cost_model.threads import one_thread
from autoshard.envs import TableCatalog
from autoshard.experiments.training.config import TrainingSetup
from autoshard.sharders.policy.network import PolicyNetwork
from autoshard.sharders.policy.rollouts import PolicyRollouts, RolloutConfig
from autoshard.workload import Shard, ShardingPlan, UserError
from autoshard.workload.tables.parts import part_of_shard

_MIN_SHARDS = 30  # for adapting the model: with fewer, it would fit noise
_MAX_SHARDS = 240  # the latest ones, which the model is adapted to


@dataclass(frozen=True)
class Update:
    """An adapted cost model."""

    model: CostModel  # adapted to all measurements so far
    new_shards: int  # shards measured since the last update
    error_before: float  # median relative error of the previous model on these


class OnlineCostModel:
    """The pool that measures rewards, and a cost model that is adapted to its measurements.

    Args:
        setup: Options, tables, cost model, from which each update starts, and store.
        seed: Seed of the tasks and plans of `collect`.
        adapt: Whether the cost model is adapted.
    """

    def __init__(self, setup: TrainingSetup, seed: int, adapt: bool) -> None:
        self._config, self._tables, self._store = setup.config, setup.parts["train"], setup.store
        self._base = self._model = setup.model
        self._adapt = adapt
        self.pool = BenchmarkPool(self._store, kind=self._config.devices)
        check_hardware(self._base, self.pool, self._config.cost_model)
        if adapt:
            self.pool.check_store_is_here()  # the cost model learns from the file
        self._seen = {m.shard.digest for m in self._measured()} if adapt else set()
        self._rng = np.random.default_rng(seed)

    @one_thread()
    def update(self) -> Update | None:
        """Adapts the cost model to new measurements; None if there are none, or too few in all."""
        measured = self._measured() if self._adapt else []
        new = [m for m in measured if m.shard.digest not in self._seen]
        if not new or len(measured) < _MIN_SHARDS:
            return None
        self._seen.update(m.shard.digest for m in new)
        level = self._model.provenance.reference_level
        measured_ms = np.array([m.normalized_to(level).total_ms for m in new])
        batch_size = self._config.batch_size
        shards, batches = [m.shard for m in new], [batch_size] * len(new)
        predicted_ms = self._model.compute.predict(shards, batches).total_ms.numpy()
        error = float(np.median(np.abs(predicted_ms / measured_ms - 1)))
        data = CostDataset.of(sorted(measured, key=lambda m: m.measured_at)[-_MAX_SHARDS:])
        base = self._base.provenance
        provenance = replace(
            base,
            reference_level=data.reference_level,
            hardware=data.hardware,
            versions=data.versions,
            batch_sizes=tuple(sorted({*base.batch_sizes, batch_size})),
            num_shards=base.num_shards + len(measured),
        )
        compute = adapted(self._base, data)
        self._model = replace(self._base, compute=compute, provenance=provenance)
        return Update(self._model, len(new), error)

    def _measured(self) -> list[Measurement]:
        """Returns the store's measurements of training tables on the latest hardware."""
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
            and m.settings.batch_size == self._config.batch_size
            and m.settings.operator == self._base.provenance.operator
            and part_of_shard(m.shard) == "train"
        ]

    @one_thread()
    def collect(self, network: PolicyNetwork, model: CostModel) -> int:
        """Measures --collect sampled plans of the policy; returns the number of shards.

        They make the cost model accurate for plans of the policy.
        """
        if not self._config.collect:
            return 0
        oracle = EstimatedCosts(model, self._config.batch_size)
        catalog = TableCatalog(oracle, [table.whole() for table in self._tables])
        task_sampler, player = self._config.task_sampler(), PolicyRollouts(network, oracle)
        shards: list[Shard] = []
        for _ in range(self._config.collect):
            task = catalog.task(task_sampler.sample(catalog, self._rng, 1)[0])
            rng = torch.Generator().manual_seed(int(self._rng.integers(2**31)))
            played = player.run(task, [RolloutConfig(), RolloutConfig(sampled=True)], rng=rng)
            if not played:
                continue  # both episodes were infeasible
            plan = ShardingPlan.of_pieces(task, played[-1].placed)  # the sampled one, if feasible
            shards += [shard for shard in plan.shards(task) if shard is not None]
        self.pool.measure(shards, MeasureSettings(catalog.batch_size, catalog.operator))
        return len(shards)


def check_hardware(model: CostModel, pool: BenchmarkPool, name: str) -> None:
    """Raises UserError if a pool's kind of device is not that of the cost model."""
    known, here = model.provenance.hardware, pool.devices()[0].hardware
    if known.partition(":")[0] != here.partition(":")[0]:
        raise UserError(
            f"the cost model {name} is of {known}, the pool measures on {here}: calibrate it "
            "with train_cost_model.py --calibrate, or end the pool (pool.py stop) and choose "
            "--devices"
        )
