"""One catalog for the session, of tables whose costs follow the formula."""

from collections.abc import Iterator

import pytest

from autoshard.cost_model import CostDataset, CostModel
from autoshard.cost_model.learning.compute_training import train_compute
from autoshard.cost_model.learning.training import TrainOptions
from autoshard.cost_model.threads import one_thread
from autoshard.envs import TableCatalog
from autoshard.workload import EmbeddingTable
from autoshard.workload.tables.parts import Part


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Episodes are small: two threads would wait for each other."""
    with one_thread():
        yield


@pytest.fixture(scope="session")
def catalog(model: CostModel, many_tables: tuple[EmbeddingTable, ...]) -> TableCatalog:
    """Whole tables. Nobody may teach it: those who do make their own."""
    return TableCatalog.of_tables(model, many_tables, 1024)


@pytest.fixture(scope="session")
def split_catalog(model: CostModel, many_tables: tuple[EmbeddingTable, ...]) -> TableCatalog:
    """The same tables, which may be split."""
    return TableCatalog.of_tables(model, many_tables, 1024, split=True)


@pytest.fixture(scope="session")
def other_model(model: CostModel, formula_parts: dict[Part, CostDataset]) -> CostModel:
    """One that learned less, and believes otherwise of each table."""
    options = TrainOptions(members=3, steps=25)
    parts = formula_parts
    compute, _ = train_compute(parts["train"], parts["validation"], options, seed=1)
    return CostModel(compute, model.provenance)
