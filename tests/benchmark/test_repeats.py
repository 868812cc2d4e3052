import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autoshard.benchmark.measurement import Measurement, MeasureSettings, ReferenceLevel, Timing
from autoshard.benchmark.repeats import deviation_of_repeats, merged
from autoshard.benchmark.statistics import pooled_variance, standard_error
from autoshard.workload import EmbeddingTable, Shard

LEVEL = ReferenceLevel(1.0, 2.0)
SPREAD, ITERATIONS = 0.02, 20
WITHIN = standard_error(SPREAD, ITERATIONS)
SHARD = Shard.of_tables([EmbeddingTable("t", 9, 8, 1.0)])


def timing(total_ms: float, spread: float = SPREAD) -> Timing:
    error = standard_error(spread, ITERATIONS)
    return Timing(
        total_ms / 4, total_ms * 3 / 4, spread, ITERATIONS, 2, 0.5, 1.5, LEVEL, error=error
    )


def repeat(found: Timing | None, measured_at: float = 1.0) -> Measurement:
    status = "failed" if found is None else "ok"
    settings = MeasureSettings(64)
    return Measurement(SHARD, settings, "h", "v", status, "d", "n", measured_at, found)


def drawn(shards: int, repeats: int, beyond: float, seed: int) -> list[list[Timing]]:
    """Repeats that differ by what their iterations show, and by `beyond` in addition."""
    rng = np.random.default_rng(seed)
    logs = math.hypot(WITHIN, beyond) * rng.standard_normal((shards, repeats))
    return [[timing(10 * math.exp(log)) for log in same] for same in logs]


@pytest.mark.parametrize("beyond", [0.0, 0.01, 0.04])
@pytest.mark.parametrize("repeats", [2, 5])
def test_the_deviation_of_repeats_is_found_again(beyond: float, repeats: int) -> None:
    found = [deviation_of_repeats(drawn(300, repeats, beyond, seed)) for seed in range(5)]
    assert np.mean(found) == pytest.approx(beyond, abs=0.003)


def test_without_repeats_a_hundredth_is_taken_for_granted() -> None:
    assert deviation_of_repeats([]) == pytest.approx(0.01)
    assert deviation_of_repeats([[timing(10.0)], [timing(20.0)]]) == pytest.approx(0.01)


def test_two_repeats_do_not_overturn_the_prior() -> None:
    """One pair that agrees, or disagrees by much, says little."""
    agreed = deviation_of_repeats([[timing(10.0), timing(10.0)]])
    assert 0.0 < agreed < 0.01
    apart = deviation_of_repeats([[timing(10.0), timing(11.0)]])
    assert 0.01 < apart < 0.05


def test_repeats_are_merged_into_their_mean() -> None:
    found = merged([repeat(timing(10.0), 1.0), repeat(timing(10.4), 2.0)], 0.01)
    assert found.measured_at == 2.0
    assert found.timing is not None
    assert found.total_ms == pytest.approx(10.2)
    assert found.timing.forward_ms == pytest.approx(2.55)
    assert (found.timing.repeats, found.timing.iterations, found.timing.disturbed) == (2, 40, 4)
    assert found.timing.operator_seconds == pytest.approx(3.0)
    assert found.timing.spread == pytest.approx(SPREAD)
    assert (found.timing.foreign_load, found.timing.reference_level) == (0.5, LEVEL)


def test_the_error_of_one_measurement_includes_the_deviation_of_repeats() -> None:
    whole = merged([repeat(timing(10.0))], 0.03).timing
    assert whole is not None
    assert whole.error == pytest.approx(math.hypot(WITHIN, 0.03))
    assert replace(whole, error=0.0) == replace(timing(10.0), error=0.0)


def test_the_error_of_many_repeats_is_that_of_their_mean() -> None:
    beyond, repeats = 0.02, 4
    errors, costs = [], []
    for same in drawn(600, repeats, beyond, 3):
        whole = merged([repeat(found) for found in same], beyond).timing
        assert whole is not None
        errors.append(whole.error)
        costs.append(math.log(whole.total_ms))
    expected = math.hypot(WITHIN, beyond) / math.sqrt(repeats)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(expected, rel=0.1)
    assert np.std(costs) == pytest.approx(expected, rel=0.1)


def test_repeats_that_disagree_have_a_larger_error() -> None:
    def error(totals: Sequence[float]) -> float:
        whole = merged([repeat(timing(total)) for total in totals], 0.01).timing
        assert whole is not None
        return whole.error

    assert error([10.0, 10.0]) < error([10.0, 10.3]) < error([10.0, 12.0])
    assert error([10.0] * 4) < error([10.0] * 2) < error([10.0])


def test_a_failed_measurement_adds_nothing() -> None:
    failed, found = repeat(None, 2.0), repeat(timing(10.0), 1.0)
    assert merged([failed], 0.01) == failed
    whole = merged([failed, found], 0.01)
    assert whole.timing is not None
    assert whole.timing.repeats == 1


def test_the_variance_within_groups_forgets_what_groups_differ_by() -> None:
    groups = [[1.0, 3.0], [101.0, 103.0], [7.0]]
    assert pooled_variance(groups, 0.0, 1e-9) == pytest.approx(2.0)
    assert pooled_variance([], 5.0, 4.0) == pytest.approx(5.0)
    assert pooled_variance([[1.0, 3.0]], 2.0, 4.0) == pytest.approx(2.0)
