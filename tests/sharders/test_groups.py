"""Tasks on many devices: played in groups of them, side by side."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tasks import Tables

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import TableCatalog, TaskInstance
from autoshard.sharders import Policy, PolicySharder
from autoshard.sharders.policy import groups, rollouts
from autoshard.sharders.policy.groups import Group, bundled, in_groups
from autoshard.sharders.policy.rollouts import PolicyRollouts
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    Rule,
    ShardingPlan,
    ShardingTask,
    synthetic_tables,
)
from autoshard.workload.packing.admission import RuleMasks

DEVICES = 3 * groups.DEVICES + 2  # so that not all groups have as many
OVER_A_LINK = Objective("operators", Link(5e9, 30e-6))
GIANT = EmbeddingTable("giant", 100_000, 512, 500.0, zipf_alpha=0.8)


@pytest.fixture(autouse=True)
def groups_of_few_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many, and quicker to play."""
    monkeypatch.setattr(groups, "PIECES", 100)


@pytest.fixture(scope="module")
def hundreds() -> Tables:
    """Enough tables for three groups, a costly one among them."""
    return (*synthetic_tables(300, seed=4, profile="small"), GIANT)


def task_of(tables: Tables, fill: float, devices: int = DEVICES) -> ShardingTask:
    """Some devices have three times the memory of others."""
    loose = ShardingTask(tables, Device.uniform(devices, 2**50), 1024, objective=OVER_A_LINK)
    shares = np.linspace(1, 3, devices) / np.linspace(1, 3, devices).sum()
    total = sum(map(loose.table_bytes, tables)) / fill
    rooms = (total * shares).astype(np.int64).tolist()
    return replace(loose, devices=tuple(Device(f"d{n}", room) for n, room in enumerate(rooms)))


def whole_of(catalog: TableCatalog, task: ShardingTask) -> Group:
    masks = RuleMasks(task)
    units = masks.units
    rules = masks if masks.any else None
    instance = TaskInstance(np.arange(len(units)), task.usable_bytes, rules, task.objective)
    return Group(np.arange(len(task.devices)), instance)


def as_one(_catalog: TableCatalog, whole: Group) -> list[Group]:
    return [whole]


def test_each_group_has_its_share(oracle: EstimatedCosts, hundreds: Tables) -> None:
    task = task_of(hundreds, 0.5)
    catalog = TableCatalog(oracle, RuleMasks(task).units, split=True)
    found = in_groups(catalog, whole_of(catalog, task))
    assert len(found) == 3
    assert sorted(np.concatenate([group.devices for group in found]).tolist()) == list(
        range(DEVICES)
    )
    assert max(len(group.devices) for group in found) - min(len(g.devices) for g in found) <= 1
    columns = Counter[str]()
    for group in found:
        for number in group.instance.units.tolist():
            columns[catalog.units[number].name] += catalog.units[number].columns
        assert (group.instance.memory_bytes == task.usable_bytes[group.devices]).all()
    assert columns == {table.name: table.dim for table in task.tables}
    homes = [{catalog.units[n].name for n in group.instance.units.tolist()} for group in found]
    assert sum("giant" in names for names in homes) > 1  # no group could even it out
    for amounts in (catalog.alone_ms, catalog.columns):
        each = np.array([float(amounts[torch.from_numpy(g.instance.units)].sum()) for g in found])
        each /= [len(group.devices) for group in found]
        assert each.max() < 1.1 * each.mean()


def test_rules_and_few_devices_leave_it_whole(oracle: EstimatedCosts, hundreds: Tables) -> None:
    task = task_of(hundreds, 0.1)
    few = task_of(hundreds, 0.1, 2 * groups.DEVICES - 1)
    ruled = replace(task, rules=(Rule("apart", (hundreds[0].name, hundreds[1].name)),))
    for each in (few, ruled):
        catalog = TableCatalog(oracle, RuleMasks(each).units, split=True)
        (only,) = in_groups(catalog, whole_of(catalog, each))
        assert len(only.devices) == len(each.devices)


@pytest.mark.parametrize("fill", [0.3, 0.9])
def test_plans_in_groups_are_as_good_as_in_one(
    fill: float, oracle: EstimatedCosts, hundreds: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what each group knows of all-to-alls is what they take among all devices."""
    task = task_of(hundreds, fill)
    playing = PolicyRollouts(Policy.untrained().network, oracle)
    ways = playing.configs(len(task.tables), DEVICES)
    (ours,) = playing.run(task, ways)
    plan = ShardingPlan.of_pieces(task, ours.placed)
    plan.check(task)
    # Pieces of one table that meet on a device become one, which takes less: where it is tight.
    told = oracle.step_ms(plan, task) / ours.plan_ms
    assert (0.999 if fill < 0.5 else 0.9) < told < 1.001
    monkeypatch.setattr(rollouts, "in_groups", as_one)
    best = min(episodes.plan_ms for episodes in playing.run(task, ways))
    assert ours.plan_ms < 1.05 * best  # tables are few


def test_of_two_groups_the_slow_one_is_evened_out(
    oracle: EstimatedCosts, hundreds: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the second has three quarters of the tables."""

    def unfair(_catalog: TableCatalog, whole: Group) -> list[Group]:
        instance, half = whole.instance, len(whole.devices) // 2
        few = np.arange(len(instance.units)) % 4 == 0
        halves = ((whole.devices[:half], few), (whole.devices[half:], ~few))
        return [
            Group(
                own,
                replace(
                    instance, units=instance.units[chosen], memory_bytes=task.usable_bytes[own]
                ),
            )
            for own, chosen in halves
        ]

    task = replace(task_of(hundreds, 0.1), objective=Objective())
    playing = PolicyRollouts(Policy.untrained().network, oracle)
    monkeypatch.setattr(rollouts, "in_groups", as_one)
    (best,) = playing.run(task)
    monkeypatch.setattr(rollouts, "in_groups", unfair)
    (ours,) = playing.run(task)
    assert ours.plan_ms < 1.02 * best.plan_ms
    monkeypatch.setattr(rollouts, "_MAX_EXCESS", 10.0)  # nobody is that slow
    (apart,) = playing.run(task)
    assert apart.plan_ms > 1.1 * best.plan_ms


def test_where_few_devices_have_the_memory_it_stays_one(
    oracle: EstimatedCosts, hundreds: Tables
) -> None:
    task = task_of(hundreds, 0.5)
    rich = tuple(
        replace(device, memory_bytes=device.memory_bytes * (50 if number < 4 else 1))
        for number, device in enumerate(task.devices)
    )
    task = replace(task, devices=rich)
    catalog = TableCatalog(oracle, RuleMasks(task).units, split=True)
    assert len(in_groups(catalog, whole_of(catalog, task))) == 1


def test_groups_without_a_plan_are_joined(
    oracle: EstimatedCosts, hundreds: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they have one: here it is only as a whole that what there is fits."""

    def unfair(_catalog: TableCatalog, whole: Group) -> list[Group]:
        """All the tables for the first third, and all the memory elsewhere."""
        ways = np.array_split(whole.devices, 3)
        pieces = [
            whole.instance.units[:-2],
            whole.instance.units[-2:-1],
            whole.instance.units[-1:],
        ]
        return [
            Group(
                own,
                replace(whole.instance, units=some, memory_bytes=whole.instance.memory_bytes[own]),
            )
            for own, some in zip(ways, pieces, strict=True)
        ]

    task = replace(task_of(hundreds, 0.8), objective=Objective())
    monkeypatch.setattr(rollouts, "in_groups", unfair)
    plan = PolicySharder(Policy.untrained(), oracle).shard(task)
    plan.check(task)
    assert len({placement.device for placement in plan.placements}) == DEVICES


def test_small_tables_are_bundled_and_large_ones_are_not(
    oracle: EstimatedCosts, hundreds: Tables
) -> None:
    task = task_of(hundreds, 0.5, devices=4)
    units = bundled(oracle, task, RuleMasks(task).units)
    names = [piece.table.name for unit in units for piece in unit.pieces]
    assert sorted(names) == sorted(table.name for table in task.tables)
    assert len(units) < len(task.tables) / 2
    even_bytes = task.usable_bytes.sum() / 4
    alone_ms = oracle.alone_ms([table.whole() for table in task.tables])
    even_ms = alone_ms.sum() / 4
    of_table = dict(zip((table.name for table in task.tables), alone_ms.tolist(), strict=True))
    for unit in units:
        if len(unit.pieces) > 1:
            tables = [piece.table for piece in unit.pieces]
            assert sum(map(task.table_bytes, tables)) <= 0.06 * even_bytes
            assert sum(of_table[table.name] for table in tables) < 0.12 * even_ms
    assert len(units[0].pieces) == 1


def test_coarse_rollouts_place_every_table_once(oracle: EstimatedCosts, hundreds: Tables) -> None:
    task = task_of(hundreds, 0.5)
    (found,) = PolicyRollouts(Policy.untrained().network, oracle).run(task, coarse=True)
    ShardingPlan.of_pieces(task, found.placed).check(task)
