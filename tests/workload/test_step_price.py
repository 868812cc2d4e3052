"""The price of a step: stages, all-to-alls, one task and many side by side, expectations."""

import numpy as np
import pytest
import torch

from autoshard.workload import Link, Objective
from autoshard.workload.plans.step_price import StepPrice, stages_of_phases, step_ms
from autoshard.workload.tasks.objective import ObjectiveName

LINK = Link(25e9, 30e-6)
# Two devices: the first is slow forward, the second backward; [devices, phases].
PHASES_MS = np.array([[4.0, 1.0, 2.0, 2.0], [1.0, 6.0, 3.0, 3.0]])


def exchange_ms(objective: Objective, columns: np.ndarray, batch_size: int) -> np.ndarray:
    return StepPrice.of(objective, batch_size, len(columns), columns.sum()).exchange_ms(columns)


@pytest.mark.parametrize(
    ("name", "link", "expected_ms"),
    [
        ("step", LINK, 4 + 6 + 3 + 3),
        ("step", None, 4 + 6),
        ("operators", LINK, 4 + 6 + 3 + 3),
        ("operators", None, 4 + 6),
        ("pipelined", LINK, 4 + 6 + 3 + 3),
        ("compute", LINK, 7),
        ("compute", None, 7),
    ],
)
def test_a_step_takes_the_slowest_device_of_each_stage(
    name: ObjectiveName, link: Link | None, expected_ms: float
) -> None:
    assert step_ms(stages_of_phases(Objective(name, link), PHASES_MS)) == expected_ms


def test_plans_are_priced_many_at_once() -> None:
    many = np.stack([PHASES_MS, 2 * PHASES_MS])
    assert step_ms(stages_of_phases(Objective("operators", LINK), many)).tolist() == [16.0, 32.0]


def test_each_device_sends_its_columns_and_receives_the_others() -> None:
    link, batch = Link(1e6), 100  # a MB a second
    found = exchange_ms(Objective("operators", link), np.array([30.0, 10.0]), batch)
    # The first sends 30 columns of 50 samples, the second receives them: 6,000 bytes.
    assert found.tolist() == [6.0, 6.0]


def test_an_idle_device_waits_for_what_it_receives_and_for_the_latency() -> None:
    found = exchange_ms(Objective("operators", Link(1e6, 2e-3)), np.array([8.0, 0.0]), 2)
    assert found.tolist() == pytest.approx([2.032, 2.032])


def test_an_all_to_all_takes_as_long_as_the_most_columns_are_sent() -> None:
    objective, rng = Objective("operators", LINK), np.random.default_rng(0)
    for ranks in (2, 3, 8):
        columns = rng.integers(0, 1000, (200, ranks)).astype(float)
        most = np.array([exchange_ms(objective, row, 1024).max() for row in columns])
        column_ms = StepPrice.of(objective, 1024, ranks, 0.0).column_ms() / 2
        assert most == pytest.approx(1e3 * LINK.latency_s + column_ms * columns.max(-1))
    for counts_none in (StepPrice.of(objective, 1024, 1, 0.0),
                        StepPrice.of(Objective("compute", LINK), 1024, 2, 0.0)):  # fmt: skip
        assert counts_none.column_ms() == 0
        assert len(counts_none.stages_ms(*np.ones((3, 2)))) == len(
            counts_none.compute_stages(*np.ones((2, 2)))
        )


def test_one_device_exchanges_nothing() -> None:
    assert exchange_ms(Objective("operators", LINK), np.array([64.0]), 1024).tolist() == [0.0]


@pytest.mark.parametrize("link", [None, LINK, Link(1e8, 1e-3)])
@pytest.mark.parametrize("name", ["step", "pipelined", "operators", "compute"])
def test_all_forms_of_a_price_agree(name: ObjectiveName, link: Link | None) -> None:
    """Phases, one task in numpy, several tasks in torch, and the expectation without a residual."""
    objective, rng = Objective(name, link), np.random.default_rng(0)
    forward, backward = rng.random((2, 4)) * 10
    columns = rng.integers(1, 500, 4).astype(float)
    price = StepPrice.of(objective, 1024, 4, columns.sum())
    exchange = price.exchange_ms(columns)
    phases = np.stack([forward, backward, exchange, exchange], axis=-1)
    expected = float(step_ms(stages_of_phases(objective, phases)))
    stages = price.stages_ms(forward, backward, columns)
    assert sum(stage.max() for stage in stages) == pytest.approx(expected)
    beside = StepPrice.of(Objective("operators", Link(1e3)), 1024, 4, columns.sum())
    many = StepPrice.rows(torch.tensor([price.row, beside.row]))
    both = (torch.from_numpy(each).float().repeat(2, 1) for each in (forward, backward, columns))
    of_many = sum(stage.amax(1) for stage in many.stages_ms(*both))
    assert float(of_many[0]) == pytest.approx(expected, rel=1e-5)
    certain = price.expected_ms(forward[:, None], backward[:, None], columns, 0.0)
    assert float(certain) == pytest.approx(expected, rel=0.02)  # the norm of least deviations
