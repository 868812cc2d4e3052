"""What plans are judged by: waits, links, and what is said of them."""

import pytest

from autoshard.workload import FieldError, Link, Objective, UserError

LINK = Link(25e9, 30e-6)


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
def test_what_is_no_link_is_reported_in_a_line(text: str) -> None:
    with pytest.raises(UserError) as raised:
        Link.parse(text)
    assert "\n" not in str(raised.value)


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(FieldError, match="step, pipelined, operators, compute"):
        Objective("fastest")  # type: ignore[arg-type]


def test_objectives_survive_json() -> None:
    for objective in (
        Objective(), Objective("pipelined", LINK), Objective("compute"),
        Objective("step", LINK, dense_ms=2.5),
    ):  # fmt: skip
        assert Objective.from_json(objective.to_json()) == objective


def test_a_dense_part_takes_no_negative_time() -> None:
    with pytest.raises(FieldError, match="must be at least 0, got -1"):
        Objective("step", dense_ms=-1.0)
