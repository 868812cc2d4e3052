"""`plan`: a plan in one call, for tables or for a model of TorchRec."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autoshard.benchmark import PlanCost
from autoshard.cost_model.hardware import Reporter, find_data_sheet
from autoshard.cost_model.models.model import CostModel
from autoshard.cost_model.pricing.prediction import StepPrediction, StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.integration.planning.task import PlanOptions, Rules
from autoshard.sharders.context import SharderContext
from autoshard.sharders.policy.files import SHIPPED
from autoshard.sharders.registry import make_sharder
from autoshard.workload.bounds import MAX_GB
from autoshard.workload.data_sheets import FOR_TABLES, DataSheet
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.packing.gpu_memory import on_gpus
from autoshard.workload.plans.plan import ShardingPlan
from autoshard.workload.sources.readers import load_tables
from autoshard.workload.tables.operators import OperatorOptions
from autoshard.workload.tables.table import EmbeddingTable
from autoshard.workload.tasks.links import AnyLink, Link
from autoshard.workload.tasks.objective import Objective, ObjectiveName
from autoshard.workload.tasks.task import Device, ShardingTask

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ShardingPlan as TorchRecPlan

_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(M|G|T)i?B\s*", re.IGNORECASE)
_BYTES = {"M": 2**20, "G": 2**30, "T": 2**40}

Memory = str | int | Sequence[str | int]


@dataclass(frozen=True)
class Planned:
    """A plan, with what it was made for.

    Args:
        plan: The plan.
        task: Its task.
        context: Cost oracle and policy by which it was made.
        notes: What was taken for granted.
    """

    plan: ShardingPlan
    task: ShardingTask
    context: SharderContext
    notes: tuple[str, ...] = ()

    @property
    def cost(self) -> PlanCost:
        """Predicted cost of each device in each phase."""
        return self.context.costs.plan_cost(self.plan, self.task)

    @property
    def step(self) -> StepPrediction:
        """Expected time of a step, in ms, with its interval."""
        return StepPredictor(self.context.costs, self.task).of(self.plan)

    def save(self, path: Path | str) -> None:
        """Writes the plan as JSON."""
        self.plan.save(path)

    def explain(self) -> str:
        """Returns the slowest device of each phase, the best next changes, and what differs from
        the best heuristic's plan.
        """
        from autoshard.sharders import explain_text  # others do without

        return explain_text(self.plan, self.task, self.context.costs)

    def report(self, path: Path | str) -> None:
        """Writes a page (HTML) about the plan."""
        from autoshard.sharders import write_report  # others do without

        write_report(Path(path), self.plan, self.task, self.context, notes=self.notes)

    def to_torchrec(self, model: "nn.Module") -> "TorchRecPlan":
        """Returns the plan for `DistributedModelParallel(plan=)`."""
        from autoshard.integration.plans.conversion import to_torchrec  # requires TorchRec

        return to_torchrec(self.plan, model)


def plan(
    tables: "str | Path | Sequence[EmbeddingTable] | nn.Module",
    devices: int,
    memory: Memory | None = None,
    hardware: str | DataSheet | None = None,
    *,
    batch_size: int = 1024,
    batches: Iterable[Any] | None = None,
    link: str | AnyLink | None = None,
    objective: Objective | ObjectiveName = "step",
    sharder: str = "autoshard",
    cost_model: CostModel | Path | str | None = None,
    rules: Rules | None = None,
    seconds: float | None = None,
    store: Path | str | None = None,
    policy: Path | str = SHIPPED,
    seed: int = 0,
) -> Planned:
    """Plans tables on devices.

    Args:
        tables: File or name of tables, as `shard.py --tables` takes it; tables; or a TorchRec model
            that is not sharded.
        devices: Number of devices.
        memory: Memory of a device for tables, such as `"80GB"` (of 2^30 bytes) or in bytes; one for
            all devices, or one for each. Default: 85 % of what the GPU that `hardware` names has.
        hardware: A GPU by name (`h100-80gb`), NAME=FILE of its data sheet, or the file of a probe.
            Default: CPU cores of this machine.
        batch_size: Samples of a batch, of all ranks together.
        batches: Batches of one rank, in which lookups of a model's tables are counted.
        link: Network of the devices, such as `"25GB/s,30us"`. Default: that of the hardware.
        objective: `step`, `pipelined`, `operators`, `compute`, or an Objective.
        sharder: Name of a sharder.
        cost_model: Cost model, its folder, or the name of a shipped one.
        rules: Constraints, or their YAML file.
        seconds: Seconds that planning may take. Default: until no better plan is found.
        store: File of measurements and of the probe of this machine. Default: in the user's cache.
        policy: Folder of a policy, or the name of a shipped one.
        seed: Seed of random choices.

    Raises:
        UserError: An argument is not valid.
        PlanError: There is no plan that fits.
    """
    options = PlanOptions(
        hardware=hardware,
        cost_model=cost_model,
        sharder=sharder,
        seconds=seconds,
        objective=objective,
        rules=rules,
        store=store,
        policy=policy,
        seed=seed,
    )
    notes = dict[str, None]()
    ranks = _devices(devices, _for_tables(hardware, notes) if memory is None else memory)
    known, operator = _tables(tables, batches, devices)
    report = Reporter(notes.setdefault, notes.setdefault)
    model = options.model(operator, None, report)
    over = Link.parse(link) if isinstance(link, str) else link or model.links.get(devices)
    context, task = options.prepared(known, ranks, batch_size, model, over, report)
    if model.kind == "cuda":
        task = on_gpus(task)
    with one_thread():
        found = make_sharder(sharder, context).shard(task)
    found.check(task)
    return Planned(found, task, context, tuple(notes))


def _for_tables(hardware: str | DataSheet | None, notes: dict[str, None]) -> Memory:
    """Returns the greater part of a GPU's memory, and takes a note of it."""
    sheet = find_data_sheet(hardware) if isinstance(hardware, str) else hardware
    if sheet is None:
        problem = 'is missing: name that of a device, as "32GB", or a GPU as hardware'
        raise FieldError("memory", problem)
    size = f"{sheet.for_tables_gb:g}GB"
    notes[f"memory of a device is {size}, {FOR_TABLES:.0%} of what {sheet.name} has"] = None
    return size


def _devices(count: int, memory: Memory) -> tuple[Device, ...]:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise FieldError("devices", f"must be a number of devices, got {count!r}")
    if isinstance(memory, str) or not isinstance(memory, Sequence):
        memory = [memory]
    given = list(memory)
    if len(given) not in (1, count):
        raise FieldError("memory", f"names {len(given)} devices, and there are {count}")
    sizes = [_bytes(each) for each in given] * (count // len(given))
    return tuple(Device(f"device{number}", size) for number, size in enumerate(sizes))


def _bytes(size: str | int) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None or not 0 < float(found[1]) < MAX_GB:
        raise FieldError("memory", f'must be a size such as "80GB", or bytes, got {size!r}')
    return int(float(found[1]) * _BYTES[found[2].upper()])


def _tables(
    tables: "str | Path | Sequence[EmbeddingTable] | nn.Module",
    batches: Iterable[Any] | None,
    devices: int,
) -> tuple[tuple[EmbeddingTable, ...], OperatorOptions]:
    found: tuple[EmbeddingTable, ...]
    if isinstance(tables, str | Path):
        found = load_tables(str(tables))
    elif isinstance(tables, Sequence):
        found = tuple(cast("Sequence[EmbeddingTable]", tables))
        if not found or not all(isinstance(table, EmbeddingTable) for table in found):
            raise UserError(
                "tables: give some EmbeddingTables, the file of some, or a TorchRec model"
            )
    else:
        from autoshard.integration.models.tables import tables_of  # requires TorchRec

        return tables_of(tables, batches, devices)
    if batches is not None:
        raise UserError("batches are counted for the tables of a model: give a TorchRec model")
    return found, OperatorOptions()
