"""Tables without a price, planned by TorchRec's planner in the memory that is left."""

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import (
    Enumerator,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from autoshard.integration.models.bags import name_of
from autoshard.integration.plans.table_shardings import BY_ROWS
from autoshard.workload.tables.table import rows_of_block

# By rows, TorchRec takes sums for means, and divides them afterwards.
_DIVIDED = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value}


def plan_of_torchrec(
    options: Sequence[ShardingOption],
    beside: Sequence[ShardingOption],
    left: Topology,
    enumerator: Enumerator,
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    **arguments: Any,
) -> list[ShardingOption]:
    """Returns one of TorchRec's options for each table, with ranks; PlannerError if none fit.

    Args:
        options: Options of the tables.
        beside: Options of all other tables of the model.
        left: Topology with the storage that is left.
        enumerator: Enumerator that made the options.
        module: Model.
        sharders: TorchRec's sharders.
        arguments: Other arguments of EmbeddingShardingPlanner.
    """
    found = list[ShardingOption]()
    means, divided = _of_mean_pooling(options), _divided_sums([*options, *beside])
    faults = [_fault(option, means, divided) for option in options]
    offered = [option for option, why in zip(options, faults, strict=True) if why is None]
    known = {(option.path, option.name) for option in offered}
    for option, why in zip(options, faults, strict=True):
        if (option.path, option.name) not in known:
            raise PlannerError(
                f"table {name_of(option.path, option.name)} {why}, or allow other sharding types",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )

    def with_others(plan: list[ShardingOption]) -> list[ShardingOption]:
        found.extend(plan)
        return [*plan, *beside]  # it checks that plans have all modules

    planner = EmbeddingShardingPlanner(
        topology=left,
        enumerator=_Offers(offered, enumerator),
        storage_reservation=_Left(left),
        stats=NoopEmbeddingStats(),
        callbacks=[with_others],
        **arguments,
    )
    try:
        planner.plan(module, sharders)
    except PlannerError as error:
        count = len({(option.path, option.name) for option in options})
        text = f"TorchRec's planner finds no place for the {count} tables that it plans: "
        text += last_reason(error)
        raise PlannerError(text, error.error_type) from None
    return found


def last_reason(error: PlannerError) -> str:
    """Returns why TorchRec's planner did not take the last plan that was proposed.

    The rest of its message is about storage that it takes for all there is.
    """
    return str(error).rpartition("Last planner error:")[2].strip().partition("\n")[0]


def _of_mean_pooling(options: Iterable[ShardingOption]) -> set[tuple[str, str]]:
    """Returns the tables of mean pooling, by the paths of their collections and their names."""
    return {
        (path, each.name)
        for path, module in dict(option.module for option in options).items()
        if isinstance(module, EmbeddingBagCollection)
        for each in module.embedding_bag_configs()
        if each.pooling is PoolingType.MEAN
    }


def _divided_sums(options: Iterable[ShardingOption]) -> set[str]:
    """Returns paths of collections with other tables that may be sharded otherwise than by rows.

    If one of mean pooling is by rows, TorchRec divides what these look up, too.
    """
    kinds, names = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for option in options:
        kinds[option.path].add(option.sharding_type)
        names[option.path].add(option.name)
    return {path for path, found in kinds.items() if len(names[path]) > 1 and found - _DIVIDED}


def _fault(
    option: ShardingOption, means: Collection[tuple[str, str]], divided: Collection[str]
) -> str | None:
    """Returns why TorchRec would look up wrong embeddings, silently; None if they are right."""
    if option.sharding_type not in BY_ROWS:
        return None
    if (option.path, option.name) in means:
        if option.sharding_type not in _DIVIDED:
            return "pools by mean and may be in a grid alone, of which TorchRec adds up means"
        if option.path in divided:
            return (
                "pools by mean and may be by rows alone, for which TorchRec divides other tables "
                "of the collection, too: give it a collection of its own"
            )
    if _has_uneven_rows(option):
        return (
            "may be in uneven blocks of rows alone, which TorchRec looks up wrongly: give ranks "
            "equal storage"
        )
    return None


def _has_uneven_rows(option: ShardingOption) -> bool:
    """Returns whether blocks of rows are other than TorchRec looks ids up by."""
    first = min(shard.offset[1] for shard in option.shards)
    blocks = sorted((s.offset[0], s.size[0]) for s in option.shards if s.offset[1] == first)
    rows, size = option.tensor.shape[0], rows_of_block(option.tensor.shape[0], len(blocks))
    even = [max(0, min(size, rows - number * size)) for number in range(len(blocks))]
    return [held for _, held in blocks] != even


class _Offers(Enumerator):  # type: ignore[misc]
    """Enumerates given options."""

    def __init__(self, options: Sequence[ShardingOption], enumerator: Enumerator) -> None:
        self._options, self._enumerator = options, enumerator

    def enumerate(
        self,
        module: nn.Module,  # noqa: ARG002
        sharders: list[ModuleSharder[Any]],  # noqa: ARG002
    ) -> list[ShardingOption]:
        """Returns copies of the options."""
        return [copy.deepcopy(option) for option in self._options]

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimates storage and time of options."""
        self._enumerator.populate_estimates(sharding_options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._enumerator, name)


class _Left(StorageReservation):  # type: ignore[misc]
    """Reserves what is not left."""

    _percentage = 0.0  # TorchRec's messages name it

    def __init__(self, left: Topology) -> None:
        self._left = left

    def reserve(self, *_args: Any, **_options: Any) -> Topology:
        """Returns the topology that is left."""
        return copy.deepcopy(self._left)

    @property
    def last_reserved_topology(self) -> Topology:
        """The topology that is left."""
        return self._left
