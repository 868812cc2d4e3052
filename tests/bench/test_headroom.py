"""Metrics of headroom, with little time for annealing."""

import pytest

from autoshard.envs.task_families import Choice
from bench.headroom import Headroom, Tried, headroom_metrics, size_metrics


def test_each_family_with_loose_and_tight_memory(cluster: object) -> None:
    metrics = {each.name: each for each in headroom_metrics(0.2, 2, "directions")}
    for memory in ("loose", "tight"):
        for name in ("cost_fused", "policy", "autoshard in 0.5 s", "neuroshard"):
            over = metrics[f"directions, {memory}: step time, {name} over annealing"].value
            assert over is None or 0.9 < over < 2
        assert metrics[f"directions, {memory}: tasks without a plan, policy"].value == 0
        assert metrics[f"memory {memory}: step time, policy over annealing, mean over families"]
    share = metrics["directions, loose: share of headroom, policy"].value
    assert share is not None
    assert metrics["memory loose: share of headroom, policy, mean over families"].value == share
    assert metrics["planning time, neuroshard, mean over families"].unit == "s"


def test_other_sizes_are_compared_with_cost_fused(cluster: object) -> None:
    metrics = {each.name: each for each in size_metrics(0.2, "directions:loose")}
    over = metrics["directions, loose: step time, policy over cost_fused"]
    assert over.target == "at most 1"
    assert over.value is not None
    assert over.value <= 1
    assert metrics["directions, loose: step time, autoshard over annealing"].value is not None
    assert metrics["directions, loose: planning time, autoshard"].unit == "s"


def test_shares_by_hand() -> None:
    tried = {
        "best heuristic": Tried([12.0, None, 9.0], [0.1] * 3),
        "cost_fused": Tried([10.0, 10.0, None], [1.0] * 3),
        "policy": Tried([9.0, 8.0, 8.0], [1.0] * 3),
        "annealing": Tried([8.0, 8.0, 7.0], [60.0] * 3),
    }
    found = Headroom(Choice("small", "tight"), (), tried)
    # The policy saves 3 of 4 ms on the first two tasks; cost_fused has no plan for the third.
    assert found.share("policy") == pytest.approx(0.75)
    assert found.share("best heuristic") == pytest.approx(-1.0)  # first task only
    assert found.over("policy") == pytest.approx((9 / 8 * 8 / 8 * 8 / 7) ** (1 / 3))
    assert found.over("policy", "cost_fused") == pytest.approx((0.9 * 0.8) ** 0.5)
    values = {metric.name: metric.value for metric in found.metrics()}
    assert values["small, tight: tasks without a plan, cost_fused"] == 1
    assert values["small, tight: share of headroom, policy"] == found.share("policy")
    nothing = Headroom(found.choice, (), {**tried, "annealing": tried["cost_fused"]})
    assert nothing.share("policy") is None
