"""The ratio of two sharders over several tasks: what it is, and whether its interval holds it."""

import math

import numpy as np
import pytest

from autoshard.experiments.evaluation.ratio import Ratio, relative

TRIALS = 800  # whose share deviates by 0.8 %


def coverage(tasks: int, noise: float, choice: float) -> float:
    """The share of intervals that contain the true ratio, of tasks whose sizes differ much."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(TRIALS):
        size = np.exp(rng.normal(2.5, 0.5, tasks))
        ours = 0.9 * size * np.exp(choice * rng.standard_normal(tasks))
        read = [ms * (1 + noise * rng.standard_normal(tasks)) for ms in (ours, size)]
        drawn = [ms * (1 + noise * rng.standard_normal((200, tasks))) for ms in read]
        ratio = Ratio.of(*(drawn if noise else [ms[None] for ms in read]))
        assert ratio is not None
        held += ratio.low <= 0.9 <= ratio.high
    return held / TRIALS


@pytest.mark.parametrize("tasks", [3, 6, 20])
@pytest.mark.parametrize(("noise", "choice"), [(0.0, 0.07), (0.01, 0.07), (0.02, 0.02), (0.02, 0)])
def test_intervals_hold_the_truth_as_often_as_they_say(
    tasks: int, noise: float, choice: float
) -> None:
    """By the choice of tasks, priced or measured, by as much noise, and by noise alone."""
    # Where tasks agree by chance more closely than they are measured, it is a little too wide.
    assert 0.93 <= coverage(tasks, noise, choice) <= (0.97 if noise < choice else 0.995)


def test_one_task_has_the_noise_of_measuring_alone() -> None:
    assert 0.92 <= coverage(1, 0.02, 0.0) <= 0.97


def test_sizes_of_tasks_do_not_count() -> None:
    """A ratio of means would be 0.97, with an interval three times as wide."""
    bar = [10.0, 20.0, 30.0, 100.0]
    shares = [0.8, 0.85, 0.9, 1.0]
    found = relative([a * b for a, b in zip(bar, shares, strict=True)], bar)
    assert found is not None
    assert found.of_tasks == pytest.approx(shares)
    logs = np.log(shares)
    assert found.value == pytest.approx(math.exp(logs.mean()))
    reach = 3.182 * logs.std(ddof=1) / 2  # Student's t for four tasks
    assert (found.low, found.high) == pytest.approx(
        (math.exp(logs.mean() - reach), math.exp(logs.mean() + reach)), rel=1e-3
    )


def test_tasks_without_a_plan_of_both_do_not_count() -> None:
    found = relative([1.0, None, 3.0, 4.0], [2.0, 2.0, None, 5.0])
    assert found is not None
    assert (found.count, found.of_tasks) == (2, (0.5, None, None, 0.8))
    assert found.value == pytest.approx(math.sqrt(0.4))
    assert relative([1.0, None], [None, 1.0]) is None


def test_the_variance_is_split() -> None:
    rng = np.random.default_rng(2)
    bar = np.full((500, 40), 10.0)
    noisy = 10 * np.exp(0.03 * rng.standard_normal(40) + 0.03 * rng.standard_normal((500, 40)))
    both = Ratio.of(noisy * np.exp(0.05 * rng.standard_normal(40)), bar)
    assert both is not None
    assert both.measurement_variance == pytest.approx(0.03**2 / 40, rel=0.25)
    assert both.task_variance == pytest.approx(0.05**2 / 40, rel=0.6)
    priced = Ratio.of(noisy[:1], bar[:1])
    assert priced is not None
    assert priced.measurement_variance == 0 < priced.task_variance


def test_agreement_by_chance_is_not_taken_for_precision() -> None:
    noise = 0.02 * np.random.default_rng(3).standard_normal((1000, 3))
    found = Ratio.of(9 * np.exp(noise - noise.mean(0)), np.full((1000, 3), 10.0))
    assert found is not None
    assert found.half_width == pytest.approx(0.9 * 1.96 * 0.02 / math.sqrt(3), rel=0.1)


def test_probabilities() -> None:
    bar = np.full((1, 6), 10.0)
    same = Ratio.of(bar, bar)
    assert same is not None
    assert (same.value, same.half_width, same.probability_below_one) == (1, 0, 0.5)
    better = Ratio.of(bar - np.array([1, 2, 1, 2, 1, 2]), bar)
    assert better is not None
    assert better.probability_below_one > 0.99
    worse = Ratio.of(bar - np.array([1, -2, 1, -2, 1, -2]), bar)
    assert worse is not None
    assert 0.05 < worse.probability_below_one < 0.4
    alike = Ratio.of(bar / 2, bar)
    assert alike is not None
    assert (alike.half_width, alike.probability_below_one) == (0, 1)
    priced = Ratio.of(bar[:, :1] - 5, bar[:, :1])
    assert priced is not None
    assert priced.probability_below_one == 0.5  # one task says nothing of others
    assert priced.half_width == math.inf


def test_samples_below_zero_do_not_matter() -> None:
    """Costs are taken to be normal, so some samples of a noisy one are."""
    drawn = 10 + 6 * np.random.default_rng(4).standard_normal((1000, 2))
    found = Ratio.of(drawn, np.full((1000, 2), 10.0))
    assert found is not None
    assert found.value == pytest.approx(1, abs=0.1)
    assert 0 < found.low < 0.7
    assert 1.3 < found.high < math.inf
