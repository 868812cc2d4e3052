"""Which tables of a model have a price, by the options that TorchRec's enumerator offers them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from autoshard.integration.models.bags import BagTable, name_of
from autoshard.integration.models.tables import lookups_by, operator_of
from autoshard.integration.planning.limits import Limit, grouped_rules, limits_of
from autoshard.integration.plans.slower_memory import kernel_of
from autoshard.integration.plans.table_shardings import BY_ROWS, COPIED, DENSE, FUSED
from autoshard.workload.errors import UserError
from autoshard.workload.packing.gpu_memory import MAX_COLUMNS
from autoshard.workload.tables.operators import OperatorOptions
from autoshard.workload.tasks.rules import Rule

_ROWS = frozenset((ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value))
_PRICED = _ROWS | {
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
    COPIED,
}

# Without copies, whose price is that of sums, and columns, which have to be of equal width there.
_UNPOOLED = {ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value}


@dataclass(frozen=True)
class ModelOptions:
    """TorchRec's options of all tables, by who plans them. Names are those of plans.

    Args:
        priced: Tables that have a price.
        approximate: Why the prices of some of these are approximate, by table.
        types: Sharding types that each of these may have.
        options: Any one of TorchRec's options for each of these.
        all_options: All of TorchRec's options of these.
        rules: Rules by which these have no other sharding types.
        operator: Weights and optimizer of these.
        uvm: Whether all of these may be in host memory, with caches on their GPUs.
        unpriced: TorchRec's options of all other tables.
        reasons: Why these have no price, by table.
    """

    priced: Mapping[str, BagTable]
    approximate: Mapping[str, str]
    types: Mapping[str, frozenset[str]]
    options: Mapping[str, ShardingOption]
    all_options: Sequence[ShardingOption]
    rules: tuple[Rule, ...]
    operator: OperatorOptions
    uvm: bool
    unpriced: Sequence[ShardingOption]
    reasons: Mapping[str, str]


@dataclass
class _Table:
    """A table with TorchRec's options, and what is found of it if it has a price."""

    options: list[ShardingOption] = field(default_factory=list)
    types: set[str] = field(default_factory=set)
    table: BagTable | None = None
    operator: OperatorOptions | None = None
    approximate: str | None = None  # why its price is
    limits: list[Limit] = field(default_factory=list)
    own_cache: bool = False  # its constraints describe one


def model_options(
    search_space: Sequence[ShardingOption],
    enumerator: Enumerator | None,
    constraints: Mapping[str, ParameterConstraints],
    topology: Topology,
    batch_size: int,
    copies_have_price: bool,
) -> ModelOptions:
    """Returns the options of a model's tables by who plans them.

    Where tables differ in weights or optimizer, those that most numbers are in have the price.

    Args:
        search_space: TorchRec's options of all tables.
        enumerator: The enumerator that made them.
        constraints: TorchRec's constraints by name of a table.
        topology: Topology of the ranks.
        batch_size: Samples of one rank.
        copies_have_price: Whether copies of tables have a price.
    """
    found: dict[str, _Table] = defaultdict(_Table)
    for option in search_space:
        each = found[name_of(option.path, option.name)]
        each.options.append(option)
        if option.compute_kernel == (DENSE if option.sharding_type == COPIED else FUSED):
            each.types.add(option.sharding_type)
    sharders = getattr(enumerator, "sharder_map", {})
    on_cpu = topology.compute_device == "cpu"
    configs, reasons = _configs(option.module[1] for option in search_space), dict[str, str]()
    for name, each in found.items():
        given = constraints.get(each.options[0].name)
        kernels = None if given is None else given.compute_kernels
        module = each.options[0].module[1]
        sharder = sharders.get(sharder_name(type(module)))
        is_free = (given is None or not given.sharding_types) and (not kernels or FUSED in kernels)
        # TorchRec offers rows for GPUs alone, though ranks on CPUs train by them, too.
        if is_free and on_cpu and type(sharder) is EmbeddingBagCollectionSharder:
            each.types |= _ROWS
        each.own_cache = given is not None and given.cache_params is not None
        try:
            fused_params = getattr(sharder, "fused_params", None)
            _examine(each, configs, given, fused_params, topology, batch_size)
            if each.limits == [("copied", ())] and not copies_have_price:
                reasons[name] = "it may be copied alone, and copies have no price"
        except UserError as error:
            reasons[name] = str(error)
    examined = {name: each for name, each in found.items() if name not in reasons}
    exact = [each for each in examined.values() if each.approximate is None]
    common = _most_common(exact)
    for name, each in examined.items():
        if not exact:
            reasons[name] = str(each.approximate)
        elif each.operator != common:
            reasons[name] = f"its operator is {each.operator}, that of most others {common}"
    kept = {name: each for name, each in found.items() if name not in reasons}
    return ModelOptions(
        {name: each.table for name, each in kept.items() if each.table is not None},
        {name: each.approximate for name, each in kept.items() if each.approximate is not None},
        {name: frozenset(each.types & _PRICED) for name, each in kept.items()},
        {name: each.options[0] for name, each in kept.items()},
        [option for each in kept.values() for option in each.options],
        grouped_rules({name: each.limits for name, each in kept.items()}),
        common,
        all(_may_be_in_host_memory(each) for each in kept.values()),
        [option for name in reasons for option in found[name].options],
        reasons,
    )


def _may_be_in_host_memory(each: _Table) -> bool:
    kernels = {option.compute_kernel for option in each.options}
    return {kernel_of(0), kernel_of(1)} <= kernels and not each.own_cache


def _configs(modules: Iterable[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
    """Returns the configurations of tables by collection and name; others have none."""
    found = dict[nn.Module, dict[str, Any]]()
    for module in dict.fromkeys(modules):
        if isinstance(module, EmbeddingBagCollection):
            found[module] = {config.name: config for config in module.embedding_bag_configs()}
        elif isinstance(module, EmbeddingCollection):
            found[module] = {config.name: config for config in module.embedding_configs()}
    return found


def _examine(
    each: _Table,
    configs: Mapping[nn.Module, Mapping[str, Any]],
    constraint: ParameterConstraints | None,
    fused_params: Mapping[str, Any] | None,
    topology: Topology,
    batch_size: int,
) -> None:
    """Finds operator and limits of a table; UserError if it has no price."""
    path, collection = each.options[0].module
    if not isinstance(collection, EmbeddingBagCollection | EmbeddingCollection):
        raise UserError(f"it is in a {type(collection).__name__}")
    table = BagTable(path, configs[collection][each.options[0].name], collection, fused_params)
    if isinstance(collection, EmbeddingCollection):
        each.approximate = "its lookups are not pooled"
        each.types &= _UNPOOLED
    elif table.config.pooling is not PoolingType.SUM:
        each.approximate = f"it pools by {table.config.pooling.name.lower()}"
        each.types.difference_update(BY_ROWS)  # TorchRec then divides sums of others, too
    if getattr(table.config, "use_virtual_table", False) or (
        constraint is not None and (constraint.use_virtual_table or constraint.key_value_params)
    ):
        raise UserError("it is a virtual table")
    if topology.compute_device != "cpu" and table.config.embedding_dim > MAX_COLUMNS:
        raise UserError(f"it has more than {MAX_COLUMNS:,} columns")
    # Its dim may be odd, and lookups may be those of other features.
    table.described(**({} if constraint is None else lookups_by(table, constraint, batch_size)))
    operator = operator_of(table)
    types, rows = frozenset(each.types & _PRICED), table.config.num_embeddings
    limits = limits_of(types, rows, topology.world_size, constraint) if types else None
    if limits is None:
        allowed = sorted({f"{o.sharding_type} in {o.compute_kernel}" for o in each.options})
        raise UserError(f"it may be {', '.join(allowed)} alone")
    each.table, each.operator, each.limits = table, operator, limits


def _most_common(tables: Iterable[_Table]) -> OperatorOptions:
    """Returns the operator of tables with most numbers together."""
    numbers: dict[OperatorOptions, int] = defaultdict(int)
    for each in tables:
        if each.table is not None and each.operator is not None:
            config = each.table.config
            numbers[each.operator] += config.num_embeddings * config.embedding_dim
    return max(numbers, key=lambda each: numbers[each], default=OperatorOptions())
