"""Games that a policy plays side by side."""

import numpy as np
import pytest
import torch
from tasks import GIANT, Tables, task_of

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import Deal, Deck, Layout, ShardingGame
from autoshard.sharders import Policy
from autoshard.sharders.player import Played, Player, Way, second_best
from autoshard.sharders.policy_network import FORBIDDEN, PolicyNetwork, PolicyShape
from autoshard.workload import ShardingPlan


def held_together(played: Played, first: int | None = None) -> list[list[tuple[str, int]]]:
    devices: dict[int, list[tuple[str, int]]] = {}
    for piece, device in played.placed[:first]:
        devices.setdefault(device, []).append((piece.table.name, piece.width))
    return sorted(sorted(held) for held in devices.values())


def test_games_that_are_drawn_leave_the_policys_own_as_it_is(
    policy: Policy, oracle: EstimatedCosts, tables: Tables
) -> None:
    task, player = task_of(tables[:12], 3), Player(policy.network, oracle)
    (alone,) = player.play(task)
    ways = [Way(), *[Way(drawn=True)] * 7]
    games = player.play(task, ways, rng=torch.Generator().manual_seed(0))
    assert len(games) == 8
    # Of like devices either may come first: how many games are played beside decides the last bit.
    assert held_together(games[0]) == held_together(alone)
    assert games[0].plan_ms == pytest.approx(alone.plan_ms, rel=1e-4)
    assert len({game.placed for game in games}) > 4
    for game in games:
        ShardingPlan.of_slices(task, game.placed).check(task)


def test_a_turn_is_taken_once(policy: Policy, oracle: EstimatedCosts, tables: Tables) -> None:
    """Before and after it the policy chooses as it thinks best."""
    task, player = task_of(tables[:12], 3), Player(policy.network, oracle)
    turns = range(1, 7)  # the first table may go anywhere, which is all the same
    own, *others = player.play(task, [Way(), *(Way(turn=turn) for turn in turns)], split=False)
    assert [game.way for game in others] == list(turns)
    deck = Deck(oracle, [table.whole() for table in task.tables])
    deal = Deal(np.arange(len(task.tables)), task.room_bytes, objective=task.objective)
    for turn, played in zip(turns, others, strict=True):
        assert held_together(played, turn) == held_together(own, turn)
        game = ShardingGame(deck, 1, len(task.tables), 3)
        game.deal([0], [deal])
        for step, (_, device) in enumerate(played.placed):
            with torch.inference_mode():
                logits, _ = policy.network(Layout(3).parts(game))
            behind = float(logits.max() - logits[0, device])
            assert (behind > 0.01) if step == turn else (behind < 0.1), (turn, step)
            game.place(torch.tensor([device]))


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


def test_as_many_games_are_played_as_cost_little(policy: Policy, oracle: EstimatedCosts) -> None:
    ours = Player(policy.network, oracle)
    assert len(set(ours.styles)) == len(ours.styles) == 6
    ways = ours.ways(100, 8)
    assert ways[:6] == [Way(style) for style in ours.styles]
    assert {way.turn for way in ways[6:]} == set(range(6))
    assert len(set(ways)) == len(ways) == 24
    assert ours.ways(100, 8, wide=True)[:24] == ways
    assert len(ours.ways(100, 8, wide=True)) == 48
    assert max(way.turn for way in ours.ways(5, 2, wide=True)) == 4  # the last of whole tables
    assert ours.ways(1000, 16, wide=True) == ways[:6]
    assert ours.ways(1000, 32, wide=True) == ways[:3]
    assert ours.ways(1000, 200) == ways[:2]
    assert ours.ways(10, 1) == [Way()]
    untrained = Player(Policy.untrained().network, oracle).styles
    assert {style.learned for style in untrained} == {0}
    assert len(set(untrained)) == len(untrained) < 6
    nothing = PolicyNetwork(PolicyShape(sharpness=0))
    assert Player(nothing, oracle).ways(10, 4) == [Way()]
    assert len(Player(nothing, oracle).ways(10, 4, wide=True)) == 11
    whole = PolicyNetwork(PolicyShape(halves=False))
    assert {style.elsewhere for style in Player(whole, oracle).styles} == {1}


def test_whole_tables_are_played_on_demand(oracle: EstimatedCosts, tables: Tables) -> None:
    task = task_of((GIANT, *tables[:10]), 4)
    player = Player(Policy.untrained().network, oracle)
    (played,) = player.play(task, split=False)
    assert {piece for piece, _ in played.placed} == {table.whole() for table in task.tables}
    (split,) = player.play(task)
    assert split.plan_ms < 0.8 * played.plan_ms
    assert len(split.placed) > len(task.tables)
