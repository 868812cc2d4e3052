"""What a command that shards goes by: names of sharders, the cost model, the oracle over it."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from autoshard.benchmark import MeasurementStore
from autoshard.cost_model import (
    CostDataset,
    CostModel,
    EstimatedCosts,
    OutsideTraining,
    TableFactors,
)
from autoshard.cost_model.dataset import stored_costs
from autoshard.experiments.console import cli
from autoshard.experiments.training.run_folder import COST_MODEL
from autoshard.sharders import (
    NEED_POOL,
    NEED_TORCHREC,
    SHARDERS,
    find_policy,
    make_sharder,
)
from autoshard.workload import EmbeddingTable, UserError

_SHIPPED = Path("cpu")


def check_sharders(names: Sequence[str]) -> None:
    """UserError with the list of all sharders, if one is not among them."""
    for name in names:
        if name not in SHARDERS:
            make_sharder(name)


def all_sharders(measure: bool) -> list[str]:
    """The names of all sharders that can run here; those that measure only where they may.

    A note says it where TorchRec is missing.
    """
    names = [name for name in SHARDERS if measure or name not in NEED_POOL]
    try:
        for name in NEED_TORCHREC:
            make_sharder(name)
    except UserError as missing:
        left_out = " and ".join(sorted(NEED_TORCHREC))
        cli.console.print(f"note: {left_out} are left out: {missing}", soft_wrap=True)
        names = [name for name in names if name not in NEED_TORCHREC]
    return names


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
        factors = _known(model, batch_size, tables, store)
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


def _known(
    model: CostModel, batch_size: int, tables: Sequence[EmbeddingTable], path: Path
) -> TableFactors | None:
    """What was measured on the model's hardware, in such batches."""
    told = model.provenance
    with MeasurementStore(path) as store:
        found = stored_costs(store, (told.hardware, told.versions), told.operator, batch_size)
        others = len(store) - len(found)
    if not found and others:
        warnings.warn(
            f"{path} is not used: what it has is of other hardware or versions than the cost "
            f"model's, of another operator, or of other batches than {batch_size}",
            stacklevel=3,
        )
    if not found:
        return None
    data = CostDataset.of(found, level=told.quiet)
    return TableFactors(model.compute, batch_size).learn(data, tables)
