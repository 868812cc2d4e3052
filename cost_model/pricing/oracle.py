"""`EstimatedCosts`: the cost oracle over a cost model."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from autoshard.benchmark import PlanCost, price_plan
from autoshard.cost_model.models.model import CostModel
from autoshard.cost_model.networks.compute import OUT_OF_DISTRIBUTION, Prices
from autoshard.cost_model.networks.inputs import (
    Memberships,
    PieceRows,
    sums_of_devices,
    unit_amounts,
)
from autoshard.cost_model.networks.network import DIRECTIONS, INPUTS
from autoshard.cost_model.step.common_price import CommonPrice, CommonPrices
from autoshard.cost_model.step.option_overheads import CopyOverhead
from autoshard.cost_model.step.overhead import SplitCost, SumOverhead
from autoshard.cost_model.threads import one_thread
from autoshard.cost_model.uncertainty.residuals import TableResiduals
from autoshard.cost_model.uncertainty.scenarios import (
    Expectation,
    Pricing,
    Scenarios,
)
from autoshard.workload import (
    EmbeddingTable,
    Objective,
    Piece,
    Shard,
    ShardCost,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.arrays import Floats
from autoshard.workload.data_sheets import data_sheet_of
from autoshard.workload.packing.units import Placeable
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.tasks.links import AnyLink
from autoshard.workload.ways import OptionLimits

_GROUP = 500  # tables with a joint posterior: its time grows with the cube of their number


class OutsideTraining(UserWarning):
    """Warning that tables are out of the training distribution."""


class EstimatedCosts:
    """A `CostOracle` over a cost model: prices shards, plans, and placements that are being built.

    Args:
        model: Cost model.
        batch_size: Samples in a batch.
        residuals: Corrections by measured tables, for this batch size; by default none.
    """

    def __init__(
        self, model: CostModel, batch_size: int, residuals: TableResiduals | None = None
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch size must be at least 1, got {batch_size}")
        self.model = model
        self.batch_size = batch_size
        self.residuals = residuals or TableResiduals(model.compute, batch_size)
        overhead = model.counted_overhead
        self._overhead = None if overhead is None else SumOverhead(overhead, model.compute)
        self._common = CommonPrices(overhead)
        self._rows = PieceRows()
        self._warns = True
        self._met: set[tuple[str, int]] = set()  # tables, by what they look up and their dim
        shape = model.compute.shape
        self._amounts = torch.empty(0, model.compute.ensemble.members, shape.amounts)

    def fresh(self) -> "EstimatedCosts":
        """Returns an oracle of the same costs that keeps nothing of tables that were priced.

        Warnings of tables outside the training distribution are left to this oracle.
        """
        found = EstimatedCosts(self.model, self.batch_size, self.residuals)
        found._warns = False
        return found

    def for_objective(self, objective: Objective, ranks: int) -> "EstimatedCosts":
        """Returns the oracle of another objective or number of devices, for the same batch size."""
        model = self.model.for_objective(objective, ranks)
        found = EstimatedCosts(model, self.batch_size, self.residuals)
        # Amounts of pieces do not depend on what counts.
        found._rows, found._amounts, found._met = self._rows, self._amounts, self._met
        found._warns = self._warns
        return found

    def costs(self, shards: Sequence[Shard], hardware: Sequence[str] = ()) -> list[ShardCost]:  # noqa: ARG002
        """Returns the estimated cost of each shard, with its relative 95 % half width.

        Args:
            shards: The shards.
            hardware: Of the device that each is on; this oracle knows one kind.
        """
        if not shards:
            return []
        sums = self._sums([shard.pieces for shard in shards])
        operators = self.model.compute.price(sums)
        residuals = [self.residuals.of_shard(shard) for shard in shards]
        factors = torch.tensor([residual.factor for residual in residuals])
        uncertainty = torch.tensor([residual.uncertainty for residual in residuals])
        prices = self._in_training(
            Prices(
                operators.forward_ms * factors,
                operators.backward_ms * factors,
                operators.deviation * uncertainty,
            ),
            sums,
        )
        spreads = prices.deviation * self.model.compute.uncertainty.width_95
        columns = (prices.forward_ms, prices.backward_ms, spreads)
        return [ShardCost(*values) for values in zip(*(c.tolist() for c in columns), strict=True)]

    def prices(self, shards: Sequence[Shard]) -> Prices:
        """Returns estimated costs as tensors, without residuals of measured shards."""
        return self.price(self._sums([shard.pieces for shard in shards]))

    def of_kinds(self) -> "dict[str, EstimatedCosts]":
        """Returns the oracle of each kind of devices by its hardware; one without a name is all."""
        return {"": self}

    def of_devices(self, hardware: Sequence[str]) -> Tensor | float:  # noqa: ARG002 - of one kind
        """Returns the amounts with which the sums of these devices begin (`Pricing`)."""
        return 0.0

    def price(self, sums: Tensor) -> Prices:
        """Returns the costs of devices with these sums of amounts; 0 for empty ones."""
        return self._in_training(self.model.compute.price(sums), sums)

    def common_ms(self, task: ShardingTask, plan: ShardingPlan | None = None) -> float:
        """Returns what a step takes on all devices alike; 0 unless steps of training count.

        Without a plan, tables are whole.
        """
        price = self.common(task)
        return price.whole_ms() if plan is None else price.plan_ms(plan)

    def common(self, task: ShardingTask) -> CommonPrice:
        """Returns the price of what all devices bear alike."""
        return self._common.of(task)

    def slowness(self, task: ShardingTask) -> Floats:
        """Returns what the task's tables alone take on each device, relative to the mean device."""
        return np.ones(len(task.devices))

    @property
    def copies(self) -> CopyOverhead | None:
        """What copies of tables take; None if it is unknown, or operators alone count."""
        overhead = self.model.counted_overhead
        return None if overhead is None else overhead.copies

    def priced_options(self, task: ShardingTask) -> OptionLimits:
        """Returns which options of a task's tables have a price."""
        copies, rows = self.copies is not None, task.objective.prices_rows
        return OptionLimits(task, copies=copies, rows=rows)

    def split_cost(self, columns: float, ranks: int) -> SplitCost:
        """Returns what splits add to `common_ms`, of tables with so many columns together."""
        overhead = self.model.counted_overhead
        if overhead is None:
            return SplitCost()
        return overhead.split_cost(columns, self.batch_size, ranks)

    def _in_training(self, operators: Prices, sums: Tensor) -> Prices:
        return operators if self._overhead is None else self._overhead.prices(operators, sums)

    def _sums(self, held: Sequence[Sequence[Piece]]) -> Tensor:
        lists = [self._rows.of(pieces, self.batch_size) for pieces in held]
        self._embed_new()
        return Memberships.of(lists).sums(self._amounts)

    def exchange(self, dims: Sequence[float], objective: Objective) -> tuple[float, ...] | None:
        """Returns the ms of each rank in one all-to-all, in either direction; None if unknown.

        The objective's link is used where it counts all-to-alls, else the fitted link.

        Args:
            dims: Columns that each rank's outputs count for, as `exchanged_columns`.
            objective: Objective of the task.
        """
        link = objective.link if objective.counts_exchanges else self.link(len(dims))
        if link is None:
            return None
        if not any(dims):  # all tables are copied
            return (0.0,) * len(dims)
        columns = np.array(dims, dtype=float)
        over = Objective("operators", link)
        price = StepPrice.of(over, self.batch_size, len(dims), float(columns.sum()))
        return tuple(price.exchange_ms(columns).tolist())

    def link(self, ranks: int) -> AnyLink | None:
        """Returns the link fitted to all-to-alls of so many ranks; None if unknown."""
        return self.model.links.get(ranks)

    def plan_cost(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Returns the cost of a plan, with its all-to-alls where they are known."""
        self.check(task)
        exchange = self.exchange(plan.exchanged_columns(task), task.objective)
        both = None if exchange is None else (exchange, exchange)
        return price_plan(plan, task, self, both, common_ms=self.common_ms(task, plan))

    def step_ms(self, plan: ShardingPlan, task: ShardingTask) -> float:
        """Returns the step time of a plan by the mean of costs, with all-to-alls where they count.

        Corrections of single measured shards do not take part: sharders compare plans by this.
        """
        if not plan.placements:
            return self.common_ms(task, plan)
        pieces, homes = zip(*plan.placed(task), strict=True)
        devices, numbers = len(task.devices), np.array(homes, np.int64)
        sums = sums_of_devices(self.amounts(pieces), numbers, devices).float()
        prices = self.price(sums + self.of_devices(task.hardware))
        forward, backward = prices.forward_ms.numpy(), prices.backward_ms.numpy()
        columns = np.zeros(devices)
        np.add.at(columns, numbers, [piece.exchanged_columns for piece in pieces])
        step_ms = float(StepPrice.of_plan(task, plan).step_ms(forward, backward, columns))
        return step_ms + self.common_ms(task, plan)

    def check(self, task: ShardingTask) -> None:
        """Raises UserError if the task's batch size, operator or what counts differs."""
        operator = self.model.provenance.operator
        for what, requested, known in (
            ("batch size", task.batch_size, self.batch_size),
            ("weights", task.operator.weights, operator.weights),
            ("optimizer", task.operator.optimizer, operator.optimizer),
        ):
            if requested != known:
                raise UserError(f"the task's {what} is {requested}, the oracle's is {known}")
        self.check_hardware(task)
        over = self.model.input_link
        if over is not None and over != (task.objective.link, len(task.devices)):
            raise UserError(
                f"the oracle prices inputs of {over[1]} devices over {over[0]}, the task differs: "
                "give it CostModel.for_objective of the task's objective and number of devices"
            )
        if task.objective.in_training != self.model.in_training:
            counts = "steps of training" if self.model.in_training else "operators"
            raise UserError(
                f"the task's objective is {task.objective.name}, the oracle prices {counts}: give "
                "it CostModel.for_objective of the task's objective"
            )

    def check_hardware(self, task: ShardingTask) -> None:
        """Raises UserError if a device is of another kind than the cost model's."""
        known = self.model.provenance.hardware
        for device in task.devices:
            if device.hardware not in ("", known):
                raise UserError(f"{device.name} is of {device.hardware}, the oracle's is {known}")

    def alone_ms(self, pieces: Sequence[Placeable]) -> Floats:
        """Returns milliseconds of each piece on a device of its own, shape [pieces]."""
        prices = self.price(unit_amounts(self.amounts, pieces))
        return np.asarray(prices.total_ms.double().numpy())

    def expectation(self) -> Pricing:
        """Returns the pricing by mean costs, which has one scenario."""
        return Expectation(self.model.compute, self.amounts, self._overhead)

    @one_thread()
    def scenarios(self, tables: Sequence[EmbeddingTable], count: int, seed: int = 0) -> Scenarios:
        """Samples scenarios of everything that is uncertain about these tables and the model."""
        groups = [tables[n : n + _GROUP] for n in range(0, len(tables), _GROUP)]
        posteriors = [self.residuals.posterior(group) for group in groups]
        return Scenarios(
            self.model.compute, self.amounts, groups, posteriors, count, seed, self._overhead
        )

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns what each piece adds to its shard, shape [pieces, members, amounts]."""
        rows = self._rows.of(pieces, self.batch_size)
        self._embed_new()
        return self._amounts[rows]

    def _embed_new(self) -> None:
        known = len(self._amounts)
        if known == len(self._rows):
            return
        inputs, pieces = self._rows.inputs(known), self._rows.pieces(known)
        amounts = self.model.compute.amounts_of(inputs)
        if self.residuals.tables:
            tables = [piece.table.in_device_memory for piece in pieces]
            residuals, shares = self.residuals.estimates(tables)
            amounts[..., :DIRECTIONS] *= torch.from_numpy(np.exp(residuals.T)).float()[:, None]
            uncertainty = self.model.compute.shape.uncertainty
            amounts[..., uncertainty] *= torch.from_numpy(shares).float()[:, None]
        self._warn_of_new(pieces, inputs, amounts)
        if any(piece.table.in_host_memory for piece in pieces):
            amounts[..., :DIRECTIONS] += self._host_link_ms(pieces)[:, None]
        self._amounts = torch.cat([self._amounts, amounts])

    def _host_link_ms(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns what rows in host memory add to forward and backward ms, [pieces, 2]."""
        from autoshard.workload.ways.cache_sizes import link_bytes  # other plans do without

        hardware = self.model.provenance.hardware
        sheet = self.model.data_sheet or data_sheet_of(hardware)
        if sheet is None:
            name = next(p.table.name for p in pieces if p.table.in_host_memory)
            raise UserError(
                f"table {name} is in host memory, and no bandwidth from {hardware} to the host's "
                "is known: plan for a GPU with --hardware"
            )
        operator = self.model.provenance.operator
        moved = [link_bytes(piece, operator, self.batch_size) for piece in pieces]
        return torch.tensor(moved) * sheet.host_ms_of_byte

    def _warn_of_new(self, pieces: Sequence[Piece], inputs: Tensor, amounts: Tensor) -> None:
        """Warns of out-of-distribution tables, once per table."""
        if not self._warns:
            return
        first: dict[tuple[str, int], int] = {}
        for number, piece in enumerate(pieces):
            first.setdefault((piece.table.access_digest, piece.table.dim), number)
        new = [number for key, number in first.items() if key not in self._met]
        self._met.update(first)
        tables = [pieces[number].table for number in new]
        known = torch.tensor(
            [self.residuals.knows(table.in_device_memory) for table in tables], dtype=torch.bool
        )
        worst, which = self.model.compute.scale.excess(inputs[new]).max(dim=1)
        worst[known] = 0.0
        outside = worst > OUT_OF_DISTRIBUTION
        count = int(outside.sum())
        if not count:
            return
        farthest = int(worst.argmax())
        costs = amounts[new, ..., :DIRECTIONS].mean(1).sum(-1)
        share = float(costs[outside].sum() / costs.sum())
        warnings.warn(
            f"{count} of {len(tables)} tables, {share:.0%} of the cost, are outside of the cost "
            f"model's training data; farthest is {tables[farthest].name}, its "
            f"{INPUTS[int(which[farthest])]} by {worst[farthest]:.1f} deviations: their costs are "
            "uncertain until they are measured",
            OutsideTraining,
            stacklevel=2,
        )
