"""A policy as a sharder: alone, in many episodes, with a search; and what it is kept in."""

from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tasks import GIANT, Tables, task_of

from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.envs import Layout
from autoshard.envs.observation import (
    DESCRIBED,
    DEVICE,
    DEVICE_PARTS,
    OBJECTIVE,
    PROGRESS,
    REST,
    TABLE,
)
from autoshard.envs.offers import OPTION_PARTS
from autoshard.envs.options import OPTION_KINDS
from autoshard.sharders import (
    SHARDERS,
    FusedGreedySharder,
    Policy,
    PolicyError,
    PolicySharder,
    SharderContext,
    load_policy,
    make_sharder,
    save_policy,
)
from autoshard.sharders.policy.network import PolicyNetwork, PolicyShape, PolicyVariant
from autoshard.sharders.policy.rollouts import PolicyRollouts, RolloutConfig
from autoshard.sharders.search.option_sets import OptionSets
from autoshard.workload import (
    Device,
    Link,
    Objective,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
    load_tables,
)
from autoshard.workload.packing.first_fit import first_fit_decreasing
from autoshard.workload.packing.pack import pack

LEARNED = ("policy", "autoshard", "cost_fused_search")


def step_ms(oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask) -> float:
    return oracle.plan_cost(plan, task).step_ms


@pytest.mark.parametrize("name", LEARNED)
def test_plans_are_valid_and_repeat(
    name: str, policy: Policy, oracle: EstimatedCosts, tables: Tables
) -> None:
    sharder = make_sharder(name, SharderContext(oracle, policy, seed=3))
    for task in (task_of(tables[:30], 4), task_of(tables[:3], 8), task_of(tables[:1], 1)):
        plan = sharder.shard(task)
        plan.check(task)
        assert plan == sharder.shard(task)


def test_without_training_it_is_as_good_as_the_greedy_by_device_and_table(
    oracle: EstimatedCosts, tables: Tables
) -> None:
    for devices in (2, 5):
        task = task_of(tables[:40], devices)
        (played,) = PolicyRollouts(Policy.untrained().network, oracle).run(task, split=False)
        ours = ShardingPlan.of_pieces(task, played.placed)
        greedy = FusedGreedySharder(oracle).shard(task)
        assert step_ms(oracle, ours, task) <= 1.001 * step_ms(oracle, greedy, task)


def test_each_step_of_the_ladder_is_no_worse(
    policy: Policy, oracle: EstimatedCosts, tables: Tables
) -> None:
    gains = []
    for some in (40, 60):
        task = task_of(tables[:some], 8)
        predictor = StepPredictor(oracle, task)
        steps = [
            predictor.of(PolicySharder(policy, oracle, search=search).shard(task))
            for search in (False, True)
        ]
        alone, searched = (step.expected_ms for step in steps)
        assert alone >= searched
        gains.append(searched / alone)
    assert min(gains) < 0.999  # the styles leave little for the search where tables are few


STRANGE = (*load_tables("hot:12:3"), *load_tables("zipf:12:3"), *load_tables("cold:6:3"))


@pytest.mark.filterwarnings("ignore:.*outside of the cost model.s training data")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    known=st.integers(0, 25),
    strange=st.integers(1, 30),
    devices=st.integers(1, 6),
    fill=st.floats(0.1, 0.8),
    seed=st.integers(0, 99),
)
def test_what_comes_of_a_search_is_never_worse_than_what_it_began_with(
    policy: Policy,
    oracle: EstimatedCosts,
    many_tables: Tables,
    known: int,
    strange: int,
    devices: int,
    fill: float,
    seed: int,
) -> None:
    """By the objective that is told, whether the model knows such tables or not."""
    rng = np.random.default_rng(seed)
    some = [many_tables[n] for n in rng.permutation(len(many_tables))[:known]]
    others = [STRANGE[n] for n in rng.permutation(len(STRANGE))[:strange]]
    tables = tuple(replace(t, name=f"t{n}") for n, t in enumerate((*some, *others)))
    task = task_of(tables, devices, fill)
    predictor = StepPredictor(oracle, task)
    context = SharderContext(oracle, policy, seed=seed)
    found = {}
    for name in ("cost_fused", "policy", "cost_fused_search", "autoshard"):
        with suppress(PlanError):
            found[name] = predictor.of(make_sharder(name, context).shard(task)).expected_ms
    for better, starts in (
        ("autoshard", ("cost_fused", "policy")),
        ("cost_fused_search", ("cost_fused",)),
    ):
        for start in starts:
            if start in found:
                assert found[better] <= found[start] * 1.002, (better, start)  # which is noise


def test_a_table_too_costly_for_one_device_is_split(oracle: EstimatedCosts, tables: Tables) -> None:
    task = task_of((GIANT, *tables[:10]), 4)
    whole = make_sharder("cost_fused", SharderContext(oracle)).shard(task)
    for name in ("policy", "autoshard"):
        split = make_sharder(name, SharderContext(oracle, Policy.untrained())).shard(task)
        split.check(task)
        assert len([p for p in split.placements if p.table == "giant"]) > 1
        assert step_ms(oracle, split, task) < 0.8 * step_ms(oracle, whole, task)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(2, 30),
    devices=st.integers(1, 5),
    fill=st.floats(0.7, 1.0),
    seed=st.integers(0, 99),
)
def test_where_first_fit_packs_a_plan_is_found(
    policy: Policy,
    oracle: EstimatedCosts,
    many_tables: Tables,
    count: int,
    devices: int,
    fill: float,
    seed: int,
) -> None:
    numbers = np.random.default_rng(seed).permutation(len(many_tables))[:count]
    task = task_of(tuple(many_tables[n] for n in numbers), devices, fill)
    sizes = np.array([[task.table_bytes(table) for table in task.tables]])
    packed = first_fit_decreasing(sizes, task.usable_bytes[None]).min() >= 0
    for name in ("policy", "autoshard"):
        sharder = make_sharder(name, SharderContext(oracle, policy))
        if packed:
            sharder.shard(task).check(task)
            continue
        with suppress(PlanError):  # it may still find one, and autoshard may split tables
            sharder.shard(task).check(task)


def test_what_cannot_fit_says_what_is_missing(
    policy: Policy, oracle: EstimatedCosts, tables: Tables
) -> None:
    loose = task_of(tables[:5], 2)
    largest = max(tables[:5], key=loose.table_bytes)
    missing = replace(loose, devices=Device.uniform(2, loose.table_bytes(largest) // 3))
    with pytest.raises(PlanError, match=rf"are missing; the largest tables are {largest.name} \("):
        make_sharder("autoshard", SharderContext(oracle, policy)).shard(missing)
    roomy = [Device(f"d{n}", int(0.8 * loose.table_bytes(largest))) for n in range(12)]
    oversized = replace(loose, devices=tuple(roomy))
    with pytest.raises(PlanError, match=rf"{largest.name} .* splits tables, such as autoshard"):
        make_sharder("cost_fused", SharderContext(oracle)).shard(oversized)
    for name in ("policy", "autoshard"):
        plan = make_sharder(name, SharderContext(oracle, policy)).shard(oversized)
        plan.check(oversized)
        assert len([p for p in plan.placements if p.table == largest.name]) > 1


def test_packing_splits_only_what_it_must(tables: Tables) -> None:
    task = task_of(tables[:10], 3, 0.3)
    assert len(pack(task, split=True)) == 10
    largest = max(task.table_bytes(table) for table in task.tables)
    small = replace(task, devices=Device.uniform(40, largest * 2 // 3))
    pieces = pack(small, split=True)
    ShardingPlan.of_pieces(small, pieces).check(small)
    assert 10 < len(pieces) < 20


def test_naming_devices_otherwise_changes_nothing(policy: Policy) -> None:
    rng = torch.Generator().manual_seed(1)
    order = torch.tensor([3, 0, 2, 1])
    parts = {
        "table": torch.rand(5, TABLE, generator=rng),
        "devices": torch.rand(5, 4, DEVICE, generator=rng),
        "exists": torch.ones(5, 4),
        "allowed": torch.tensor([[1.0, 1, 0, 1]]).expand(5, 4),
        "options": torch.rand(5, len(OPTION_KINDS), len(OPTION_PARTS), generator=rng),
        "objective": torch.rand(5, OBJECTIVE, generator=rng),
        "rest": torch.rand(5, REST, generator=rng),
        "progress": torch.rand(5, PROGRESS, generator=rng),
    }
    logits, known = policy.network(parts)
    moved = {name: parts[name][:, order] for name in ("devices", "exists", "allowed")}
    others, known_too = policy.network({**parts, **moved})
    torch.testing.assert_close(others, logits[:, [*order, *range(4, logits.shape[1])]])
    torch.testing.assert_close(policy.network.values(known_too), policy.network.values(known))
    assert (logits.softmax(1)[:, 2] == 0).all()
    for number in range(len(OPTION_KINDS)):
        parts["options"][:, number, 0] = 0
        forbidden, _ = policy.network(parts)
        assert (forbidden.softmax(1)[:, 4 + number] == 0).all()
        parts["options"][:, number, 0] = 1
    # A device that does not exist is as if it were not there.
    wider = Layout(6)
    assert wider.size > Layout(4).size
    padded = {name: torch.nn.functional.pad(parts[name], (0, 2)) for name in ("exists", "allowed")}
    padded["devices"] = torch.nn.functional.pad(parts["devices"], (0, 0, 0, 2))
    logits, _ = policy.network(parts)
    beside, _ = policy.network({**parts, **padded})
    torch.testing.assert_close(beside[:, [0, 1, 2, 3, *range(6, beside.shape[1])]], logits)


def test_unsafe_devices_are_left_alone_while_there_are_safe_ones(policy: Policy) -> None:
    safe = DESCRIBED + DEVICE_PARTS.index("safe")
    parts = {
        "table": torch.ones(1, TABLE),
        "devices": torch.ones(1, 3, DEVICE),
        "exists": torch.ones(1, 3),
        "allowed": torch.ones(1, 3),
        "options": torch.zeros(1, len(OPTION_KINDS), len(OPTION_PARTS)),
        "objective": torch.ones(1, OBJECTIVE),
        "rest": torch.ones(1, REST),
        "progress": torch.ones(1, PROGRESS),
    }
    parts["devices"][0, :, safe] = torch.tensor([0.0, 1.0, 0.0])
    none = [0] * len(OPTION_KINDS)
    assert policy.network(parts)[0].softmax(1)[0].tolist() == pytest.approx([0, 1, 0, *none])
    parts["devices"][0, :, safe] = 0
    assert (policy.network(parts)[0].softmax(1)[0] > 0).tolist() == [True] * 3 + [False] * len(none)


def test_seconds_are_the_searchs(policy: Policy, oracle: EstimatedCosts, tables: Tables) -> None:
    """The policy's plans come in any case; then the search, until time is over."""
    task = task_of(tables[:40], 8)
    now = count()
    plans = {
        seconds: PolicySharder(
            policy, oracle, search=True, seconds=seconds, clock=lambda: float(next(now))
        ).shard(task)
        for seconds in (0.5, 300.0)
    }
    assert plans[0.5] == PolicySharder(policy, oracle, search=True, seconds=1e-9).shard(task)
    predictor = StepPredictor(oracle, task)
    assert 200 < next(now) < 360  # looks at the clock, which goes on by one each time
    assert predictor.of(plans[300.0]).expected_ms <= predictor.of(plans[0.5]).expected_ms


def test_where_no_episode_places_everything_a_packing_is_improved(
    policy: Policy, oracle: EstimatedCosts, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(tables[:12], 3)
    monkeypatch.setattr(PolicyRollouts, "run", lambda *_arguments, **_options: [])
    predictor = StepPredictor(oracle, task)
    alone, best = (
        predictor.of(PolicySharder(policy, oracle, search=search).shard(task)).expected_ms
        for search in (False, True)
    )
    packed = ShardingPlan.of_pieces(task, pack(task, split=True))
    assert best <= alone < 0.95 * predictor.of(packed).expected_ms


def test_a_policy_that_has_learned_wrong_loses_nothing(
    oracle: EstimatedCosts, tables: Tables
) -> None:
    """It is played side by side with what it began as, in some styles."""
    network = PolicyNetwork(PolicyShape())
    with torch.no_grad():
        network.itself.fill_(-100)  # alone, it prefers the devices that cost most
    policy, start = (
        Policy(network, max_devices=16),
        PolicyRollouts(Policy.untrained().network, oracle),
    )
    ours = PolicyRollouts(network, oracle)
    better = 0
    for first in range(0, 20, 4):
        task = task_of(tables[first : first + 20], 3)
        assert len(set(start.variants) & set(ours.variants)) >= 3
        plan = PolicySharder(policy, oracle).shard(task)
        (alone,) = ours.run(task)
        games = [alone, *start.run(task, [*map(RolloutConfig, start.variants)])]
        told = [
            oracle.step_ms(ShardingPlan.of_pieces(task, episodes.placed), task)
            for episodes, variant in zip(games, [PolicyVariant(), *start.variants], strict=True)
            if variant in ours.variants
        ]
        # Equal devices may be chosen in another order, which may lead to another plan.
        assert oracle.step_ms(plan, task) <= 1.01 * min(told)
        better += min(told) < 0.95 * told[0]
    assert better == 5


@pytest.mark.parametrize("fill", [0.3, 0.95])
def test_a_policy_remembers_that_it_leaves_tables_whole(
    fill: float, oracle: EstimatedCosts, tables: Tables, tmp_path: Path
) -> None:
    """Where halves pay as much as where memory is tight."""
    whole = Policy(PolicyNetwork(PolicyShape(kinds=())).as_greedy(), max_devices=16)
    save_policy(whole, tmp_path / "whole")
    kept = load_policy(tmp_path / "whole")
    giant = replace(GIANT, rows=10_000)
    task = task_of((giant, *tables[:20]), 3, fill)
    plan, split = (
        make_sharder("policy", SharderContext(oracle, some)).shard(task)
        for some in (kept, Policy.untrained())
    )
    plan.check(task)
    assert len(plan.placements) == len(task.tables) < len(split.placements)


def test_a_policy_comes_back_to_the_bit(policy: Policy, tmp_path: Path) -> None:
    save_policy(policy, tmp_path / "kept")
    found = load_policy(tmp_path / "kept")
    assert (found.max_devices, found.trained) == (16, {"tables": "made up"})
    assert found.network.shape == policy.network.shape
    for name, weight in policy.network.state_dict().items():
        assert torch.equal(found.network.state_dict()[name], weight)


def test_policies_that_cannot_serve_say_so(
    policy: Policy, oracle: EstimatedCosts, tables: Tables, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match="serves up to 16 devices, 17 are requested"):
        make_sharder("policy", SharderContext(oracle, policy)).shard(task_of(tables[:20], 17))
    with pytest.raises(PolicyError, match=r"holds no policy: .* these are shipped: cpu"):
        load_policy(tmp_path)
    save_policy(policy, tmp_path / "kept")
    weights = tmp_path / "kept" / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"policy\.json: policy\.safetensors beside it is missing"):
        load_policy(tmp_path / "kept")


def test_names_say_what_they_lack(oracle: EstimatedCosts, policy: Policy) -> None:
    for name, means, lack in (
        ("cost", SharderContext(), "requires a cost model"),
        ("policy", SharderContext(oracle), "name one with --policy"),
        ("autoshard_verified", SharderContext(oracle, policy), "requires a benchmark pool"),
    ):
        with pytest.raises(UserError, match=lack):
            make_sharder(name, means)
    assert {"random", "cost", "cost_fused", "policy", "autoshard"} <= set(SHARDERS)


def test_the_shipped_policy_serves_many_devices(oracle: EstimatedCosts, tables: Tables) -> None:
    shipped = load_policy("cpu")
    assert shipped.max_devices >= 128
    task = task_of(tables, 32)
    PolicySharder(shipped, oracle).shard(task).check(task)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_policy_s_own_choice_of_options_competes() -> None:
    """It gives the largest table rows and small ones copies, table by table."""
    link = Link(1e10, 3e-5)
    drawn = tuple(load_tables("giants:200:3")[:60])
    ample = ShardingTask(drawn, Device.uniform(8, 10**12), 4096, objective=Objective("step", link))
    memory = int(sum(map(ample.table_bytes, drawn)) / 8 / 0.3)
    task = replace(ample, devices=Device.uniform(8, memory))
    oracle = EstimatedCosts(load_model("cpu").for_objective(task.objective, 8), 4096)
    plan = PolicySharder(Policy.untrained(), oracle).shard(task)
    plan.check(task)
    assert plan.row_wise
    assert plan.copied
    greedy_ms = OptionSets(oracle, task).starts()[0].step_ms
    assert oracle.step_ms(plan, task) < 0.99 * greedy_ms
    columns = Policy(PolicyNetwork(PolicyShape(kinds=("split",))).as_greedy(), max_devices=8)
    others = PolicySharder(columns, oracle).shard(task)
    assert oracle.step_ms(plan, task) <= 1.001 * oracle.step_ms(others, task)
