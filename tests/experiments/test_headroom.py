"""The figures of headroom, with next to no time for annealing."""

import pytest

from autoshard.envs.task_families import Choice
from autoshard.experiments.figures.headroom import Headroom, Tried, headroom_figures


def test_each_family_is_told_loose_and_tight() -> None:
    figures = {each.name: each for each in headroom_figures(0.2, tasks=2, names=("directions",))}
    for memory in ("loose", "tight"):
        for name in ("policy", "autoshard", "annealing", "best heuristic"):
            told = f"directions, {memory}: "
            assert f"{told}objective over cost_fused's, {name}" in figures
            assert figures[f"{told}seconds a plan, {name}"].unit == "s"
        assert figures[f"{told}tasks without a plan, annealing"].value == 0
    loose = figures["directions, loose: objective over cost_fused's, annealing"]
    assert loose.value is not None
    assert loose.value < 1
    assert loose.interval is not None


def test_shares_by_hand() -> None:
    tried = {
        "best heuristic": Tried([12.0, None, 9.0], [0.1] * 3),
        "cost_fused": Tried([10.0, 10.0, None], [1.0] * 3),
        "policy": Tried([9.0, 8.0, 8.0], [1.0] * 3),
        "annealing": Tried([8.0, 8.0, 7.0], [60.0] * 3),
    }
    found = Headroom(Choice("small", "tight"), tried)
    # Of the first two tasks, for the third has no bar: 3 of the 4 ms that there are to be won.
    assert found.share("policy") == pytest.approx(0.75)
    assert found.share("best heuristic") == pytest.approx(-1.0)  # of the first alone
    told = {figure.name.partition(": ")[2]: figure.value for figure in found.figures()}
    assert told["tasks without a plan, cost_fused"] == 1
    assert told["objective over cost_fused's, policy"] == pytest.approx(0.85)
    assert told["seconds a plan, annealing"] == 60
    nothing = Headroom(found.choice, {**tried, "annealing": tried["cost_fused"]})
    assert nothing.share("policy") is None
