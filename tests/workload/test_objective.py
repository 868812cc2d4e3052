"""What plans are judged by: waits, links, and what is said of them."""

import numpy as np
import pytest

from autoshard.workload import FieldError, Link, Objective, UserError
from autoshard.workload.objective import ObjectiveName

LINK = Link(25e9, 30e-6)
# Two devices: the first is slow forward, the second backward; [devices, phases].
PHASES_MS = np.array([[4.0, 1.0, 2.0, 2.0], [1.0, 6.0, 3.0, 3.0]])


@pytest.mark.parametrize(
    ("name", "link", "expected_ms"),
    [
        ("step", LINK, 4 + 6 + 3 + 3),
        ("step", None, 4 + 6),
        ("pipelined", LINK, 7 + 3 + 3),
        ("pipelined", None, 7),
        ("compute", LINK, 7),
        ("compute", None, 7),
    ],
)
def test_a_plan_costs_the_slowest_device_of_each_wait(
    name: ObjectiveName, link: Link | None, expected_ms: float
) -> None:
    assert Objective(name, link).plan_ms(PHASES_MS) == expected_ms


def test_plans_are_priced_many_at_once() -> None:
    many = np.stack([PHASES_MS, 2 * PHASES_MS])
    assert Objective("step", LINK).plan_ms(many).tolist() == [16.0, 32.0]


def test_each_device_sends_its_columns_and_receives_the_others() -> None:
    link, batch = Link(1e6), 100  # a MB a second
    found = Objective("step", link).exchange_ms(np.array([30.0, 10.0]), batch)
    # The first sends 30 columns of 50 samples, the second receives them: 6,000 bytes.
    assert found.tolist() == [6.0, 6.0]


def test_an_idle_device_waits_for_what_it_receives_and_for_the_latency() -> None:
    found = Objective("step", Link(1e6, 2e-3)).exchange_ms(np.array([8.0, 0.0]), 2)
    assert found.tolist() == pytest.approx([2.032, 2.032])


def test_an_all_to_all_takes_as_long_as_the_most_columns_are_sent() -> None:
    objective, rng = Objective("step", LINK), np.random.default_rng(0)
    for ranks in (2, 3, 8):
        columns = rng.integers(0, 1000, (200, ranks)).astype(float)
        most = objective.exchange_ms(columns, 1024).max(-1)
        sent = LINK.latency_ms + objective.column_ms(1024, ranks) * columns.max(-1)
        assert most == pytest.approx(sent)
    assert objective.column_ms(1024, 1) == Objective("compute", LINK).column_ms(1024, 2) == 0
    assert (objective.exchanges(2), objective.exchanges(1)) == (2, 0)


def test_one_device_exchanges_nothing() -> None:
    assert Objective("step", LINK).exchange_ms(np.array([64.0]), 1024).tolist() == [0.0]


@pytest.mark.parametrize(
    ("text", "bytes_s", "latency_s"),
    [
        ("25GB/s,30us", 25e9, 30e-6),
        ("100Gbit/s", 12.5e9, 0.0),
        (" 800 MB/s , 0.5 ms ", 8e8, 5e-4),
    ],
)
def test_links_are_read(text: str, bytes_s: float, latency_s: float) -> None:
    found = Link.parse(text)
    assert (found.bytes_s, found.latency_s) == pytest.approx((bytes_s, latency_s))


@pytest.mark.parametrize("text", ["fast", "25", "25GB/s,late", "0GB/s", "1.2.3GB/s", ""])
def test_what_is_no_link_is_told_in_a_line(text: str) -> None:
    with pytest.raises(UserError) as told:
        Link.parse(text)
    assert "\n" not in str(told.value)


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(FieldError, match="step, pipelined, compute"):
        Objective("fastest")  # type: ignore[arg-type]


def test_objectives_survive_json() -> None:
    for objective in (Objective(), Objective("pipelined", LINK), Objective("compute")):
        assert Objective.from_json(objective.to_json()) == objective
