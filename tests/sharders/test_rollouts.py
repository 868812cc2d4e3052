"""Episodes that a policy plays side by side."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tasks import GIANT, Tables, task_of

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import BatchedPlacementEnv, Layout, TableCatalog, TaskInstance
from autoshard.sharders import Policy
from autoshard.sharders.policy.network import FORBIDDEN, PolicyNetwork, PolicyShape
from autoshard.sharders.policy.rollouts import PolicyRollouts, Rollout, RolloutConfig, second_best
from autoshard.workload import Device, EmbeddingTable, OperatorOptions, ShardingPlan


def held_together(played: Rollout, first: int | None = None) -> list[list[tuple[str, int]]]:
    devices: dict[int, list[tuple[str, int]]] = {}
    for piece, device in played.placed[:first]:
        devices.setdefault(device, []).append((piece.table.name, piece.width))
    return sorted(sorted(held) for held in devices.values())


def test_episodes_that_are_drawn_leave_the_policys_own_as_it_is(
    policy: Policy, oracle: EstimatedCosts, tables: Tables
) -> None:
    task, player = task_of(tables[:12], 3), PolicyRollouts(policy.network, oracle)
    (alone,) = player.run(task)
    configs = [RolloutConfig(), *[RolloutConfig(sampled=True)] * 7]
    rollouts = player.run(task, configs, rng=torch.Generator().manual_seed(0))
    assert len(rollouts) == 8
    # Equal devices may be exchanged: the number of rollouts changes the last bit.
    assert held_together(rollouts[0]) == held_together(alone)
    assert rollouts[0].plan_ms == pytest.approx(alone.plan_ms, rel=1e-4)
    assert len({rollout.placed for rollout in rollouts}) > 4
    for rollout in rollouts:
        ShardingPlan.of_pieces(task, rollout.placed).check(task)


def test_a_turn_is_taken_once(policy: Policy, oracle: EstimatedCosts, tables: Tables) -> None:
    """Before and after it the policy chooses as it thinks best."""
    task, player = task_of(tables[:12], 3), PolicyRollouts(policy.network, oracle)
    steps = range(1, 7)  # the first table may go anywhere, which is all the same
    own, *others = player.run(
        task,
        [
            RolloutConfig(),
            *(RolloutConfig(discrepancy_step=step) for step in steps),
        ],
        split=False,
    )
    catalog = TableCatalog(oracle, [table.whole() for table in task.tables])
    instance = TaskInstance(
        np.arange(len(task.tables)), task.usable_bytes, objective=task.objective
    )
    for discrepancy_step, played in zip(steps, others, strict=True):
        assert held_together(played, discrepancy_step) == held_together(own, discrepancy_step)
        episodes = BatchedPlacementEnv(catalog, 1, len(task.tables), 3)
        episodes.start([0], [instance])
        for step, (_, device) in enumerate(played.placed):
            with torch.inference_mode():
                logits, _ = policy.network(Layout(3).parts(episodes))
            behind = float(logits.max() - logits[0, device])
            assert (behind > 0.01) if step == discrepancy_step else (behind < 0.1), (
                discrepancy_step,
                step,
            )
            episodes.place(torch.tensor([device]))


@pytest.mark.parametrize(
    ("logits", "choice"),
    [
        ([5.0, 5.0, 1.0], 2),  # not another device that is like the best
        ([5.0, 4.0, 4.5], 2),
        ([5.0, FORBIDDEN, FORBIDDEN], 0),  # there is no other
        ([5.0, 5.0, FORBIDDEN], 0),
    ],
)
def test_the_second_best_makes_another_plan(logits: list[float], choice: int) -> None:
    assert second_best(torch.tensor([logits])).tolist() == [choice]


def test_as_many_episodes_are_played_as_cost_little(policy: Policy, oracle: EstimatedCosts) -> None:
    ours = PolicyRollouts(policy.network, oracle)
    assert len(set(ours.variants)) == len(ours.variants) == 6
    configs = ours.configs(100, 8)
    assert configs[:6] == [RolloutConfig(variant) for variant in ours.variants]
    assert {config.discrepancy_step for config in configs[6:]} == set(range(6))
    assert len(set(configs)) == len(configs) == 24
    assert ours.configs(100, 8, wide=True)[:24] == configs
    assert len(ours.configs(100, 8, wide=True)) == 48
    assert (
        max(config.discrepancy_step for config in ours.configs(5, 2, wide=True)) == 4
    )  # the last of whole tables
    assert ours.configs(1000, 16, wide=True) == configs[:6]
    assert ours.configs(1000, 8, wide=True) == configs[:12]
    assert ours.configs(1000, 32, wide=True) == configs[:3]
    assert ours.configs(1000, 200) == configs[:2]
    assert ours.configs(10, 1) == [RolloutConfig()]
    untrained = PolicyRollouts(Policy.untrained().network, oracle).variants
    assert {variant.learned for variant in untrained} == {0}
    assert len(set(untrained)) == len(untrained) < 6
    nothing = PolicyNetwork(PolicyShape(sharpness=0))
    assert PolicyRollouts(nothing, oracle).configs(10, 4) == [RolloutConfig()]
    assert len(PolicyRollouts(nothing, oracle).configs(10, 4, wide=True)) == 11
    whole = PolicyNetwork(PolicyShape(kinds=()))
    assert {variant.elsewhere for variant in PolicyRollouts(whole, oracle).variants} == {1}


def test_whole_tables_are_played_on_demand(oracle: EstimatedCosts, tables: Tables) -> None:
    task = task_of((GIANT, *tables[:10]), 4)
    player = PolicyRollouts(Policy.untrained().network, oracle)
    (played,) = player.run(task, split=False)
    assert {piece for piece, _ in played.placed} == {table.whole() for table in task.tables}
    (split,) = player.run(task)
    assert split.plan_ms < 0.8 * played.plan_ms
    assert len(split.placed) > len(task.tables)


def test_memory_is_that_of_the_task_s_operator(policy: Policy, oracle: EstimatedCosts) -> None:
    """Lookups of a GPU take more of it than those by which the cost model was trained."""
    tables = [EmbeddingTable(f"t{n}", 1_000, 16, 40.0) for n in range(8)]
    operator = OperatorOptions(lookup_bytes=500)
    task = replace(task_of(tables, 3), operator=operator)
    size = task.table_bytes(tables[0])
    task = replace(task, devices=tuple(Device(f"d{n}", n * size) for n in (1, 4, 4)))
    (played,) = PolicyRollouts(policy.network, oracle).run(task, split=False)
    ShardingPlan.of_pieces(task, played.placed).check(task)
    assert Counter(device for _, device in played.placed)[0] <= 1
