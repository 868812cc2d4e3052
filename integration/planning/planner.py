"""`AutoShardPlanner`: plans of this package in the place of TorchRec's planner."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import distributed, nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from autoshard.cost_model.models.model import CostModel
from autoshard.integration.models.bags import check_not_sharded
from autoshard.integration.planning.adapter import PlanAdapter, PlannerInputs, Planning
from autoshard.integration.planning.ranks import on_first_rank
from autoshard.integration.planning.rest import last_reason
from autoshard.integration.planning.task import PlanOptions, Rules
from autoshard.sharders.explaining.summary import training_notes
from autoshard.sharders.policy.files import SHIPPED
from autoshard.workload.data_sheets import DataSheet
from autoshard.workload.errors import UserError
from autoshard.workload.plans.plan import ShardingPlan
from autoshard.workload.plans.protocols import Sharder
from autoshard.workload.tasks.objective import Objective, ObjectiveName
from autoshard.workload.tasks.task import ShardingTask

logger = logging.getLogger("autoshard")


class AutoShardPlanner(EmbeddingShardingPlanner):  # type: ignore[misc]
    """Takes the place of TorchRec's `EmbeddingShardingPlanner`: plans a model by this package.

    Tables without a price (virtual, or of weights or an optimizer that the others do not have) are
    planned by TorchRec's own planner in the memory that is left. Prices of unpooled tables, and of
    mean pooling, are approximate. TorchRec's estimate of storage decides whether a plan fits.

    Args:
        topology: Ranks, storage and bandwidths. Default: as TorchRec's, by the process group.
        batch_size: Samples of one rank. Default: TorchRec's, 512.
        enumerator: Tells which sharding types and kernels tables may have, and their storage.
        storage_reservation: Storage that is not for tables.
        proposer: For tables without a price.
        partitioner: For tables without a price.
        performance_model: For tables without a price.
        stats: TorchRec's reports of the plan.
        constraints: Constraints by name of a table. All of their fields count.
        debug: Whether TorchRec's report has details.
        callbacks: Functions that change plans before they are returned.
        timeout_seconds: Maximum seconds of TorchRec's planner, for tables without a price.
        plan_loader: Loads a plan in place of planning.
        hardware: A GPU by name (`h100-80gb`), NAME=FILE of its data sheet, or the file of a probe
            (`autoshard probe`). Default: the hardware of this machine.
        cost_model: Cost model, its folder, or the name of a shipped one.
        sharder: Name of a sharder, a sharder, or a plan that is already made.
        batches: Batches of one rank, in which lookups are counted. Without, pooling factors of
            `constraints` count.
        rules: Further constraints, or their YAML file.
        seconds: Seconds that the sharder may search. Default: until it finds no better plan.
        objective: `step`, `pipelined` (for TrainPipelineSparseDist), `operators`, `compute`, or an
            Objective with a network of its own.
        report: File for a page (HTML) about the plan.
        store: File that keeps measurements and the probe of this machine. Default: in the user's
            cache.
        policy: Folder of a policy, or the name of a shipped one.
        seed: Seed of random choices.

    Attributes:
        planning: Plan, task, cost oracle and notes of the last call; None before.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: Any = None,
        *,
        hardware: str | DataSheet | None = None,
        cost_model: CostModel | Path | str | None = None,
        sharder: str | Sharder | ShardingPlan = "autoshard",
        batches: Iterable[Any] | None = None,
        rules: Rules | None = None,
        seconds: float | None = None,
        objective: Objective | ObjectiveName = "step",
        report: Path | str | None = None,
        store: Path | str | None = None,
        policy: Path | str = SHIPPED,
        seed: int = 0,
    ) -> None:
        if topology is None and not distributed.is_initialized():
            raise UserError(
                "no topology is given, and there is no process group to take it from: give "
                "topology=, or call torch.distributed.init_process_group first"
            )
        self._adapter = PlanAdapter()
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=self._adapter,
            partitioner=self._adapter,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        self._adapter.inputs = PlannerInputs(
            PlanOptions(
                hardware=hardware,
                cost_model=cost_model,
                sharder=sharder if isinstance(sharder, str) else "autoshard",
                seconds=seconds,
                objective=objective,
                rules=rules,
                store=store,
                policy=policy,
                seed=seed,
            ),
            _decider(sharder),
            batches,
            self._batch_size,
            self._topology,
            {name: each for name, each in (constraints or {}).items() if each is not None},
            {
                "proposer": proposer,
                "partitioner": partitioner,
                "performance_model": performance_model,
                "timeout_seconds": timeout_seconds,
            },
        )
        self._report = None if report is None else Path(report)
        self.planning: Planning | None = None

    @property
    def sharding_plan(self) -> ShardingPlan | None:
        """The last plan, of the tables that have a price; None without one."""
        return None if self.planning is None else self.planning.plan

    @property
    def task(self) -> ShardingTask | None:
        """The task of the last plan."""
        return None if self.planning is None else self.planning.task

    @property
    def notes(self) -> list[str]:
        """Assumptions of the last plan, and the tables of it that TorchRec's planner planned."""
        return [] if self.planning is None else self.planning.notes

    def plan(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]] | None = None
    ) -> TorchRecPlan:
        """Returns the plan of a model, for `DistributedModelParallel(plan=)`.

        Args:
            module: Model that is not sharded; it may be on device meta.
            sharders: TorchRec's sharders; by default those of TorchRec.

        Raises:
            PlannerError: There is no plan that fits, or constraints leave a table no option.
            UserError: The model, an option or the topology is not valid.
        """
        for path, each in module.named_modules():
            check_not_sharded(path, each)
        sharders = get_default_sharders() if sharders is None else sharders
        self.planning = self._adapter.now = Planning(module, sharders)
        try:
            found: TorchRecPlan = super().plan(module, sharders)
        except PlannerError as error:
            raise PlannerError(last_reason(error), error.error_type) from None
        except RuntimeError as error:
            text = str(error)
            if "after applying user provided constraints" not in text:
                raise
            line = text.partition(". Module")[0]
            kind = PlannerErrorType.STRICT_CONSTRAINTS
            raise PlannerError(f"{line}: allow other types or kernels", kind) from None
        if self.planning.plan is not None and self.planning.task is not None:
            for note in training_notes(self.planning.plan, self.planning.task):
                self.planning.say(note)
        for note in self.notes:
            logger.info(note)
        if self._report is not None:
            self._write_report(self._report)
        return found

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: distributed.ProcessGroup | None = None,
    ) -> TorchRecPlan:
        """Returns the plan that the first rank makes, on all ranks; all have to call it.

        Raises:
            UserError: The process group has another number of ranks than the topology, or ranks
                have different models: on all ranks.
        """
        group = pg or (distributed.group.WORLD if distributed.is_initialized() else None)
        if group is None:
            raise UserError(
                "the process group is not initialised: call torch.distributed.init_process_group "
                "first, or plan() on a single rank"
            )
        return on_first_rank(
            group, module, self._topology.world_size, lambda: self.plan(module, sharders)
        )

    def report(self, path: Path | str) -> None:
        """Writes a page (HTML) about the last plan.

        Raises:
            UserError: There is no plan, or the file cannot be written.
        """
        from autoshard.sharders import write_report  # others do without

        last = self.planning
        if last is None or last.plan is None or last.task is None or last.context is None:
            raise UserError(
                "there is no plan of autoshard on this rank: call plan() first; the first rank has "
                "that of collective_plan, unless TorchRec's planner planned all tables"
            )
        write_report(Path(path), last.plan, last.task, last.context, notes=last.notes)

    def _write_report(self, path: Path) -> None:
        """Writes the page; if that fails, there is a warning alone."""
        try:
            self.report(path)
        except (UserError, OSError) as error:
            logger.warning("the report was not written, the plan is kept: %s", error)


def _decider(sharder: object) -> Any:
    """Returns a sharder or a plan that was given; None for a name."""
    if isinstance(sharder, str):
        return None
    if not isinstance(sharder, ShardingPlan) and not callable(getattr(sharder, "shard", None)):
        raise UserError(
            f"sharder: must be the name of one, an object with shard(task), or a ShardingPlan, got "
            f"a {type(sharder).__name__}"
        )
    return sharder
