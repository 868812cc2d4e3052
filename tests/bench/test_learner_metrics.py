"""Metrics of learners, with little time for training and annealing."""

import pytest

from bench.learners import learner_metrics
from bench.metric import mean_and_interval


def test_mean_and_interval() -> None:
    mean, (low, high) = mean_and_interval([1.0, 2.0, 3.0])
    assert (mean, low + high) == (2.0, 4.0)
    assert high - mean == pytest.approx(4.3027 / 3**0.5, abs=1e-3)
    assert mean_and_interval([0, 0, 0]) == (0.0, (0.0, 0.0))


def test_learners_are_compared_with_the_untrained_policy(cluster: object) -> None:
    found = learner_metrics(0.01, 2, 0.2, 2, "small:loose,directions:tight", ("group_baseline",))
    values = {metric.name: metric for metric in found}
    for name in ("before training", "group_baseline"):
        share = values[f"{name}: share of headroom, memory loose"].value
        assert share is not None
        assert share < 1.2
        for memory in ("loose", "tight"):
            over = values[f"{name}: step time over annealing, memory {memory}"]
            assert over.value is not None
            assert 0.9 < over.value < 2
            trained = name == "group_baseline"  # with two seeds
            assert (over.interval is not None) == trained
            assert f"{name}: tasks without a plan in one pass, memory {memory}" in values
