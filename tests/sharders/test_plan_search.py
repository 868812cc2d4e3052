"""The search on small tasks, held against all steps that there are, and against the objective."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.pricing.prediction import Placed
from autoshard.cost_model.step.common_price import CommonPrice
from autoshard.sharders import LocalSearchSharder
from autoshard.sharders.search.plan_search import PlanSearch
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    Piece,
    ShardingPlan,
    ShardingTask,
    load_tables,
)
from autoshard.workload.arrays import Floats
from autoshard.workload.packing.table_options import TableOptions
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.plans.step_price import StepPrice, stages_of_phases, step_ms
from autoshard.workload.ways import OptionLimits
from autoshard.workload.ways.option import ShardingOption

SLOW = Link(1e7, 1e-3)
OBJECTIVES = (
    Objective("operators", SLOW),
    Objective("operators"),
    Objective("compute"),
)
DEVICES = 3
POWER = 200.0  # a norm that is a maximum but for 0.6 % at most
START_MS = 0.3


class Listed:
    """Costs by hand: so many milliseconds forward and backward of each table, and a start."""

    def __init__(self, each_ms: dict[str, tuple[float, float]]) -> None:
        self._each_ms = each_ms

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """Forward and backward of each piece, by the share of its table that it is."""
        each = [np.array(self._each_ms[s.table.name]) * s.width / s.table.dim for s in pieces]
        return torch.from_numpy(np.array(each)).float()[:, None]

    def price(self, sums: Tensor) -> Tensor:
        """Their sums, with a start where there are any: [..., 1, 2]."""
        return sums + START_MS * (sums > 1e-6)

    def of_devices(self, hardware: Sequence[str]) -> float:
        """Nothing: devices are of one kind."""
        return 0.0

    def common(self, task: ShardingTask) -> CommonPrice:
        """Nothing: a split takes what its pieces do."""
        return CommonPrice(None, task)


def by_hand(objective: Objective, seed: int) -> tuple[ShardingTask, Listed]:
    """Ten tables: some are heavy forward, some backward, some wide and cheap."""
    rng = np.random.default_rng(seed)
    kinds = [(4.0, 1.0, 16), (1.0, 4.0, 16), (0.5, 0.5, 128)]
    tables, each = [], {}
    for number in range(10):
        forward, backward, dim = kinds[number % 3]
        tables.append(EmbeddingTable(f"t{number}", 1000, dim, 10.0))
        each[f"t{number}"] = (forward * rng.uniform(0.5, 2), backward * rng.uniform(0.5, 2))
    task = ShardingTask(tuple(tables), Device.uniform(DEVICES, 2**40), 1024, objective=objective)
    return task, Listed(each)


def stages_of(task: ShardingTask, pricing: Listed, placed: Placed) -> Floats:
    """Of each device: [devices, stages]."""
    columns = np.zeros(DEVICES)
    amounts = torch.zeros(DEVICES, 1, 2)
    for piece, device in placed:
        columns[device] += piece.output_width
        amounts[device] += pricing.amounts([piece])[0]
    forward, backward = pricing.price(amounts)[:, 0].double().numpy().T
    exchange = StepPrice.of_task(task).exchange_ms(columns)
    phases = np.stack([forward, backward, exchange, exchange], axis=-1)
    return stages_of_phases(task.objective, phases)


def plan_ms(task: ShardingTask, pricing: Listed, placed: Placed) -> float:
    return float(step_ms(stages_of(task, pricing, placed)))


def one_step_from(placed: Placed) -> Iterator[Placed]:
    """Every move of a piece and every swap of two."""
    pieces, homes = [piece for piece, _ in placed], [home for _, home in placed]
    for number in range(len(pieces)):
        for device in range(DEVICES):
            yield list(zip(pieces, [*homes[:number], device, *homes[number + 1 :]], strict=True))
    for one, other in combinations(range(len(pieces)), 2):
        swapped = list(homes)
        swapped[one], swapped[other] = homes[other], homes[one]
        yield list(zip(pieces, swapped, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_search_minimises_what_a_step_takes(objective: Objective, seed: int) -> None:
    task, pricing = by_hand(objective, seed)
    start = ShardingPlan.table_wise(task, [0] * 10).placed(task)
    search = PlanSearch(pricing, task, POWER, Sharded(start))
    for split in (False, True):
        search.descend(split)
        placed = search.placed()
        least = plan_ms(task, pricing, placed)
        waits = stages_of(task, pricing, placed)
        assert least <= search.objective() + 1e-6
        slack = DEVICES ** (1 / POWER)
        assert search.objective() <= sum(waits.max(0)) * slack
        if not split:
            assert plan_ms(task, pricing, start) > 1.5 * least
            others = (plan_ms(task, pricing, other) for other in one_step_from(placed))
            assert min(others) >= least / slack
        search = PlanSearch(pricing, task, POWER, Sharded(placed))


@pytest.mark.parametrize("objective", OBJECTIVES[:3], ids=str)
def test_every_objective_is_best_served_by_its_own_search(objective: Objective) -> None:
    for seed in range(3):
        task, pricing = by_hand(objective, seed)
        other, _ = by_hand(Objective("compute"), seed)
        found = []
        for asked in (task, other):
            start = ShardingPlan.table_wise(asked, [n % DEVICES for n in range(10)]).placed(asked)
            search = PlanSearch(pricing, asked, POWER, Sharded(start))
            search.descend(split=True)
            found.append(plan_ms(task, pricing, search.placed()))
        assert found[0] <= found[1]


def test_what_holds_up_a_stage_is_reported_the_longest_stage_first() -> None:
    task, pricing = by_hand(Objective("operators", SLOW), 0)
    # Forward-heavy tables on device 0, backward-heavy on 1, wide ones on 2.
    placed = ShardingPlan.table_wise(task, [n % 3 for n in range(10)]).placed(task)
    waits = stages_of(task, pricing, placed)
    assert waits.argmax(0).tolist() == [0, 1, 2, 2]
    longest = np.argsort(-np.array([*waits.max(0)[:2], 2 * waits.max(0)[2]])).tolist()
    assert PlanSearch(pricing, task, POWER, Sharded(placed)).slowest == longest


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_plans_by_a_cost_model_cost_what_the_search_says(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...], objective: Objective
) -> None:
    task = ShardingTask(tables[:12], Device.uniform(4, 2**40), 1024, objective=objective)
    plan = LocalSearchSharder(oracle).shard(task)
    found = PlanSearch(oracle.expectation(), task, POWER, Sharded(plan.placed(task))).objective()
    shards = plan.shards(task)
    prices = oracle.prices([shard for shard in shards if shard is not None])
    assert None not in shards
    columns = np.array([shard.total_dim for shard in shards if shard is not None], float)
    stages = StepPrice.of_task(task).stages_ms(
        prices.forward_ms.double().numpy(), prices.backward_ms.double().numpy(), columns
    )
    told = sum(float(stage.max()) for stage in stages)
    assert told <= found * (1 + 1e-5)
    assert found <= told * 4 ** (1 / POWER) * (1 + 1e-5)


@pytest.mark.parametrize("nodes", [1, 2])
def test_steps_between_all_options_are_priced_as_the_plans_that_they_lead_to(nodes: int) -> None:
    link = Link(1e10, 3e-5)
    objective = Objective("step", Network(link, Link(5e9, 5e-5), 2) if nodes > 1 else link)
    drawn = tuple(load_tables("synthetic:200:6:small")[:10])
    task = ShardingTask(drawn, Device.uniform(4, 10**12), 4096, objective=objective)
    oracle = EstimatedCosts(load_model("cpu").for_objective(objective, 4), 4096)
    hot_rows = {table.name: 16 for table in drawn if table.rows > 100}
    options = TableOptions(OptionLimits(task, hot_rows=hot_rows, hash_ids=nodes > 1))
    rng = np.random.default_rng(nodes)
    start = Sharded([(table.whole(), int(rng.integers(4))) for table in drawn])
    search, seen = PlanSearch(oracle.expectation(), task, 12.0, start), set[ShardingOption]()
    for _ in range(60):
        number = int(rng.integers(len(drawn)))
        known = options.of(search.table_of(number))
        option = known[int(rng.integers(len(known)))]
        changes = search.changes_to(number, option)
        if not changes:
            continue
        (after_ms,) = search.price(changes[:1])
        search._apply(changes[0])
        seen.add(replace(option, first=0))
        assert search.objective() == pytest.approx(after_ms, rel=1e-5)
        plan = search.sharded().plan(task)
        plan.check(task)
        assert search.step_ms == pytest.approx(oracle.step_ms(plan, task), rel=1e-5)
    assert len(seen) >= 5


def test_devices_that_are_the_slowest_together_are_all_relieved() -> None:
    """A split relieves one of them, which alone shortens no step."""
    tables = tuple(EmbeddingTable(f"t{number}", 10_000, 128, 4.0) for number in range(12))
    objective = Objective("operators", Link(1e8, 1e-5))  # so slow that columns count
    task = ShardingTask(tables, Device.uniform(48, 2**40), 4096, objective=objective)
    oracle = EstimatedCosts(load_model("cpu").for_objective(objective, 48), 4096)
    start = ShardingPlan.table_wise(task, list(range(12)))
    search = PlanSearch(oracle.expectation(), task, 12.0, Sharded.of(start, task))
    before_ms = search.step_ms
    search.descend(split=True)
    assert search.step_ms < 0.5 * before_ms
    assert oracle.step_ms(search.sharded().plan(task), task) == pytest.approx(search.step_ms)
