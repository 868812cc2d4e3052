"""Options out of their bounds are reported in one line."""

import re
from dataclasses import dataclass, field

import pytest

from autoshard.workload import UserError
from autoshard.workload.bounds import check_bounds


@dataclass
class Part:
    wide: float = 1.0


@dataclass
class Options:
    num_tasks: int = 1
    some_share: float = 1.0
    at_once: int | None = None
    part: Part = field(default_factory=Part)


def check(options: Options) -> None:
    check_bounds(
        options,
        at_least={"num_tasks": 1, "some_share": 0, "at_once": 1},
        more_than={"part.wide": 0},
        up_to={"some_share": 1},
    )


def test_what_is_within_passes_and_what_is_not_given_too() -> None:
    check(Options())
    check(Options(some_share=0, at_once=1))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (Options(num_tasks=0), "--num-tasks must be at least 1, got 0"),
        (Options(at_once=0), "--at-once must be at least 1, got 0"),
        (Options(some_share=1.1), "--some-share must lie between 0 and 1, got 1.1"),
        (Options(some_share=float("nan")), "--some-share must lie between 0 and 1, got nan"),
        (Options(part=Part(0.0)), "--part.wide must be more than 0, got 0.0"),
        (Options(part=Part(float("inf"))), "--part.wide must be more than 0, got inf"),
    ],
)
def test_what_is_out_of_them_is_reported_in_one_line(options: Options, line: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        check(options)
