import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autoshard.benchmark.measurement import (
    Directions,
    Measurement,
    MeasureSettings,
    ReferenceLevel,
    Timing,
)
from autoshard.benchmark.operator.repeats import deviation_of_repeats, merged, own_error
from autoshard.benchmark.statistics import pooled_variance, standard_error
from autoshard.workload import EmbeddingTable, Shard

LEVEL = ReferenceLevel(1.0, 2.0)
SPREAD, ITERATIONS = 0.02, 20
WITHIN = standard_error(SPREAD, ITERATIONS)
ONE_PERCENT = Directions.of(0.01)
SHARD = Shard.of_tables([EmbeddingTable("t", 9, 8, 1.0)])


def timing(total_ms: float, forward_factor: float = 1.0) -> Timing:
    """A quarter of it forward, times the factor; backward makes up for that."""
    forward_ms = total_ms / 4 * forward_factor
    known = Timing(
        forward_ms, total_ms - forward_ms, Directions.of(SPREAD), ITERATIONS, 2, 0.5, 1.5, LEVEL
    )
    return replace(known, error=own_error(known))


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
    assert np.mean(found, axis=0) == pytest.approx([beyond] * 3, abs=0.003)


def test_directions_deviate_by_themselves() -> None:
    """Forward by 5 %, backward by a third of that against it, and the sum not at all."""
    logs = 0.05 * np.random.default_rng(0).standard_normal((400, 3))
    found = deviation_of_repeats([[timing(10, math.exp(log)) for log in same] for same in logs])
    assert (found.forward**2 + WITHIN**2) ** 0.5 == pytest.approx(0.05, rel=0.1)
    assert (found.backward**2 + WITHIN**2) ** 0.5 == pytest.approx(0.05 / 3, rel=0.1)
    assert found.both == 0


def test_without_repeats_a_hundredth_is_taken_for_granted_and_more_of_forward() -> None:
    assert deviation_of_repeats([]) == pytest.approx((0.02, 0.01, 0.01))
    alone = deviation_of_repeats([[timing(10.0)], [timing(20.0)]])
    assert alone == pytest.approx((0.02, 0.01, 0.01))


def test_what_contention_is_normalized_away_adds_to_the_error() -> None:
    """A quarter of it: of 20 % forward and backward, 5 %."""
    own = timing(10.0)
    level = ReferenceLevel(LEVEL.forward_ms / 1.2, LEVEL.backward_ms / 1.2)
    expected = math.hypot(WITHIN, 0.25 * math.log(1.2))
    assert own_error(own, level) == pytest.approx([expected] * 3)
    assert own_error(own, LEVEL) == own_error(own) == pytest.approx([WITHIN] * 3)


def test_two_repeats_do_not_overturn_the_prior() -> None:
    """One pair that agrees, or disagrees by much, says little."""
    agreed = deviation_of_repeats([[timing(10.0), timing(10.0)]]).both
    assert 0.0 < agreed < 0.01
    apart = deviation_of_repeats([[timing(10.0), timing(11.0)]]).both
    assert 0.01 < apart < 0.05


def test_repeats_are_merged_into_their_mean() -> None:
    found = merged([repeat(timing(10.0), 1.0), repeat(timing(10.4), 2.0)], ONE_PERCENT)
    assert found.measured_at == 2.0
    assert found.timing is not None
    assert found.total_ms == pytest.approx(10.2)
    assert found.timing.forward_ms == pytest.approx(2.55)
    assert (found.timing.repeats, found.timing.iterations, found.timing.disturbed) == (2, 40, 4)
    assert found.timing.operator_seconds == pytest.approx(3.0)
    assert found.timing.spread == pytest.approx([SPREAD] * 3)
    assert (found.timing.foreign_load, found.timing.reference_level) == (0.5, LEVEL)


def test_the_error_of_one_measurement_includes_the_deviation_of_repeats() -> None:
    whole = merged([repeat(timing(10.0))], Directions(0.05, 0.02, 0.03)).timing
    assert whole is not None
    assert whole.error == pytest.approx([math.hypot(WITHIN, n) for n in (0.05, 0.02, 0.03)])
    assert replace(whole, error=ONE_PERCENT) == replace(timing(10.0), error=ONE_PERCENT)


def test_the_error_of_many_repeats_is_that_of_their_mean() -> None:
    beyond, repeats = 0.02, 4
    errors, costs = [], []
    for same in drawn(600, repeats, beyond, 3):
        whole = merged([repeat(found) for found in same], Directions.of(beyond)).timing
        assert whole is not None
        errors.append(whole.error.both)
        costs.append(math.log(whole.total_ms))
    expected = math.hypot(WITHIN, beyond) / math.sqrt(repeats)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(expected, rel=0.1)
    assert np.std(costs) == pytest.approx(expected, rel=0.1)


def test_repeats_that_disagree_have_a_larger_error() -> None:
    def error(totals: Sequence[float]) -> float:
        whole = merged([repeat(timing(total)) for total in totals], ONE_PERCENT).timing
        assert whole is not None
        return whole.error.both

    assert error([10.0, 10.0]) < error([10.0, 10.3]) < error([10.0, 12.0])
    assert error([10.0] * 4) < error([10.0] * 2) < error([10.0])


def test_a_failed_measurement_adds_nothing() -> None:
    failed, found = repeat(None, 2.0), repeat(timing(10.0), 1.0)
    assert merged([failed], ONE_PERCENT) == failed
    whole = merged([failed, found], ONE_PERCENT)
    assert whole.timing is not None
    assert whole.timing.repeats == 1


def test_the_variance_within_groups_forgets_what_groups_differ_by() -> None:
    groups = [[1.0, 3.0], [101.0, 103.0], [7.0]]
    assert pooled_variance(groups, 0.0, 1e-9) == pytest.approx(2.0)
    assert pooled_variance([], 5.0, 4.0) == pytest.approx(5.0)
    assert pooled_variance([[1.0, 3.0]], 2.0, 4.0) == pytest.approx(2.0)
