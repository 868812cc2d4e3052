"""`SharderContext`: cost model, policy and measurer of sharders, loaded on demand."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.cost_model import (
    CostModel,
    EstimatedCosts,
    OutsideTraining,
    TableResiduals,
)
from autoshard.sharders.policy.files import SHIPPED, Policy, load_policy
from autoshard.workload import EmbeddingTable, ShardingTask, UserError
from autoshard.workload.packing.table_options import NO_RESOURCES, OptionResources

if TYPE_CHECKING:
    from autoshard.sharders.measuring import Measurer

MEASURE_SECONDS = 20.0  # enough for 60 tables on two cores


@dataclass(frozen=True)
class SharderContext:
    """Resources of sharders, as far as they are available.

    Args:
        oracle: Prices devices and plans by a cost model.
        policy: Trained policy.
        measurer: Measures shards on the devices of a pool.
        measure_seconds: Seconds that a measuring sharder may take.
        seed: Seed of all random choices.
        seconds: Seconds that a sharder that searches may take. None: until it finds no better plan.
        resources: Ids of hot rows, hashed ids and host memory, as far as options may use them.
    """

    oracle: EstimatedCosts | None = None
    policy: Policy | None = None
    measurer: "Measurer | None" = None
    measure_seconds: float = MEASURE_SECONDS
    seed: int = 0
    seconds: float | None = None
    resources: OptionResources = NO_RESOURCES

    @property
    def costs(self) -> EstimatedCosts:
        """The oracle of a sharder that declares that it needs a cost model."""
        assert self.oracle is not None
        return self.oracle


def open_context(
    needs: frozenset[str],
    tables: Sequence[EmbeddingTable],
    batch_size: int,
    model: CostModel | Sequence[CostModel],
    policy: Path = SHIPPED,
    store: Path | None = None,
) -> SharderContext:
    """Returns what sharders need, with the policy if that is needed.

    Args:
        needs: Requirements of the sharders, from `needs_of`.
        tables: Tables that are to be sharded.
        batch_size: Samples of a batch, of all ranks together.
        model: Cost model, or those of several kinds of devices.
        policy: Folder of a policy, or the name of a shipped one.
        store: File of measurements, which correct the costs of the tables.
    """
    models = [model] if isinstance(model, CostModel) else list(model)
    oracles = {
        each.provenance.hardware: open_oracle(each, batch_size, tables, store) for each in models
    }
    if len(oracles) < len(models):
        raise UserError(f"{models[0].provenance.hardware} is named twice: name each kind once")
    (oracle, *others) = oracles.values()
    if others:
        from autoshard.cost_model.pricing.mixed_costs import MixedCosts  # devices are mostly equal

        oracle = MixedCosts(oracles)
    return SharderContext(
        oracle,
        load_policy(policy) if "policy" in needs else None,
    )


def open_oracle(
    model: CostModel,
    batch_size: int,
    tables: Sequence[EmbeddingTable],
    store: Path | None = None,
) -> EstimatedCosts:
    """Returns the oracle, corrected by measurements of the tables in the store.

    Warns of tables and batch sizes outside the training data.
    """
    residuals = None
    if store is not None and store.exists():  # it says what is wrong with a folder
        residuals = _stored_residuals(model, batch_size, tables, store)
    oracle = EstimatedCosts(model, batch_size, residuals)
    learned = model.provenance.batch_sizes
    if not min(learned) <= batch_size <= max(learned):
        warnings.warn(
            f"the cost model learned from batches of {', '.join(map(str, learned))} samples, not "
            f"of {batch_size}: its costs are less certain",
            stacklevel=2,
        )
    oracle.amounts([table.whole() for table in tables])
    # Other oracles of the same model, and pieces of the same tables, would repeat the warnings.
    warnings.simplefilter("ignore", OutsideTraining)
    return oracle


def oracle_of(
    known: EstimatedCosts, task: ShardingTask, store: Path | None = None
) -> EstimatedCosts:
    """Returns the oracle of a task with other devices, network or batch size.

    Args:
        known: Oracle of the same tables.
        task: The task.
        store: File of measurements, which are read again for another batch size.
    """
    oracle = known.for_objective(task.objective, len(task.devices))
    if task.batch_size == known.batch_size:
        return oracle
    return open_oracle(oracle.model, task.batch_size, task.tables, store)


def _stored_residuals(
    model: CostModel, batch_size: int, tables: Sequence[EmbeddingTable], path: Path
) -> TableResiduals | None:
    """Returns corrections by measurements on the model's hardware; None without measurements."""
    from autoshard.benchmark import MeasurementStore  # loaded where there is a store
    from autoshard.cost_model.networks.dataset import CostDataset, stored_costs

    origin, sheet = model.provenance, model.data_sheet
    with MeasurementStore(path) as store:
        make = origin.hardware, origin.versions
        if sheet is not None:  # the latest measurements of such a GPU
            make = next((m for m in reversed(store.makes()) if sheet.is_of(m[0])), make)
        found = stored_costs(store, make, origin.operator, batch_size)
        others = len(store) - len(found)
    if not found and others:
        warnings.warn(
            f"{path} is not used: what it has is of other hardware or versions than the cost "
            f"model's, of another operator, or of other batches than {batch_size}",
            stacklevel=3,
        )
    if not found:
        return None
    data = CostDataset.of(found, level=origin.reference_level)
    return TableResiduals(model.compute, batch_size).learn(data, tables)
