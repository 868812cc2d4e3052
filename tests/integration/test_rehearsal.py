"""Training by a plan: sharded in whatever way, a model learns what it would learn in one piece."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.rehearsals import kept
from autoshard.benchmark.rehearsals.kept import comparable, made_before
from autoshard.benchmark.rehearsals.times import RankReport, Rehearsal, Round, Step
from autoshard.benchmark.rehearsals.trace import (
    BACKWARD,
    DENSE,
    FORWARD,
    INPUT,
    PHASES,
    Event,
    Trace,
    TracedStep,
    compose,
)
from autoshard.integration.rehearsal import rank_group
from autoshard.integration.rehearsal.model import RehearsedModel, draw_batch, fill, in_model
from autoshard.integration.rehearsal.rank_group import Effort, RankGroup
from autoshard.integration.rehearsal.training import BATCHES, LEARNING_RATE
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    OperatorOptions,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.plans.replicas import ReplicaGroups
from autoshard.workload.tables.operators import Optimizer
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

STEPS = 20
TABLES = (
    EmbeddingTable("wide", 300, 32, 3.0),
    EmbeddingTable("of two.features", 100, 16, 4.0, features=2),
    EmbeddingTable("hot", 50, 24, 6.0, zipf_alpha=1.1),
    EmbeddingTable("weighted", 80, 16, 2.0, weighted=True),
)
_COPIED: dict[int, int] = {}  # on no rank in particular
_BY_ROWS = {-1: 0}  # in blocks of rows on all ranks
_NODE_0, _NODE_1, _NODE = -2, -4, 2  # in blocks of rows on the two ranks of a node
# Columns of each table by rank. Of the first even plan all slices are as wide; in the uneven ones
# ranks come in any order; in the last rank 0 holds all tables together, and the others nothing.
PLANS = {
    "even on 2": (2, [{0: 16, 1: 16}, {0: 8, 1: 8}, {0: 12, 1: 12}, {0: 8, 1: 8}]),
    "uneven on 2": (2, [{1: 28, 0: 4}, {0: 4, 1: 12}, {1: 24}, {1: 12, 0: 4}]),
    "co-located on 2": (2, [{0: 32}, {0: 16}, {0: 24}, {0: 16}]),
    "uneven on 4": (4, [{3: 20, 0: 8, 2: 4}, {1: 4, 2: 12}, {2: 20, 1: 4}, {0: 4, 3: 12}]),
    "co-located on 4": (4, [{1: 32}, {1: 16}, {3: 24}, {3: 16}]),
    "copies on 2": (2, [{0: 16, 1: 16}, _COPIED, {1: 24}, _COPIED]),
    "copies alone on 4": (4, [_COPIED] * 4),
    "rows on 2": (2, [_BY_ROWS, {0: 4, 1: 12}, _BY_ROWS, {0: 16}]),
    "rows alone on 4": (4, [_BY_ROWS] * 4),
    "all ways on 2": (2, [{0: 20, 1: 12}, _BY_ROWS, {1: 24}, _COPIED]),
    "all ways on 4": (4, [_BY_ROWS, _COPIED, {2: 12, 3: 12}, {0: 16}]),
    "rows of nodes on 4": (4, [{_NODE_1: 32}, {0: 4, 3: 12}, {_NODE_0: 24}, _COPIED]),
    "grid on 4": (4, [{_NODE_0: 20, _NODE_1: 12}, {_NODE_0: 16}, _BY_ROWS, {2: 16}]),
    "hot rows on 2": (2, [{0: 20, 1: 12}, {0: 16}, {1: 24}, {1: 16}]),
    "hot rows on 4": (4, [_BY_ROWS, {1: 16}, {2: 12, 3: 12}, _COPIED]),
    "hashed ids on 4": (4, [_BY_ROWS, {1: 16}, {_NODE_0: 24}, _COPIED]),
}
HOT_ROWS = {
    "hot rows on 2": {"of two.features": 7, "hot": 20, "weighted": 1},
    "hot rows on 4": {"wide": 30, "of two.features": 99, "hot": 5},
    "hashed ids on 4": {"wide": 0, "hot": 0},
}


NODES = Network(Link(1e9), Link(1e8), _NODE)


def task_of(ranks: int, batch_size: int = 32) -> ShardingTask:
    devices = Device.uniform(ranks, 2**30)
    objective = Objective("operators", NODES if ranks > _NODE else None)
    operator = OperatorOptions(optimizer="sgd")
    return ShardingTask(TABLES, devices, batch_size, operator, objective=objective)


def plan_of(ranks: int, columns: list[dict[int, int]]) -> ShardingPlan:
    placements = []
    for table, widths in zip(TABLES, columns, strict=True):
        if widths == _BY_ROWS:
            placements.append(Placement(table.name, 0, table.dim, 0, ranks))
            continue
        start = 0
        for rank, width in widths.items():
            blocks, device = (1, rank) if rank >= 0 else (_NODE, _NODE_0 - rank)
            placements.append(Placement(table.name, start, width, device, blocks))
            start += width
    copied = (t.name for t, widths in zip(TABLES, columns, strict=True) if widths == _COPIED)
    return ShardingPlan(tuple(placements), ranks, dict.fromkeys(copied, DATA_PARALLEL))


def with_hot(plan: ShardingPlan, name: str) -> ShardingPlan:
    options = {table: ShardingOption(hot_rows=n) for table, n in HOT_ROWS.get(name, {}).items()}
    return replace(plan, options={**plan.options, **options})


@pytest.fixture(scope="module")
def stages(cluster: object) -> Iterator[dict[int, RankGroup]]:
    """Two ranks that compute at once, and four that take turns, on two cores."""
    with (
        closing(RankGroup(2, "cpu", in_turns=False)) as two,
        closing(RankGroup(4, "cpu", in_turns=True, clears_caches=False)) as four,
    ):
        yield {2: two, 4: four}


@pytest.fixture(scope="module")
def pipelined(cluster: object) -> Iterator[RankGroup]:
    """Two ranks that take turns in TorchRec's pipeline."""
    with closing(RankGroup(2, "cpu", in_turns=True, loop="pipelined")) as group:
        yield group


@pytest.fixture(scope="module")
def in_one_piece() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of tables after so many steps, in this process, nothing sharded."""
    return learned("sgd")


def learned(
    optimizer_name: Optimizer, hot: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by any optimizer of tables; that of dense layers is always SGD."""
    task = task_of(1)
    torch.manual_seed(0)
    model = RehearsedModel(TABLES, task.operator, "cpu")
    tables = {}
    for number, (table, path) in enumerate(in_model(TABLES).items()):
        collection, _, name = path.partition(".")
        bags = getattr(model, collection).embedding_bags
        tables[table] = bags[name].weight
        with torch.no_grad():
            fill(tables[table], number, TABLES[number].rows, 0, 0)
    of_tables = {
        "sgd": partial(torch.optim.SGD, lr=LEARNING_RATE),
        "adagrad": partial(torch.optim.Adagrad, lr=LEARNING_RATE, eps=1e-8),
    }[optimizer_name]
    dense = (p for n, p in model.named_parameters() if "embedding_bags" not in n)
    optimizers = [torch.optim.SGD(dense, lr=LEARNING_RATE), of_tables(tables.values())]
    losses = []
    for step in range(STEPS):
        every = slice(0, task.batch_size)
        batch = draw_batch(TABLES, task.batch_size, step % BATCHES, every, hot=hot)
        model.zero_grad()
        loss, _ = model(batch.inputs())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, {name: weights.detach() for name, weights in tables.items()}


def put_together(parts: list[list[object]]) -> dict[str, torch.Tensor]:
    """Whole tables of what ranks hold; what nobody holds is NaN."""
    found = {table.name: torch.full((table.rows, table.dim), torch.nan) for table in TABLES}
    for part in (part for of_rank in parts for part in of_rank):
        rows, columns = part.weights.shape
        ids = torch.arange(len(found[part.table])) if part.ids is None else part.ids
        ids = ids[part.row : part.row + rows]
        found[part.table][ids, part.column : part.column + columns] = part.weights
    return found


@pytest.mark.parametrize("name", [*PLANS, "torchrec"])
def test_losses_and_weights_are_those_of_the_model_in_one_piece(
    name: str,
    stages: dict[int, RankGroup],
    in_one_piece: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    """TorchRec's own plan may copy tables and split them by rows, so it has its own check."""
    ranks, columns = PLANS.get(name, (2, []))
    plan = plan_of(ranks, columns) if columns else None
    if plan is not None:
        plan = with_hot(plan, name)
    on = stages[ranks]
    on.prepare(name, task_of(ranks), plan)
    rehearsal = on.train(name, STEPS, warm_up=0)
    weights = put_together(on.parts(name))
    on.forget(name)
    losses, tables = learned("sgd", hot=True) if name in HOT_ROWS else in_one_piece
    assert rehearsal.losses == pytest.approx(losses, abs=1e-5)
    for table, expected in tables.items():
        torch.testing.assert_close(weights[table], expected, atol=1e-5, rtol=0)
    moved = [fresh_weights(n) - tables[table.name] for n, table in enumerate(TABLES)]
    assert all(float(change.abs().max()) > 1e-4 for change in moved)  # they did learn


@pytest.mark.parametrize(
    "name",
    ["uneven on 2", "copies on 2", "all ways on 4", "grid on 4", "hot rows on 4"],
)
def test_adagrad_learns_the_same_in_all_ways(name: str, stages: dict[int, RankGroup]) -> None:
    ranks, columns = PLANS[name]
    task = replace(task_of(ranks), operator=OperatorOptions(optimizer="adagrad"))
    stages[ranks].prepare(name, task, with_hot(plan_of(ranks, columns), name))
    rehearsal = stages[ranks].train(name, STEPS, warm_up=0)
    weights = put_together(stages[ranks].parts(name))
    stages[ranks].forget(name)
    losses, tables = learned("adagrad", hot=name in HOT_ROWS)
    assert rehearsal.losses == pytest.approx(losses, abs=1e-5)
    for table, expected in tables.items():
        torch.testing.assert_close(weights[table], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "consecutive"), [("uneven on 2", False), ("all ways on 2", True)])
def test_copies_on_two_groups_learn_what_one_model_learns(
    name: str,
    consecutive: bool,
    stages: dict[int, RankGroup],
    in_one_piece: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    """Averaged after each step of SGD on half a batch, weights are those of a step on all of it."""
    ranks, columns = PLANS[name]
    groups = ReplicaGroups(4, ranks, consecutive)
    stages[4].prepare(name, task_of(4), replace(plan_of(ranks, columns), replicas=groups))
    rehearsal = stages[4].train(name, STEPS, warm_up=0)
    parts = stages[4].parts(name)
    stages[4].forget(name)
    losses, tables = in_one_piece
    assert rehearsal.losses == pytest.approx(losses, abs=1e-5)
    for number in range(groups.count):
        weights = put_together([parts[rank] for rank in groups.ranks(number)])
        for table, expected in tables.items():
            torch.testing.assert_close(weights[table], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [4, 6])
def test_copies_are_equal_after_each_average(steps: int, stages: dict[int, RankGroup]) -> None:
    groups = ReplicaGroups(4, 2, consecutive=True, sync_interval=3)
    plan = replace(plan_of(*PLANS["rows on 2"]), replicas=groups)
    task = replace(task_of(4), operator=OperatorOptions(optimizer="adagrad"))
    stages[4].prepare("", task, plan)
    stages[4].train("", steps, warm_up=0)
    parts = stages[4].parts("")
    stages[4].forget("")
    copies = [put_together([parts[rank] for rank in groups.ranks(n)]) for n in range(2)]
    worst = max(float((copies[0][t] - copies[1][t]).abs().max()) for t in copies[0])
    assert (worst < 1e-7) == (steps % 3 == 0)
    with pytest.raises(UserError, match="rehearse with a sync interval of 1"):
        stages[4].train_interleaved(task, {"": plan}, Effort())


def test_rows_of_a_node_are_summed_up_inside_and_go_out_as_shares(
    stages: dict[int, RankGroup],
) -> None:
    """What each rank moves in the node and between nodes, forward and backward."""
    name, task, width = "rows of nodes on 4", task_of(4), TABLES[0].dim
    stages[4].prepare(name, task, plan_of(4, PLANS[name][1]))
    (made,) = stages[4].train(name, STEPS, warm_up=0).rounds
    stages[4].forget(name)
    sums, outputs = 4 * task.batch_size * width, 4 * (task.batch_size // 4) * width
    for trace in made.traces[2:]:  # of the node that holds table `wide`
        moved = [(event.over, event.moved_bytes) for event in trace.events]
        assert moved.count(("inside_ring", sums // 2)) == 2
        assert moved.count(("between", outputs)) == 2
    fast, slow = (replace(NODES, between=Link(speed)) for speed in (1e9, 1e6))
    assert compose(made.traces, slow).step_ms > compose(made.traces, fast).step_ms


def test_row_wise_adagrad_learns_the_same_in_whole_tables_and_in_blocks(
    stages: dict[int, RankGroup],
) -> None:
    """It has a state for each row, and a row is in one block."""
    task = replace(task_of(2), operator=OperatorOptions(optimizer="rowwise_adagrad"))
    every = {"whole": [{0: 32}, {1: 16}, {0: 24}, {1: 16}], "rows": [_BY_ROWS] * 4}
    losses, weights = {}, {}
    for name, columns in every.items():
        stages[2].prepare(name, task, plan_of(2, columns))
        losses[name] = stages[2].train(name, STEPS, warm_up=0).losses
        weights[name] = put_together(stages[2].parts(name))
        stages[2].forget(name)
    assert losses["rows"] == pytest.approx(losses["whole"], abs=1e-5)
    for table, expected in weights["whole"].items():
        torch.testing.assert_close(weights["rows"][table], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["uneven on 2", "hot rows on 2"])
def test_a_pipeline_learns_the_same_and_exchanges_lookups_a_step_ahead(
    name: str, pipelined: RankGroup, in_one_piece: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    plan = with_hot(plan_of(*PLANS[name]), name)
    pipelined.prepare("", task_of(2), plan)
    rehearsal = pipelined.train("", STEPS, warm_up=0)
    weights = put_together(pipelined.parts(""))
    pipelined.forget("")
    losses, tables = learned("sgd", hot=True) if plan.hot_rows else in_one_piece
    assert rehearsal.losses == pytest.approx(losses, abs=1e-5)
    for table, expected in tables.items():
        torch.testing.assert_close(weights[table], expected, atol=1e-5, rtol=0)
    events = rehearsal.traces[0][0].events
    assert any(event.moved_bytes is None and event.collective < 0 for event in events)
    (step,) = rehearsal.composed
    slow = [compose(traces, Link(1e4)) for traces in rehearsal.traces]
    assert slow[0].step_ms > 2 * step.step_ms


def test_rounds_are_kept_and_not_made_twice(pipelined: RankGroup, tmp_path: Path) -> None:
    plans = {name: plan_of(*PLANS[name]) for name in ("even on 2", "uneven on 2")}
    with MeasurementStore(tmp_path / "costs.db") as store:
        first = pipelined.train_interleaved(task_of(2), plans, Effort(min_rounds=2), store)
        again = pipelined.train_interleaved(task_of(2), plans, Effort(min_rounds=2), store)
        for name in plans:
            assert again[name].round_ms == pytest.approx(first[name].round_ms, rel=1e-3)
            kept = [each.wall_ms for each in first[name].rounds]
            assert [each.wall_ms for each in again[name].rounds] == kept  # and no new ones
        more = pipelined.train_interleaved(task_of(2), plans, Effort(min_rounds=3), store)
        assert [len(each.rounds) for each in more.values()] == [3, 3]
        for name in plans:
            kept = [each.wall_ms for each in first[name].rounds]
            assert [each.wall_ms for each in more[name].rounds][:2] == kept


def test_only_rounds_of_one_hour_are_compared() -> None:
    def at(*hours: float) -> list[Round]:
        return [Round((), None, (), (), (), 0.0, 3600 * hour) for hour in hours]

    def hours(found: dict[str, list[Round]]) -> dict[str, list[float]]:
        return {name: [each.made_at / 3600 for each in some] for name, some in found.items()}

    rounds = {"a": at(10, 10.1, 20, 20.1), "b": at(10.2, 10.3, 20.2), "c": at(10.1, 10.4)}
    found = comparable(rounds, 2)
    assert found is not None
    assert hours(found) == {"a": [10, 10.1], "b": [10.2, 10.3], "c": [10.1, 10.4]}
    assert comparable(rounds, 3) is None
    assert hours(made_before(rounds, 3600 * 20.5)) == {"a": [20, 20.1], "b": [20.2], "c": []}
    assert comparable({"a": at(0, 0)}, 2) is None  # when they were made is not known


def test_rounds_of_another_day_are_not_mixed_with_new_ones(
    pipelined: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_at(rehearsal: Rehearsal) -> list[float]:
        return [each.made_at for each in rehearsal.rounds]

    plans = {name: plan_of(*PLANS[name]) for name in ("even on 2", "uneven on 2")}
    with MeasurementStore(tmp_path / "costs.db") as store:
        with monkeypatch.context() as patch:
            patch.setattr(kept, "COMPARABLE_S", 0.0)  # each round is of another day
            first = pipelined.train_interleaved(task_of(2), plans, Effort(min_rounds=2), store)
            assert [len(each.rounds) for each in first.values()] == [2, 2]
        again = pipelined.train_interleaved(task_of(2), plans, Effort(min_rounds=2), store)
        assert list(map(made_at, again.values())) == list(map(made_at, first.values()))
        with monkeypatch.context() as patch:  # enough of them, if not as precise as asked for
            patch.setattr(rank_group, "made_before", lambda known, _: {name: [] for name in known})
            effort = Effort(min_rounds=2, seconds=60.0)
            old = pipelined.train_interleaved(task_of(2), plans, effort, store)
            assert list(map(made_at, old.values())) == list(map(made_at, first.values()))
        monkeypatch.setattr(kept, "COMPARABLE_S", 1e-3)
        anew = pipelined.train_interleaved(task_of(2), plans, Effort(min_rounds=2), store)
        for name in plans:
            assert not set(made_at(anew[name])) & set(made_at(first[name]))


def test_more_ranks_than_memory_holds_end_in_one_line(cluster: object) -> None:
    with pytest.raises(UserError, match=r"1000 ranks need 629.1 GB .* alone: at most \d+ fit here"):
        RankGroup(1000, "cpu")


def fresh_weights(number: int) -> torch.Tensor:
    weights = torch.empty(TABLES[number].rows, TABLES[number].dim)
    fill(weights, number, TABLES[number].rows, 0, 0)
    return weights


@pytest.mark.parametrize("ranks", [2, 4])
def test_traces_show_what_each_rank_computes_and_holds(
    ranks: int, stages: dict[int, RankGroup]
) -> None:
    """Two ranks compute at once, four in turns."""
    plan = plan_of(*PLANS[f"co-located on {ranks}"])
    stages[ranks].prepare("held", task_of(ranks), plan)
    rehearsal = stages[ranks].train("held", 3)
    stages[ranks].forget("held")
    held = [{p.table for p in plan.placements if p.device == rank} for rank in range(ranks)]
    assert [rank.tables for rank in rehearsal.ranks] == list(map(len, held))
    assert rehearsal.ranks[0].planned_bytes == plan.device_bytes(task_of(ranks))[0]
    assert rehearsal.ranks[1].peak_bytes > (rehearsal.ranks[1].planned_bytes or 0)
    (made,) = rehearsal.rounds
    assert len(made.wall_ms) == len(made.losses) == 3
    assert made.reference_ms is not None
    for rank, traced in enumerate(made.traces):
        assert traced.phases_ms.shape == (len(PHASES),)
        assert (traced.phases_ms[BACKWARD] > 0) == bool(held[rank])
        assert np.delete(traced.phases_ms, BACKWARD).min() > 0
        assert max(made.wall_ms) >= traced.phases_ms.sum()
    assert rehearsal.in_turns == (ranks == 4)
    sent = [event.moved_bytes for event in rehearsal.traces[0][1].events]
    assert None in sent
    outputs = 4 * 8 * sum(t.dim * t.features for t in TABLES if t.name in held[1]) * (ranks - 1)
    moved = [
        sum(e.moved_bytes or 0 for e in traced.events if e.phase == INPUT) for traced in made.traces
    ]
    assert moved[1] > 1.5 * moved[0] or ranks == 2  # the former receives what all look up
    assert ranks == 2 or outputs in sent  # without the weighted table, whose collection has its own


def trace(*spans: Mapping[int, float], sent: int = 0) -> Trace:
    """A trace with a collective, issued after the first span and awaited after the second."""
    compute = np.zeros((len(spans), len(PHASES)))
    for number, span in enumerate(spans):
        for phase, milliseconds in span.items():
            compute[number, phase] = milliseconds
    return Trace((Event(0, sent, FORWARD), Event(0, None, FORWARD)), compute)


def test_a_step_takes_as_long_as_its_slowest_ranks() -> None:
    slow_first = trace({FORWARD: 8.0}, {}, {BACKWARD: 1.0})
    slow_last = trace({FORWARD: 2.0}, {}, {BACKWARD: 4.0}, sent=1000)
    found = compose([slow_first, slow_last])
    assert found.step_ms == 12
    assert found.waiting_ms[:, FORWARD].tolist() == [0, 6]
    over = compose([slow_first, slow_last], Link(1e6, 0.5e-3))  # 1 ms, and 0.5 ms to begin
    assert over.step_ms == pytest.approx(13.5)


def test_an_exchange_is_hidden_by_what_is_computed_before_it_is_awaited() -> None:
    def rank(beside_ms: float) -> Trace:
        return trace({FORWARD: 1.0}, {DENSE: beside_ms}, {BACKWARD: 1.0}, sent=4000)

    assert compose([rank(3.0)] * 2, Link(1e6)).step_ms == pytest.approx(6)  # 4 ms from 1 on
    assert compose([rank(5.0)] * 2, Link(1e6)).step_ms == pytest.approx(7)
    assert compose([rank(5.0)] * 2, Link(1e6), dense_ms=4.5).step_ms == pytest.approx(6.5)


def test_rounds_are_normalised_to_the_reference_beside_them() -> None:
    def one_round(slowed: float) -> Round:
        steps = [
            Step(TracedStep(trace({FORWARD: ms * slowed}, {}, {}), 100.0, (0.0,) * 7, 0.0), 1.0,
                 2.0 * slowed)
            for ms in (9.0, 10.0, 30.0)
        ]  # fmt: skip
        return Round.of([steps])

    ranks = (RankReport("a", 1, 10, 20),)
    found = Rehearsal(ranks, (one_round(1.0), one_round(1.5), one_round(1.2)), in_turns=True)
    assert found.round_ms == pytest.approx([12.0, 12.0, 12.0])
    assert replace(found, level_ms=2.0).step_ms == pytest.approx(10)
    assert replace(found, in_turns=False).step_ms == 100
    assert found.to_json()["ranks"][0]["phases_ms"][FORWARD] == pytest.approx(12.0)
    again = [Round.from_json(json.loads(json.dumps(each.to_json()))) for each in found.rounds]
    assert replace(found, rounds=tuple(again)).round_ms == pytest.approx(found.round_ms)


@pytest.mark.parametrize(("slower", "largest_bias"), [(1.0, 0.025), (2.0, 0.01)])
def test_noise_is_not_held_against_ranks_that_are_balanced(
    slower: float, largest_bias: float
) -> None:
    """Of eight equal ranks that deviate by 0.5 of 10 ms, the slowest of a round takes 10.7."""
    rng, rounds, steps_ms = np.random.default_rng(0), 5, list[float]()
    ranks = tuple(RankReport(f"cpu{n}", None, None) for n in range(8))
    for _ in range(100):
        drawn = 10 + 0.5 * rng.standard_normal((rounds, len(ranks)))
        drawn[:, 0] *= slower
        made = tuple(
            Round(
                tuple(trace({FORWARD: ms}, {}, {}) for ms in every),
                None,
                (0.0,),
                ((0.0,),),
                (0.0,),
                0.0,
            )
            for every in drawn
        )
        found = Rehearsal(ranks, made, in_turns=True)
        steps_ms.append(found.step_ms)
        if slower > 1:  # where one rank always waits for nobody, rounds are what it took
            assert found.round_ms == pytest.approx(drawn.max(1).tolist())
    assert abs(np.mean(steps_ms) / (10 * slower) - 1) < largest_bias


def test_what_does_not_fit_is_reported_before_training(stages: dict[int, RankGroup]) -> None:
    plan = plan_of(*PLANS["even on 2"])
    with pytest.raises(UserError, match=r"batch of 33 samples cannot be split evenly .* take 32"):
        stages[2].prepare("odd", task_of(2, batch_size=33), plan)
    with pytest.raises(PlanError, match="the plan is for 2 devices, the task has 4"):
        stages[4].prepare("few", task_of(4), plan)
    memory = sum(device.memory_bytes for device in stages[2].devices())  # they share it
    vast = EmbeddingTable("vast", memory // 16 // 4 + 1, 16, 1.0)
    task = ShardingTask((vast,), Device.uniform(2, 2**50), 32)
    with pytest.raises(PlanError, match=r"device 0 \(cpu.*\) would hold .* more than its"):
        stages[2].prepare("vast", task, ShardingPlan.table_wise(task, [0]))
