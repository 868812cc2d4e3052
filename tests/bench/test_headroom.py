"""The figures of headroom, with next to no time for annealing."""

import pytest

from autoshard.envs.task_families import Choice
from bench.headroom import Headroom, Tried, headroom_figures, size_figures


def test_each_family_is_told_loose_and_tight(cluster: object) -> None:
    figures = {each.name: each for each in headroom_figures(0.2, 2, "directions")}
    for memory in ("loose", "tight"):
        for name in ("cost_fused", "policy", "autoshard in 0.5 s", "neuroshard"):
            over = figures[f"directions, {memory}: plans over annealing's, {name}"].value
            assert over is None or 0.9 < over < 2
        assert figures[f"directions, {memory}: tasks without a plan, policy"].value == 0
        assert figures[f"memory {memory}: plans over annealing's, policy, mean of families"]
    share = figures["directions, loose: share of the headroom, policy"].value
    assert share is not None
    assert figures["memory loose: share of the headroom, policy, mean of families"].value == share
    assert figures["seconds a plan, neuroshard, mean of families"].unit == "s"


def test_other_sizes_are_told_beside_the_greedy_by_cost(cluster: object) -> None:
    figures = {each.name: each for each in size_figures(0.2, "directions:loose")}
    over = figures["directions, loose: plans over cost_fused's, policy"]
    assert over.goal == "at most 1"
    assert over.value is not None
    assert over.value <= 1
    assert figures["directions, loose: plans over annealing's, autoshard"].value is not None
    assert figures["directions, loose: seconds a plan, autoshard"].unit == "s"


def test_shares_by_hand() -> None:
    tried = {
        "best heuristic": Tried([12.0, None, 9.0], [0.1] * 3),
        "cost_fused": Tried([10.0, 10.0, None], [1.0] * 3),
        "policy": Tried([9.0, 8.0, 8.0], [1.0] * 3),
        "annealing": Tried([8.0, 8.0, 7.0], [60.0] * 3),
    }
    found = Headroom(Choice("small", "tight"), (), tried)
    # Of the first two tasks, for the third has no bar: 3 of the 4 ms that there are to be won.
    assert found.share("policy") == pytest.approx(0.75)
    assert found.share("best heuristic") == pytest.approx(-1.0)  # of the first alone
    assert found.over("policy") == pytest.approx((9 / 8 + 8 / 8 + 8 / 7) / 3)
    assert found.over("policy", "cost_fused") == pytest.approx((0.9 + 0.8) / 2)
    told = {figure.name: figure.value for figure in found.figures()}
    assert told["small, tight: tasks without a plan, cost_fused"] == 1
    assert told["small, tight: share of the headroom, policy"] == found.share("policy")
    nothing = Headroom(found.choice, (), {**tried, "annealing": tried["cost_fused"]})
    assert nothing.share("policy") is None
