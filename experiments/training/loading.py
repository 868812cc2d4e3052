"""What a command that shards goes by: names of sharders, the cost model, the oracle over it."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from autoshard.cost_model import (
    CostModel,
    DataError,
    EstimatedCosts,
    OutsideTraining,
    Selection,
    TableFactors,
    read_costs,
)
from autoshard.experiments.training.run_folder import COST_MODEL
from autoshard.sharders import SHARDERS, find_policy, make_sharder
from autoshard.workload import EmbeddingTable

_SHIPPED = Path("cpu")


def check_sharders(names: Sequence[str]) -> None:
    """UserError with the list of all sharders, if one is not among them."""
    for name in names:
        if name not in SHARDERS:
            make_sharder(name)


def model_beside(policy: Path) -> Path:
    """The cost model that a policy was trained with, if it lies beside it; else the shipped one."""
    folder = find_policy(policy) / COST_MODEL
    return folder if folder.is_dir() else _SHIPPED


def oracle_for(
    model: CostModel,
    batch_size: int,
    tables: Sequence[EmbeddingTable],
    store: Path | None = None,
) -> EstimatedCosts:
    """The oracle, by what the store knows of tables; warns of what it has learned little of."""
    factors = None
    if store is not None and store.is_file():
        factors = _known(model, batch_size, store)
    oracle = EstimatedCosts(model, batch_size, factors)
    learned = model.provenance.batch_sizes
    if not min(learned) <= batch_size <= max(learned):
        warnings.warn(
            f"the cost model learned from batches of {', '.join(map(str, learned))} samples, not "
            f"of {batch_size}: its costs are less sure",
            stacklevel=2,
        )
    oracle.amounts([table.whole() for table in tables])
    # Other oracles over the same model, and slices of the same tables, would say it all again.
    warnings.simplefilter("ignore", OutsideTraining)
    return oracle


def _known(model: CostModel, batch_size: int, store: Path) -> TableFactors | None:
    """What was measured on the model's hardware, in such batches."""
    told = model.provenance
    asked = Selection(told.operator.weights, told.operator.optimizer, (batch_size,), told.hardware)
    try:
        data = read_costs([store], asked, told.quiet)
    except DataError as error:  # it is of other hardware, or other batches
        warnings.warn(f"what was measured is not used: {error}", stacklevel=3)
        return None
    return TableFactors(model.compute, batch_size).learn(data)
