"""Rounds of planning, measuring and learning, with a machine that costs what a formula says."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from formula import formula_ms, measurement

from autoshard.benchmark import Measurement
from autoshard.cost_model import CostDataset, CostModel, EstimatedCosts, TableResiduals
from autoshard.cost_model.pricing.acquisition import measurable_piece, select_measurements
from autoshard.sharders import FusedGreedySharder, MeasuringSharder, RequiredOptions
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Shard,
    Sharder,
    ShardingPlan,
    ShardingTask,
    synthetic_tables,
)
from autoshard.workload.tasks.rules import Rule

KNOWN = synthetic_tables(16, seed=41, profile="small")
STRANGE = tuple(
    EmbeddingTable(f"s{n}", 300_000 + 200_000 * n, 128, 4.0 + 3 * n, zipf_alpha=0.2)
    for n in range(8)
)
TASK = ShardingTask((*KNOWN, *STRANGE), Device.uniform(4, 2**40), 1024)
pytestmark = pytest.mark.filterwarnings("ignore:.*outside of the cost model.s training data")


def dearer(table: EmbeddingTable) -> float:
    """Strange tables cost what nobody would think: a third, or three times."""
    return (3.0 if int(table.name[1]) % 2 else 0.33) if table.name.startswith("s") else 1.0


def step_ms(plan: ShardingPlan) -> float:
    """The slowest forward and the slowest backward."""
    costs = [formula_ms(s, 1024, dearer) for s in plan.shards(TASK) if s is not None]
    return sum(max(direction) for direction in zip(*costs, strict=True))


class World:
    """Measures a shard in half a second, of nobody's time."""

    devices = 2

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.now = 0.0
        self.known: dict[str, Measurement] = {}
        self.rounds: list[list[Shard]] = []

    def clock(self) -> float:
        return self.now

    def fits(self, shard: Shard) -> bool:
        return len(shard) <= 16

    def learn(self, shards: Sequence[Shard], seconds: float) -> int:
        until, before = self.now + seconds, len(self.known)
        self.rounds.append(list(shards))
        for shard in shards:
            if self.now >= until:
                break
            if shard.digest not in self.known:
                self.now += 0.5 / self.devices
                self.known[shard.digest] = measurement(shard, noise=0.01, dearer=dearer)
        return len(self.known) - before

    def informed(self, oracle: EstimatedCosts) -> EstimatedCosts:
        if not self.known:
            return oracle
        residuals = TableResiduals(self.model.compute, 1024)
        return EstimatedCosts(
            self.model, 1024, residuals.learn(CostDataset.of(self.known.values()))
        )


def greedy(oracle: EstimatedCosts) -> Sharder:
    return FusedGreedySharder(oracle)


@pytest.fixture
def world(model: CostModel) -> World:
    return World(model)


def sharder(world: World, oracle: EstimatedCosts, seconds: float = 60.0) -> MeasuringSharder:
    return MeasuringSharder(oracle, greedy, world, seconds, clock=world.clock)


def test_what_is_measured_makes_the_plan_better(world: World, oracle: EstimatedCosts) -> None:
    before = step_ms(greedy(oracle).shard(TASK))
    plan = sharder(world, oracle).shard(TASK)
    plan.check(TASK)
    assert step_ms(plan) < 0.85 * before
    ideal = step_ms(ShardingPlan.table_wise(TASK, [0] * len(TASK.tables))) / 4
    assert step_ms(plan) < 1.3 * ideal
    promised = world.informed(oracle).plan_cost(plan, TASK).step_ms
    # A step has two stages, and each takes as long as its slowest device. Priors that differ in
    # their third digit lead to other measurements, and to predictions 5 to 11 % below the truth.
    assert promised == pytest.approx(step_ms(plan), rel=0.12)


def test_blocks_of_rows_are_measured_like_tables(world: World, oracle: EstimatedCosts) -> None:
    task = replace(TASK, rules=(Rule("row_wise", (STRANGE[0].name,)),))
    measuring = MeasuringSharder(
        oracle, lambda known: RequiredOptions(greedy(known)), world, 10.0, clock=world.clock
    )
    plan = measuring.shard(task)
    plan.check(task)
    assert plan.row_wise == {STRANGE[0].name: 4}
    measured = {p.table.name for shards in world.rounds for s in shards for p in s.pieces}
    assert any(name.startswith(f"{STRANGE[0].name}[") for name in measured)


def test_unusual_tables_are_measured_first(world: World, oracle: EstimatedCosts) -> None:
    sharder(world, oracle).shard(TASK)
    first = [piece.table.name for shard in world.rounds[0][:4] for piece in shard.pieces]
    assert np.mean([name.startswith("s") for name in first]) > 0.7


def test_it_ends_with_its_time_or_when_nothing_changes(
    world: World, model: CostModel, oracle: EstimatedCosts
) -> None:
    sharder(world, oracle, 1e-9).shard(TASK)
    assert not world.rounds
    sharder(world, oracle, 12.0).shard(TASK)
    assert world.now <= 12.0 + 1
    patient = World(model)
    sharder(patient, oracle, 10_000.0).shard(TASK)
    assert patient.now < 1000


def test_what_tells_most_is_asked_and_all_of_it_fits(oracle: EstimatedCosts) -> None:
    def narrow(shard: Shard) -> bool:
        return all(p.width <= 64 and p.table.rows <= 10**6 for p in shard.pieces)

    plan = greedy(oracle).shard(TASK)
    competing = [shard for shard in plan.shards(TASK) if shard is not None]
    asked = select_measurements(oracle, TASK, competing, 20, narrow)
    assert len({shard.digest for shard in asked}) == len(asked) == 20
    assert all(map(narrow, asked))
    wide, high = STRANGE[0], STRANGE[-1]
    assert (measurable_piece(wide, narrow).table, measurable_piece(wide, narrow).width) == (
        wide,
        64,
    )
    stand_in = measurable_piece(high, narrow).table
    assert stand_in == replace(high, rows=high.rows // 2)
    assert select_measurements(oracle, TASK, competing, 5, lambda shard: False) == []
