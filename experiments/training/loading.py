"""What a command that shards goes by: names of sharders, the cost model, the oracle over it."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from autoshard.cost_model import CostModel, EstimatedCosts, OutsideTraining
from autoshard.experiments.training.run_folder import COST_MODEL
from autoshard.sharders import SHARDERS, find_policy, make_sharder
from autoshard.workload import EmbeddingTable

_SHIPPED = Path("cpu")
_TOLD = 3  # strange tables that are told of one by one


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
    model: CostModel, batch_size: int, tables: Sequence[EmbeddingTable]
) -> EstimatedCosts:
    """The oracle; warns of all that the model has learned little of, and of it only once."""
    oracle = EstimatedCosts(model, batch_size)
    learned = model.provenance.batch_sizes
    if batch_size not in learned:
        warnings.warn(
            f"the cost model learned from batches of {', '.join(map(str, learned))} samples, not "
            f"of {batch_size}: its costs are less sure",
            stacklevel=2,
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OutsideTraining)
        oracle.amounts([table.whole() for table in tables])
    for told in caught[:_TOLD]:
        warnings.warn(told.message, stacklevel=2)
    if len(caught) > _TOLD:
        warnings.warn(
            f"{len(caught) - _TOLD} more tables lie outside of what the cost model learned from",
            OutsideTraining,
            stacklevel=2,
        )
    # Other oracles over the same model, and slices of the same tables, would say it all again.
    warnings.simplefilter("ignore", OutsideTraining)
    return oracle
