"""Servers and trainings that tests of this folder share; each is started when first asked for."""

import os
from collections.abc import Iterator

import pytest
from mlflow import MlflowClient
from servers import browser, postgres_server
from trainings import TINY, Training, train_at_once

# The README's pictures are taken of a longer training than tests have the patience for.
PICTURED = (
    "--tables synthetic:400:1:small --num-tables 50 --num-devices 4 --check-tasks 8 "
    "--check-every 1 --batch-size 1024 --memory-fill 0.1-0.6 --iterations 16 --reward estimated"
)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URI of a PostgreSQL of our own."""
    with postgres_server() as uri:
        yield uri


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    """A browser that nobody has used yet."""
    with browser() as driver:
        yield driver


@pytest.fixture(scope="session")
def sqlite_trainings(
    cluster: object, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Training]]:
    """The URI of an SQLite file, and the trainings that logged to it at the same time."""
    folder = tmp_path_factory.mktemp("sqlite")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    # MLflow makes the tables of a new file without a lock, and two that do so at once break it.
    MlflowClient(uri).search_experiments()
    options, games = TINY, (8, 16)
    if os.environ.get("AUTOSHARD_PICTURES"):
        options, games = PICTURED, (8, 16, 32, 64)
    given = [f"{options} --games {number} --seed {seed}" for seed, number in enumerate(games)]
    return uri, train_at_once(folder, uri, given)
