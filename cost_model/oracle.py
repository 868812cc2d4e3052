"""`EstimatedCosts`: the oracle that estimates, in place of the one that measures."""

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.benchmark import PlanCost, price_plan
from autoshard.cost_model.compute import OUT_OF_DISTRIBUTION, Prices
from autoshard.cost_model.inputs import Memberships, PieceRows, unit_amounts
from autoshard.cost_model.model import CostModel
from autoshard.cost_model.network import DIRECTIONS, INPUTS
from autoshard.cost_model.scenarios import Expectation, Scenarios
from autoshard.cost_model.table_residuals import TableResiduals
from autoshard.cost_model.training import one_thread
from autoshard.workload import (
    EmbeddingTable,
    Link,
    Objective,
    Piece,
    Shard,
    ShardCost,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.step_price import StepPrice
from autoshard.workload.units import Placeable

Floats = npt.NDArray[np.float64]
_TOGETHER = 500  # tables that scenarios know of together


class OutsideTraining(UserWarning):
    """Tables unlike any that the model learned from."""


class EstimatedCosts:
    """A `CostOracle` over a cost model: shards, plans, and devices that are being filled.

    Args:
        model: what estimates.
        batch_size: samples in a batch.
        factors: what was measured of tables, for such batches; by default nothing.
    """

    def __init__(
        self, model: CostModel, batch_size: int, residuals: TableResiduals | None = None
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch size must be at least 1, got {batch_size}")
        self.model = model
        self.batch_size = batch_size
        self.residuals = residuals or TableResiduals(model.compute, batch_size)
        self._rows = PieceRows()
        self._met: set[tuple[str, int]] = set()  # tables, by what they look up and their dim
        shape = model.compute.shape
        self._amounts = torch.empty(0, model.compute.ensemble.members, shape.uncertainty + 1)

    def costs(self, shards: Sequence[Shard]) -> list[ShardCost]:
        """The estimated cost of each shard, and the 95 % interval that it is known to."""
        if not shards:
            return []
        prices = self.prices(shards)
        left = [self.residuals.of_shard(shard) for shard in shards]
        times = torch.tensor([each.factor for each in left])
        doubt = torch.tensor([each.uncertainty for each in left])
        spreads = prices.deviation * doubt * self.model.compute.uncertainty.width_95
        columns = (prices.forward_ms * times, prices.backward_ms * times, spreads)
        return [ShardCost(*values) for values in zip(*(c.tolist() for c in columns), strict=True)]

    def prices(self, shards: Sequence[Shard]) -> Prices:
        """The same as tensors, for those who price many; what measuring a shard itself has told,
        beyond its tables, is left out.
        """
        lists = [self._rows.of(shard.pieces, self.batch_size) for shard in shards]
        self._embed_new()
        return self.model.compute.price(Memberships.of(lists).sums(self._amounts))

    def exchange(self, dims: Sequence[int], objective: Objective) -> tuple[float, ...] | None:
        """Returns the ms of each rank in one all-to-all, in either direction, where rank r computes
        `dims[r]` columns: over the objective's link where it counts all-to-alls, else over the one
        that was fitted. None where neither is known.
        """
        link = objective.link if objective.counts_exchanges else self.link(len(dims))
        if link is None:
            return None
        columns = np.array(dims, dtype=float)
        over = Objective("step", link)
        price = StepPrice.of(over, self.batch_size, len(dims), float(columns.sum()))
        return tuple(price.exchange_ms(columns).tolist())

    def link(self, ranks: int) -> Link | None:
        """Returns the link that is near to measured all-to-alls of so many ranks, a device for
        each; None where none were measured.
        """
        return self.model.links.get(ranks)

    def plan_cost(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """The cost of a whole plan, with its all-to-alls where they are known."""
        self.check(task)
        exchange = self.exchange(plan.columns(task), task.objective)
        return price_plan(plan, task, self, None if exchange is None else (exchange, exchange))

    def step_ms(self, plan: ShardingPlan, task: ShardingTask) -> float:
        """Returns the step time of a plan by the mean of costs, with all-to-alls where they count.

        Corrections of single measured shards do not take part: sharders compare plans by this.
        """
        shards = plan.shards(task)
        filled = [number for number, shard in enumerate(shards) if shard is not None]
        prices = self.prices([shard for shard in shards if shard is not None])
        forward, backward = np.zeros((2, len(shards)))
        forward[filled], backward[filled] = prices.forward_ms.numpy(), prices.backward_ms.numpy()
        columns = np.array(plan.columns(task), dtype=float)
        stages = StepPrice.of_task(task).stages_ms(forward, backward, columns)
        return sum(float(stage.max()) for stage in stages)

    def check(self, task: ShardingTask) -> None:
        """UserError if the task's batch or operator are not those that are priced here."""
        operator = self.model.provenance.operator
        for what, asked, known in (
            ("batch size", task.batch_size, self.batch_size),
            ("weights", task.operator.weights, operator.weights),
            ("optimizer", task.operator.optimizer, operator.optimizer),
        ):
            if asked != known:
                raise UserError(f"the task's {what} is {asked}, the oracle's is {known}")

    def alone_ms(self, pieces: Sequence[Placeable]) -> Floats:
        """Returns milliseconds of each piece on a device of its own: [pieces]."""
        prices = self.model.compute.price(unit_amounts(self.amounts, pieces))
        return np.asarray(prices.total_ms.double().numpy())

    def expectation(self) -> Expectation:
        """What is priced in the mean, for those who price scenarios as well."""
        return Expectation(self.model.compute, self.amounts)

    @one_thread()
    def scenarios(self, tables: Sequence[EmbeddingTable], count: int, seed: int = 0) -> Scenarios:
        """So many draws of what is not known of these tables and of the model."""
        # In groups, for what is known of all together takes the cube of their number.
        groups = [tables[n : n + _TOGETHER] for n in range(0, len(tables), _TOGETHER)]
        beliefs = [self.residuals.posterior(some) for some in groups]
        return Scenarios(self.model.compute, self.amounts, groups, beliefs, count, seed)

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """What each slice brings to its shard: [slices, members, amounts]."""
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
            residuals, left = self.residuals.estimates([piece.table for piece in pieces])
            amounts[..., :DIRECTIONS] *= torch.from_numpy(np.exp(residuals.T)).float()[:, None]
            doubt = self.model.compute.shape.uncertainty
            amounts[..., doubt] *= torch.from_numpy(left).float()[:, None]
        self._tell_of_strangers(pieces, inputs, amounts)
        self._amounts = torch.cat([self._amounts, amounts])

    def _tell_of_strangers(self, pieces: Sequence[Piece], inputs: Tensor, amounts: Tensor) -> None:
        """Of each table once, by the first of its slices that is asked for."""
        first: dict[tuple[str, int], int] = {}
        for number, piece in enumerate(pieces):
            first.setdefault((piece.table.access_digest, piece.table.dim), number)
        new = [number for key, number in first.items() if key not in self._met]
        self._met.update(first)
        tables = [pieces[number].table for number in new]
        known = torch.tensor([self.residuals.knows(table) for table in tables], dtype=torch.bool)
        worst, which = self.model.compute.excess(inputs[new]).max(dim=1)
        worst[known] = 0.0
        strange = worst > OUT_OF_DISTRIBUTION
        count = int(strange.sum())
        if not count:
            return
        farthest = int(worst.argmax())
        costs = amounts[new, ..., :DIRECTIONS].mean(1).sum(-1)
        share = float(costs[strange].sum() / costs.sum())
        warnings.warn(
            f"{count} of {len(tables)} tables, {share:.0%} of the cost, lie outside of what the "
            f"cost model learned from; farthest is {tables[farthest].name}, its "
            f"{INPUTS[int(which[farthest])]} by {worst[farthest]:.1f} deviations: what they cost "
            "is a guess until they are measured",
            OutsideTraining,
            stacklevel=2,
        )
