from collections.abc import Iterator

import pytest
from commands import few_test_tasks


@pytest.fixture(scope="session", autouse=True)
def few_tasks() -> Iterator[None]:
    """What trainings test at their end is most of the time of tiny ones."""
    with few_test_tasks():
        yield
