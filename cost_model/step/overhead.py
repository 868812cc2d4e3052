"""What a training step takes beside the operators as a pool measures them.

In training, TorchRec checks, permutes and packs what goes into and comes out of an operator, and
the dense part of the model evicts the operator's rows between forward and backward. Both depend on
the plan, and both are linear in what a device holds: in the operator's own time, its lookups, the
elements of its output and its bags, one for each sample and feature of a piece. So are the ids and
lengths that it receives from other ranks, where the network between them counts. The rest of a step
is the same on all devices. It depends on the task and on splits: once a table is in parts, TorchRec
puts all outputs in order anew, and each further slice of them adds a little.

The coefficients are fitted to rehearsals of random plans (`learning.overheads`), in turns, and
belong to a kind of hardware as the cost model does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoshard.benchmark import ReferenceLevel
from autoshard.cost_model.networks.compute import HALF_A_TABLE, ComputeCostModel, Prices
from autoshard.cost_model.networks.network import DIRECTIONS, INPUTS, TERMS
from autoshard.cost_model.step.option_overheads import (
    HOT_OVERHEAD,
    CopyOverhead,
    HotOverhead,
    RowOverhead,
    times,
)
from autoshard.workload import EmbeddingTable, Piece, ShardingTask
from autoshard.workload.access.lookups import lookups_in
from autoshard.workload.arrays import Floats
from autoshard.workload.tasks.links import AnyLink

_NS = 1e-6  # milliseconds
_S = 1e9  # nanoseconds
_MS_OF_A_SECOND = 1e3
_ID_BYTES = _LENGTH_BYTES = 8  # of a lookup, of a bag
_INPUT_EXCHANGES = 3  # of a step: of sizes, lengths and ids
_SAVED = 0.75  # of a forward output: what partial sums save where it was not measured
# Work of a device, in the order of rates.
LOADS = ("operator_ms", "lookups", "outputs", "bags", "occupied")
# What each rank does for its own samples, in the order of `StepOverhead.shared_rates`.
SHARED_LOADS = ("lookups", "outputs", "features", "regrouped", "split_samples", "one")


class SplitCost(NamedTuple):
    """What splits add to a step on all devices.

    Args:
        first_ms: Once there is any.
        each_ms: For each slice of outputs that is more than one for a feature.
    """

    first_ms: float = 0.0
    each_ms: float = 0.0

    def ms(self, splits: int) -> float:
        """Returns what so many slices more add."""
        return self.first_ms + splits * self.each_ms if splits else 0.0


@dataclass(frozen=True)
class DirectionOverhead:
    """A pass in training, as a function of what a device holds.

    Args:
        operator: Factor of the operator's time in the pool.
        lookup_ns: Nanoseconds for each lookup.
        output_ns: Nanoseconds for each element of pooled outputs.
        bag_ns: Nanoseconds for each bag: a sample and feature of a piece.
        start_ms: Milliseconds of a device that holds any.
    """

    operator: float
    lookup_ns: float
    output_ns: float
    bag_ns: float
    start_ms: float

    @property
    def rates(self) -> tuple[float, ...]:
        """Milliseconds for one of each of LOADS."""
        work = (_NS * ns for ns in (self.lookup_ns, self.output_ns, self.bag_ns))
        return (self.operator, *work, self.start_ms)

    def scaled(self, factor: float) -> "DirectionOverhead":
        """Returns a pass on a machine where all beside operators takes so many times as long."""
        return times(self, factor, ("lookup_ns", "output_ns", "bag_ns", "start_ms"))


@dataclass(frozen=True)
class StepOverhead:
    """What training takes beside operators.

    Args:
        forward: From the lookups' arrival to the pooled outputs that are ready to be sent.
        backward: From the gradients' arrival until weights are updated.
        shared_lookup_ns: For each lookup of a rank's own samples, which are sent to their tables.
        shared_output_ns: For each element of all pooled outputs of a rank's own samples: receiving
            them, and packing their gradients.
        shared_feature_ms: For each feature of the task, however small the batch.
        regrouped_ns: For each element of all pooled outputs of a rank's own samples if any table is
            in parts, or a plan mixes ways: they are put in order anew.
        split_sample_ns: For each of a rank's own samples and each slice of outputs that is more
            than one for a feature.
        shared_ms: For each step.
        copies: What copies of tables add; None if unknown.
        rows: What tables in blocks of rows add; None if it was not measured.
        input_latency_ms: Start of the exchanges of inputs, if these are counted.
        reference_level: Times of the reference operator on the machine where it was fitted; None
            if unknown.
        hot_rows: What it takes to tell hot from cold rows, and to add their outputs.
        exchange_factor: What exchanges take, over what their links say.
        members: The same by others of the figures that it was made of, if these are uncertain;
            their mean is about this one.
    """

    forward: DirectionOverhead
    backward: DirectionOverhead
    shared_lookup_ns: float
    shared_output_ns: float
    shared_feature_ms: float
    regrouped_ns: float
    split_sample_ns: float
    shared_ms: float
    copies: CopyOverhead | None = None
    rows: RowOverhead | None = None
    input_latency_ms: float | None = None
    reference_level: ReferenceLevel | None = None
    hot_rows: HotOverhead = HOT_OVERHEAD
    exchange_factor: float = 1.0
    members: "tuple[StepOverhead, ...]" = ()

    def at_level(self, level: ReferenceLevel | None) -> "StepOverhead":
        """Returns the coefficients for a machine on which they were not fitted.

        They consist of many small operations on rows, as does the forward pass of the reference
        operator. So all are taken to be as many times as long.

        Args:
            level: Times of the reference operator there; None if unknown.
        """
        known = self.reference_level
        if level is None or known is None or level.method != known.method:
            return self
        factor = level.forward_ms / known.forward_ms
        shared = ("shared_lookup_ns", "shared_output_ns", "shared_feature_ms", "shared_ms")
        return replace(
            times(self, factor, (*shared, "regrouped_ns", "split_sample_ns")),
            forward=self.forward.scaled(factor),
            backward=self.backward.scaled(factor),
            copies=self.copies and self.copies.scaled(factor),
            rows=self.rows and self.rows.scaled(factor),
            reference_level=level,
        )

    def with_ways_of(self, other: "StepOverhead") -> "StepOverhead":
        """Returns the coefficients with those of copies and of blocks of rows of another one."""
        return replace(self, copies=other.copies, rows=other.rows)

    @cached_property
    def shared_rates(self) -> Floats:
        """Milliseconds for one of each of SHARED_LOADS."""
        lookup, output = _NS * self.shared_lookup_ns, _NS * self.shared_output_ns
        regrouped, sliced = _NS * self.regrouped_ns, _NS * self.split_sample_ns
        rates = lookup, output, self.shared_feature_ms, regrouped, sliced, self.shared_ms
        return np.array(rates)

    @cached_property
    def of_rows(self) -> RowOverhead:
        """What blocks of rows add: as measured, or as these coefficients suggest.

        On the machine where it was measured, a second operator took as long to start as the first
        one, and partial sums saved three quarters of what outputs take in the forward pass.
        """
        starts_ms = self.forward.start_ms + self.backward.start_ms
        return self.rows or RowOverhead(starts_ms, _SAVED * self.forward.output_ns)

    @cached_property
    def rates(self) -> Floats:
        """Milliseconds for one of each of LOADS, forward and backward: [2, loads]."""
        return np.array([self.forward.rates, self.backward.rates])

    def in_training(self, operators_ms: Floats, loads: Floats) -> Floats:
        """Returns ms of passes in training.

        Args:
            operators_ms: Forward and backward of operators in the pool, [..., 2].
            loads: Lookups, outputs, bags and 1 of each device, [..., 4]; 0 for empty ones.
        """
        rates = self.rates
        return np.asarray(rates[:, 0] * operators_ms + loads @ rates[:, 1:].T)

    def with_inputs_over(self, link: AnyLink, ranks: int) -> "StepOverhead":
        """Returns the overhead with what inputs take on their way from other ranks.

        A device receives an id for each lookup of their samples, and a length for each bag. It
        sends its own samples' lookups meanwhile, which are as many as a device receives on average.
        """
        over = link.all_to_all(ranks)
        from_others_ns = self.exchange_factor * _S * (ranks - 1) / ranks / over.bytes_s
        forward = replace(
            self.forward,
            lookup_ns=self.forward.lookup_ns + _ID_BYTES * from_others_ns,
            bag_ns=self.forward.bag_ns + _LENGTH_BYTES * from_others_ns,
        )
        latency_ms = _MS_OF_A_SECOND * _INPUT_EXCHANGES * over.latency_s
        members = tuple(member.with_inputs_over(link, ranks) for member in self.members)
        return replace(self, forward=forward, input_latency_ms=latency_ms, members=members)

    def common_ms_of(self, tables: Sequence[EmbeddingTable], task: ShardingTask) -> Floats:
        """Returns what each of these tables of a task adds on all ranks alike if it is whole."""
        loads = _own_loads(tables, task)
        return np.asarray(loads @ self.shared_rates[: loads.shape[1]])

    def split_cost(self, columns: float, batch_size: int, ranks: int) -> SplitCost:
        """Returns what splits add on all ranks alike.

        Args:
            columns: Those of all pooled outputs, one table after the other.
            batch_size: Samples of the batch.
            ranks: Number of ranks that share it.
        """
        own = _NS * batch_size / ranks
        return SplitCost(own * columns * self.regrouped_ns, own * self.split_sample_ns)

    def to_json(self) -> dict[str, Any]:
        """Returns the coefficients as a JSON object, without what is unknown."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        return {**found, "members": [member.to_json() for member in self.members]}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "StepOverhead":
        """Returns the coefficients that `to_json` wrote."""
        kinds: dict[str, type] = {
            "forward": DirectionOverhead,
            "backward": DirectionOverhead,
            "copies": CopyOverhead,
            "rows": RowOverhead,
            "reference_level": ReferenceLevel,
            "hot_rows": HotOverhead,
        }
        known = {n: kind(**document[n]) for n, kind in kinds.items() if document.get(n) is not None}
        members = tuple(StepOverhead.from_json(each) for each in document.get("members", ()))
        return StepOverhead(**{**document, **known, "members": members})


def loads_of(pieces: Sequence[Piece], batch_size: int) -> Floats:
    """Returns lookups, elements of outputs, bags and 1 of a device that holds these pieces."""
    if not pieces:
        return np.zeros(len(LOADS) - 1)
    lookups = lookups_in([piece.table for piece in pieces], batch_size).lookups.sum()
    outputs = batch_size * sum(piece.output_width for piece in pieces)
    bags = batch_size * sum(piece.table.bags for piece in pieces)
    return np.array([lookups, outputs, bags, 1.0])


def splits_of(placed: Iterable[tuple[Piece, int]]) -> int:
    """Returns by how many slices the outputs of a plan are more than one for each feature.

    Args:
        placed: Pieces of all tables and their devices; those of a table on one device are one.
    """
    tables, parts = dict[str, int](), dict[tuple[str, int], int]()
    for piece, device in placed:
        tables[piece.table.name] = piece.table.features
        parts[piece.table.name, device] = piece.table.features
    return sum(parts.values()) - sum(tables.values())


def shared_loads_of(task: ShardingTask, splits: int = 0) -> Floats:
    """Returns what each rank does for its own samples, in the order of SHARED_LOADS."""
    lookups, outputs, features = _own_loads(task.tables, task).sum(0)
    own = task.batch_size / len(task.devices)
    regrouped = own * task.columns_in_order if splits else 0.0
    split_samples = splits * own
    return np.array([lookups, outputs, features, regrouped, split_samples, 1.0])


def _own_loads(tables: Sequence[EmbeddingTable], task: ShardingTask) -> Floats:
    """Returns lookups, elements of outputs and bags of a rank's own samples, [tables, 3]."""
    own = task.batch_size / len(task.devices)
    lookups = lookups_in(tables, task.batch_size).lookups / len(task.devices)
    columns = np.array([table.dim * table.features for table in tables], float)
    bags = np.array([table.bags for table in tables], float)
    return np.stack([lookups, own * columns, bags], axis=1)


class SumOverhead:
    """The overhead as a function of sums of amounts, which contain all loads.

    Args:
        overhead: The coefficients.
        compute: Model whose amounts are summed.
    """

    def __init__(self, overhead: StepOverhead, compute: ComputeCostModel) -> None:
        self.of_step = overhead
        shape, scale = compute.shape, compute.scale
        columns = {load: torch.from_numpy(overhead.rates[:, n].copy()).float()
                   for n, load in enumerate(LOADS)}  # fmt: skip
        self.factors, self._starts = columns["operator_ms"], columns["occupied"]
        rates = torch.zeros(DIRECTIONS, shape.amounts)
        # Terms of work are relative to a typical table's.
        for load, term in (("lookups", "lookups"), ("outputs", "output"), ("bags", "samples")):
            powers = TERMS[term]
            typical = sum(scale.mean[INPUTS.index(name)] * power for name, power in powers.items())
            rates[:, DIRECTIONS + list(TERMS).index(term)] = (
                columns[load] * torch.as_tensor(typical).exp()
            )
        self._rates, self._count = rates.mT.contiguous(), shape.count

    def add(self, operators_ms: Tensor, sums: Tensor) -> Tensor:
        """Returns ms of passes in training, [..., 2].

        Args:
            operators_ms: Forward and backward of operators, [..., 2].
            sums: Sums of amounts of a device by any member, [..., amounts].
        """
        kind = operators_ms.dtype
        occupied = (sums[..., self._count, None] > HALF_A_TABLE).to(kind)
        starts = occupied * self._starts.to(kind)
        return operators_ms * self.factors.to(kind) + sums.to(kind) @ self._rates.to(kind) + starts

    def prices(self, operators: Prices, sums: Tensor) -> Prices:
        """Returns the prices of passes in training, whose deviations are those of operators.

        `sums` have the shape of `ComputeCostModel.price`, [..., members, amounts].
        """
        both = torch.stack([operators.forward_ms, operators.backward_ms], dim=-1)
        forward, backward = self.add(both, sums[..., 0, :]).unbind(-1)
        uncertain = (both * self.factors.to(both.dtype)).sum(-1)
        share = uncertain / (forward + backward).clamp_min(torch.finfo(both.dtype).tiny)
        return Prices(forward, backward, operators.deviation * share)
