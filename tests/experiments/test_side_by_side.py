"""Work in forked processes."""

import os
import signal
from collections.abc import Callable

import pytest

from autoshard.experiments.console import side_by_side as module
from autoshard.experiments.console.side_by_side import side_by_side
from autoshard.workload import PlanError, UserError


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on one core, and where tests of this session have joined a cluster."""
    monkeypatch.setattr(module, "processes_for", lambda items: min(items, 2))


def test_results_come_in_order_from_other_processes() -> None:
    factor = 3
    found = list(side_by_side(lambda n: (factor * n, os.getpid()), range(6)))
    assert [result for result, _ in found] == [0, 3, 6, 9, 12, 15]
    assert os.getpid() not in {process for _, process in found}
    assert list(side_by_side(lambda n: (n, os.getpid()), [7])) == [(7, os.getpid())]
    assert list(side_by_side(str, [])) == []


def fail(n: int) -> int:
    raise PlanError(f"no plan for {n}")


def end(n: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return n


@pytest.mark.parametrize(
    ("work", "error", "says"),
    [(fail, PlanError, "no plan for 5"), (end, UserError, "one of 2 processes was killed, most")],
)
def test_what_goes_wrong_in_one_is_reported_here(
    work: Callable[[int], int], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        list(side_by_side(work, [5, 6, 7]))
