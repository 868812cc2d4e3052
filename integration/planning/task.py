"""Options of plans, and the task and the resources that they make."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from autoshard.benchmark.probe.report import load_probe
from autoshard.cost_model.hardware import (
    Reporter,
    find_data_sheet,
    for_tables,
    load_quietly,
    model_of_machine,
    model_of_sheet,
)
from autoshard.cost_model.models.model import CostModel
from autoshard.integration.planning.stores import probe_store, writable
from autoshard.sharders.context import SharderContext, open_context
from autoshard.sharders.policy.files import SHIPPED
from autoshard.sharders.registry import check_takes_seconds, needs_of
from autoshard.workload.data_sheets import DataSheet
from autoshard.workload.errors import FieldError
from autoshard.workload.tables.operators import OperatorOptions
from autoshard.workload.tables.table import EmbeddingTable
from autoshard.workload.tasks.constraints import Constraints
from autoshard.workload.tasks.links import AnyLink
from autoshard.workload.tasks.objective import Objective, ObjectiveName
from autoshard.workload.tasks.task import Device, ShardingTask

Rules = Constraints | Mapping[str, Any] | Path | str


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How a plan is made.

    Args:
        hardware: A GPU by name (`h100-80gb`), NAME=FILE of its data sheet, or the file of a probe.
            None: that of this machine.
        cost_model: Cost model, its folder, or the name of a shipped one.
        sharder: Name of a sharder.
        seconds: Seconds that planning may take. None: until no better plan is found.
        objective: What plans minimise; by name, with the network that is known.
        rules: Constraints, or their file.
        store: File of measurements, which also keeps the probe of this machine. None: in the
            user's cache.
        policy: Folder of a policy, or the name of a shipped one.
        seed: Seed of random choices.
    """

    hardware: str | DataSheet | None = None
    cost_model: CostModel | Path | str | None = None
    sharder: str = "autoshard"
    seconds: float | None = None
    objective: Objective | ObjectiveName = "step"
    rules: Rules | None = None
    store: Path | str | None = None
    policy: Path | str = SHIPPED
    seed: int = 0

    def __post_init__(self) -> None:
        names = get_args(ObjectiveName)
        if not isinstance(self.objective, Objective) and self.objective not in names:
            problem = f"must be one of {', '.join(names)}, got {self.objective!r}"
            raise FieldError("objective", problem)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise FieldError("seed", f"must be a whole number from 0 up, got {self.seed!r}")
        if not isinstance(self.hardware, str | DataSheet | None):
            raise FieldError("hardware", f"must be a name or a file, got {self.hardware!r}")
        if not isinstance(self.sharder, str):
            raise FieldError("sharder", f"must be the name of one, got {self.sharder!r}")
        if self.seconds is not None:
            number = isinstance(self.seconds, int | float)
            if not number or not 0 < self.seconds < float("inf"):
                raise FieldError("seconds", f"must be more than 0, got {self.seconds}")
            check_takes_seconds(self.sharder)
        needs_of([self.sharder])  # raises for an unknown name

    @property
    def in_training(self) -> bool:
        """Whether steps of training are wanted, not operators alone."""
        named = self.objective
        return (named if isinstance(named, Objective) else Objective(named)).in_training

    @property
    def _store(self) -> Path:
        return probe_store() if self.store is None else Path(self.store)

    def model(
        self, operator: OperatorOptions, gpu: DataSheet | None, report: Reporter
    ) -> CostModel:
        """Returns the cost model.

        Args:
            operator: Operator of the tables.
            gpu: GPU to plan for if no hardware is named; None: CPUs.
            report: Takes which hardware that is, and what is doubtful.
        """
        sheet, probe = gpu, None
        if isinstance(self.hardware, DataSheet):
            sheet = self.hardware
        elif self.hardware is not None:
            sheet = find_data_sheet(self.hardware)
            probe = load_probe(Path(self.hardware), "cpu") if sheet is None else None
        if isinstance(self.cost_model, CostModel):
            model = self.cost_model
        elif sheet is not None and self.cost_model is None:
            return model_of_sheet(sheet, operator, report)
        else:
            model = load_quietly(self.cost_model or "cpu")
            store = writable(self._store)
            if store != self._store:
                report.notice(f"{self._store} cannot be written: a probe is kept in {store}")
            model = model_of_machine(model, store, report, probe, may_probe=True)
        return for_tables(model, operator, report)

    def prepared(
        self,
        tables: Sequence[EmbeddingTable],
        devices: tuple[Device, ...],
        batch_size: int,
        model: CostModel,
        network: AnyLink | None,
        report: Reporter,
    ) -> tuple[SharderContext, ShardingTask]:
        """Returns what sharders need, and the task.

        Args:
            tables: The tables.
            devices: The devices.
            batch_size: Samples of a batch, over all devices.
            model: What `model` returned.
            network: Network of the devices, if the objective names none.
            report: Takes what is doubtful.
        """
        objective = self.objective
        if not isinstance(objective, Objective):
            objective = Objective(objective, network if objective != "compute" else None)
        if objective.in_training and model.overhead is None:
            report.result(
                "the cost model does not know what training takes beside operators: plans are "
                "priced by operators and all-to-alls"
            )
            objective = replace(objective, name="operators", dense_ms=0.0)
        model = model.for_objective(objective, len(devices))
        task = ShardingTask(
            tuple(tables), devices, batch_size, model.provenance.operator, (), objective
        )
        if self.rules is not None:
            task = _constraints(self.rules, task)
        with warnings.catch_warnings(record=True) as doubts:
            warnings.simplefilter("always")
            context = open_context(
                needs_of([self.sharder]),
                tables,
                batch_size,
                model,
                Path(self.policy),
                self._store,
            )
        for doubt in doubts:
            report.result(str(doubt.message))
        return replace(context, seed=self.seed, seconds=self.seconds), task


def _constraints(rules: Rules, task: ShardingTask) -> ShardingTask:
    if isinstance(rules, Path | str):
        return Constraints.of_file(rules, task)
    return (rules if isinstance(rules, Constraints) else Constraints.of(rules)).applied(task)
