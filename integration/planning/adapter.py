"""Plans of this package in the loop of TorchRec's planner, as its only proposal."""

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from autoshard.cost_model.hardware import Reporter
from autoshard.cost_model.models.model import CostModel
from autoshard.cost_model.threads import one_thread
from autoshard.integration.models.bags import name_of
from autoshard.integration.models.lookups import GLOBAL_BATCHES
from autoshard.integration.models.tables import described
from autoshard.integration.planning.options import (
    missing_storage,
    take_storage,
    torchrec_options,
)
from autoshard.integration.planning.problem import devices_of, gpu_of, network_of
from autoshard.integration.planning.rest import plan_of_torchrec
from autoshard.integration.planning.tables import ModelOptions, model_options
from autoshard.integration.planning.task import PlanOptions
from autoshard.sharders.context import SharderContext
from autoshard.sharders.registry import make_sharder
from autoshard.workload.packing.table_options import OptionResources
from autoshard.workload.plans.plan import PlanError, ShardingPlan
from autoshard.workload.plans.protocols import Sharder
from autoshard.workload.tables.table import MAX_POOLING_FACTOR, EmbeddingTable
from autoshard.workload.tasks.task import ShardingTask

_TRIES = 4  # plans, each with less memory where TorchRec counts more than was to be had
_NAMED = 3  # tables in a note
# Rows of a table whose lookups, not pooled, take FBGEMM as long on a CPU as so many bags of one
# lookup. With more rows they take 3 (of 4,000), 6 (17,000) and 7 to 20 times as long (150,000 to
# 340,000): medians of 20 shards on an EPYC 25.17.
_ROWS_OF_ONE, _MOST_TIMES = 150, 20.0


@dataclass(frozen=True)
class PlannerInputs:
    """Arguments of an `AutoShardPlanner`.

    Args:
        options: How plans are made.
        decider: Sharder, or plan that is taken; None: that which the options name.
        batches: Batches of one rank.
        batch_size: Samples of one rank.
        topology: The ranks.
        constraints: TorchRec's constraints by name of a table.
        of_torchrec: Arguments of TorchRec's planner for tables without a price.
    """

    options: PlanOptions
    decider: Sharder | ShardingPlan | None
    batches: Iterable[Any] | None
    batch_size: int
    topology: Topology
    constraints: dict[str, ParameterConstraints] | None
    of_torchrec: Mapping[str, Any]


@dataclass
class Planning:
    """The planning of one model, and what came of it.

    Args:
        model: The model.
        sharders: TorchRec's sharders.

    Attributes:
        plan: Plan of the tables that have a price.
        task: The task that it is for.
        context: Cost oracle and policy by which it was made.
        notes: What was taken for granted, and what TorchRec's planner planned.
    """

    model: nn.Module
    sharders: list[ModuleSharder[Any]]
    plan: ShardingPlan | None = None
    task: ShardingTask | None = None
    context: SharderContext | None = None
    notes: list[str] = field(default_factory=list)

    def say(self, note: str) -> None:
        """Takes a note."""
        if note not in self.notes:
            self.notes.append(note)


class PlanAdapter(Proposer, Partitioner):  # type: ignore[misc]
    """Proposes once, and partitions by a plan of this package.

    Attributes:
        inputs: Arguments of the planner, which sets them.
        now: The planning of the model at hand; set for each model.
    """

    inputs: PlannerInputs
    now: Planning

    def __init__(self) -> None:
        self._enumerator: Any = None
        self._found: tuple[tuple[EmbeddingTable, ...], CostModel] | None = None
        self._read: list[Any] | None = None
        self._known: ModelOptions | None = None
        self._proposal: list[ShardingOption] | None = None

    def load(
        self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Takes the options of all tables."""
        self._enumerator, self._found = enumerator, None
        constraints, topology = self.inputs.constraints or {}, self.inputs.topology
        self._known = model_options(
            search_space,
            enumerator,
            constraints,
            topology,
            self.inputs.batch_size,
            copies_have_price=self.inputs.options.in_training,
        )
        self._proposal = [
            *self._known.options.values(),
            *_first_of_each(self._known.unpriced),
        ]

    def propose(self) -> list[ShardingOption] | None:
        """Returns an option of each table, once."""
        proposal, self._proposal = self._proposal, None
        return proposal

    def feedback(self, *_args: Any, **_kwargs: Any) -> None:
        """Ignores feedback, because the plan is fixed."""

    def partition(
        self,
        proposal: Sequence[ShardingOption],  # noqa: ARG002
        storage_constraint: Topology,
    ) -> list[ShardingOption]:
        """Returns an option with ranks for each table; PlannerError if they do not fit."""
        known, storage = self._known, storage_constraint
        assert known is not None
        nothing = [0] * storage.world_size
        if known.approximate:
            self.now.say(_note("prices are approximate", known.approximate))
        if known.unpriced:
            why = "planned by TorchRec's planner, as they have no price here"
            self.now.say(_note(why, known.reasons))
        if not known.priced:
            return self._by_torchrec(known.unpriced, storage, [])
        try:
            own = self._placed(known, storage, nothing)
        except PlannerError as error:
            if isinstance(self.inputs.decider, ShardingPlan):
                raise
            return self._all_by_torchrec(known, storage, error)
        if not known.unpriced:
            return own
        left = copy.deepcopy(storage)
        take_storage(own, left)
        try:
            return own + self._by_torchrec(known.unpriced, left, own)
        except PlannerError:  # they leave too little together: the others first
            others, left = self._by_torchrec(known.unpriced, storage, own), copy.deepcopy(storage)
            take_storage(others, left)
            return self._placed(known, left, nothing) + others

    def _by_torchrec(
        self,
        options: Sequence[ShardingOption],
        left: Topology,
        beside: Sequence[ShardingOption],
    ) -> list[ShardingOption]:
        """Returns TorchRec's plan of some tables; PlannerError if they do not fit."""
        return plan_of_torchrec(
            options,
            beside,
            left,
            self._enumerator,
            self.now.model,
            self.now.sharders,
            batch_size=self.inputs.batch_size,
            constraints=self.inputs.constraints,
            debug=False,
            **self.inputs.of_torchrec,
        )

    def _all_by_torchrec(
        self, known: ModelOptions, storage: Topology, error: PlannerError
    ) -> list[ShardingOption]:
        """Returns TorchRec's plan of all tables; the error if it has none, either."""
        try:
            made = self._by_torchrec([*known.all_options, *known.unpriced], storage, [])
        except PlannerError:
            raise error from None
        self.now.plan = self.now.task = self.now.context = None
        self.now.say(f"planned by TorchRec's planner, as no plan here fits: {error}")
        return made

    def _placed(
        self, known: ModelOptions, storage: Topology, lacking: list[int]
    ) -> list[ShardingOption]:
        """Returns options of priced tables with ranks; PlannerError if they do not fit."""
        given = self.inputs.decider
        for _ in range(_TRIES):
            context, task = self._problem(known, storage, lacking)
            self.now.context, self.now.task = context, task
            plan = given if isinstance(given, ShardingPlan) else self._plan(context, task)
            made = torchrec_options(plan, known, self.inputs.topology)
            plan.check_rules(task)
            self._enumerator.populate_estimates(made)
            over = missing_storage(made, storage)
            if not any(over) or isinstance(given, ShardingPlan):
                break
            lacking = [had + more for had, more in zip(lacking, over, strict=True)]
        take_storage(made, copy.deepcopy(storage))  # raises where they do not fit
        self.now.plan = plan
        return made

    def _problem(
        self, known: ModelOptions, storage: Topology, lacking: list[int]
    ) -> tuple[SharderContext, ShardingTask]:
        (tables, model), ranks = self._tables(known, storage), storage.world_size
        options, report = self.inputs.options, Reporter(self.now.say, self.now.say)
        context, task = options.prepared(
            tables,
            devices_of(storage, lacking),
            self.inputs.batch_size * ranks,
            model,
            network_of(storage, model.links.get(ranks)),
            report,
        )
        task = replace(task, rules=(*task.rules, *known.rules))
        if known.uvm and model.data_sheet is not None:
            host = min(int(device.storage.ddr) for device in storage.devices)
            context = replace(context, resources=OptionResources(host_bytes=host))
        return context, task

    def _plan(self, context: SharderContext, task: ShardingTask) -> ShardingPlan:
        decider = self.inputs.decider
        if decider is None:
            decider = make_sharder(self.inputs.options.sharder, context)
        assert not isinstance(decider, ShardingPlan)
        try:
            with one_thread():
                plan = decider.shard(task)
            plan.check(task)
        except PlanError as error:
            raise PlannerError(str(error), PlannerErrorType.PARTITION) from error
        return plan

    def _batches(self, ranks: int) -> Iterable[Any] | None:
        """Returns the batches that are counted; those of an iterator are kept for later plans."""
        if self._read is None and self.inputs.batches is not None:
            self._read = list(islice(self.inputs.batches, GLOBAL_BATCHES * ranks))
        return self._read

    def _tables(
        self, known: ModelOptions, storage: Topology
    ) -> tuple[tuple[EmbeddingTable, ...], CostModel]:
        """Returns the tables with their lookups, and their cost model; batches are read once."""
        if self._found is not None:
            return self._found
        inputs, report = self.inputs, Reporter(self.now.say, self.now.say)
        with warnings.catch_warnings(record=True) as doubts:
            warnings.simplefilter("always")
            found = described(
                known.priced,
                self._batches(storage.world_size),
                storage.world_size,
                inputs.constraints,
                inputs.batch_size,
            )
        for doubt in doubts:
            self.now.say(str(doubt.message))
        gpu = None
        if storage.compute_device != "cpu" and inputs.options.hardware is None:
            gpu, guess = gpu_of(storage)
            if guess is not None and inputs.options.cost_model is None:
                self.now.say(guess)
        model = inputs.options.model(found.operator, gpu, report)
        tables = found.tables
        if storage.compute_device == "cpu":
            tables = tuple(map(_as_if_pooled, tables))
        self._found = tables, model
        return self._found


def _as_if_pooled(table: EmbeddingTable) -> EmbeddingTable:
    """Returns a table with lookups that take as long on a CPU as those that are not pooled."""
    if table.pooled:
        return table
    times = min(max(1.0, (table.rows / _ROWS_OF_ONE) ** (1 / 3)), _MOST_TIMES)
    lookups = min(times * table.pooling_factor, MAX_POOLING_FACTOR)
    return replace(table, pooling_factor=lookups)


def _first_of_each(options: Iterable[ShardingOption]) -> list[ShardingOption]:
    found: dict[str, ShardingOption] = {}
    for option in options:
        found.setdefault(name_of(option.path, option.name), option)
    return list(found.values())


def _note(what: str, reasons: Mapping[str, str]) -> str:
    shown = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:_NAMED])
    more = f"; and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    return f"{what}: {shown}{more}"
