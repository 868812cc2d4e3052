"""The prior of table corrections, and of what they leave of a shard's cost."""

import numpy as np
import pytest

from autoshard.cost_model.networks.compute import ResidualPrior


def test_residuals_in_ms_matter_for_small_shards_alone() -> None:
    prior = ResidualPrior(rest=0.03, rest_ms=0.04)
    assert prior.rest_of(np.array([1.0, 1e6])) == pytest.approx([0.05, 0.03])
    # A device without tables costs nothing, and no deviation is infinite.
    assert prior.rest_of(np.zeros(1)) == pytest.approx([1.0], rel=1e-3)


def test_without_a_residual_in_ms_that_of_all_shards_is_relative() -> None:
    assert ResidualPrior(rest=0.03).rest_of(np.array([0.01, 10.0])) == pytest.approx(0.03)


def test_one_noisy_machine_does_not_decide() -> None:
    priors = [ResidualPrior(own=0.01 * n, rest=0.1 if n == 3 else 0.02) for n in (1, 2, 3)]
    assert ResidualPrior.median(priors) == ResidualPrior(own=0.02, rest=0.02)
