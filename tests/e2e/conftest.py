"""Servers and trainings that tests of this folder share; each is started when first asked for."""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from commands import few_test_tasks
from servers import browser, postgres_server
from trainings import SWEPT, TINY, Training, run_sweep, train_at_once

# The pictures of docs/mlflow.md are taken of a longer training than tests have the patience for.
PICTURED = (
    "--tables synthetic:400:1:small --num-tables 50 --num-devices 4 --check-tasks 8 "
    "--check-every 1 --batch-size 1024 --memory-fill 0.1-0.6 --iterations 16 --reward estimated"
)
PICTURED_SWEEP = (
    "--tables synthetic:400:1:small --num-tables 50 --num-devices 4 --num-envs 32 --check-tasks 8 "
    "--check-every 2 --memory-fill 0.8"
)


@pytest.fixture(scope="session", autouse=True)
def few_tasks() -> Iterator[None]:
    """Except where pictures are taken of them."""
    with nullcontext() if os.environ.get("AUTOSHARD_PICTURES") else few_test_tasks():
        yield


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
    options, games = TINY, (8, 16)
    if os.environ.get("AUTOSHARD_PICTURES"):
        options, games = PICTURED, (8, 16, 32, 64)
    given = [f"{options} --num-envs {number} --seed {seed}" for seed, number in enumerate(games)]
    return uri, train_at_once(folder, uri, given)


@pytest.fixture(scope="session")
def sweep(
    sqlite_trainings: tuple[str, list[Training]], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Runs of the trials of a sweep that logged to the same file."""
    uri, _ = sqlite_trainings
    folder = tmp_path_factory.mktemp("sweep")
    options = f"{SWEPT} --num-samples 10 --max-iterations 2 --objectives step,memory"
    if os.environ.get("AUTOSHARD_PICTURES"):
        options = f"{PICTURED_SWEEP} --num-samples 10 --max-iterations 12 --objectives step,memory"
    return [trial["mlflow_run"] for trial in run_sweep(options, folder, uri)["trials"]]
