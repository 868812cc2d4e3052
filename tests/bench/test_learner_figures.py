"""The figures of learners, with next to no time for training and for annealing."""

import pytest

from bench.figure import mean_and_interval
from bench.learners import learner_figures


def test_the_mean_of_several_and_where_it_lies() -> None:
    mean, (low, high) = mean_and_interval([1.0, 2.0, 3.0])
    assert (mean, low + high) == (2.0, 4.0)
    assert high - mean == pytest.approx(4.3027 / 3**0.5, abs=1e-3)
    assert mean_and_interval([0, 0, 0]) == (0.0, (0.0, 0.0))


def test_learners_are_told_beside_what_they_began_as(cluster: object) -> None:
    found = learner_figures(0.01, 2, 0.2, 2, "small:loose,directions:tight", ("group_baseline",))
    told = {figure.name: figure for figure in found}
    for name in ("before training", "group_baseline"):
        share = told[f"{name}: share of the headroom, memory loose"].value
        assert share is not None
        assert share < 1.2
        for memory in ("loose", "tight"):
            over = told[f"{name}: plans over annealing's, memory {memory}"]
            assert over.value is not None
            assert 0.9 < over.value < 2
            assert (over.interval is not None) == (name == "group_baseline")  # of two seeds
            assert f"{name}: tasks without a plan in one pass, memory {memory}" in told
