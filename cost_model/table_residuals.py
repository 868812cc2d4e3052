"""Tables learned by heart: each has a factor of its own beside what the networks say of it.

Whatever was measured of a table stays known: its factor, forward and backward, has a posterior from
all measured shards that hold it or its slices. Beforehand factors are normal in their logarithms,
the more uncertain the stranger a table is, and alike for tables that are alike (a Gaussian
process). A shard's cost is the start and its tables' contributions, each times its factor; that is
linear but for the logarithm, so a few steps of Gauss and Newton find the posterior.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import scipy  # which loads its parts when they are used
import torch

from autoshard.benchmark.statistics import NORMAL_MEDIAN
from autoshard.cost_model.compute import ComputeCostModel, ResidualPrior
from autoshard.cost_model.contributions import Contributions, EmbeddedShards
from autoshard.cost_model.inputs import piece_inputs
from autoshard.cost_model.network import DIRECTIONS
from autoshard.workload import EmbeddingTable, Shard

if TYPE_CHECKING:
    from autoshard.cost_model.dataset import CostDataset

Floats = npt.NDArray[np.float64]

_STEPS = 5  # of Gauss and Newton
_FREEDOM = 4.0  # of Student's t: a cost that is far off counts little
_MAX_DOUBT = 1.0  # deviations of a logarithm: how far off a guess may be
_FAR_OFF = 3.0  # deviations
_MAX_EVIDENCE = 400  # shards by which the prior is judged
_WIDER = (1.0, 2.0, 4.0, 8.0)  # times the deviations of factors that may be found
_LOUDER = (1.0, 2.0)  # times what is left of shards
_MAX_TABLES = 1500  # that are learned of: it takes the cube of their number
_AT_ONCE = 500  # tables compared with all that are known: more take much memory
_JITTER = 1e-9
_ALIKE = 8.0  # inputs by whose deviations together tables are no longer alike
_FAR = 3.0  # deviations to which inputs are compared: beyond, a table is just strange


@dataclass(frozen=True)
class TableSimilarity:
    """How much tables (rows) have to do with other tables (columns).

    Args:
        same: true where they look rows up in the same way, whatever their dim.
        alike: 1 for equal inputs, and less the farther apart they are.
        excess: deviations that each lies outside of what was learned from, of rows.
        their_excess: the same of columns.
    """

    same: npt.NDArray[np.bool_]
    kernel: Floats
    excess: Floats
    their_excess: Floats

    def covariance(self, prior: ResidualPrior) -> Floats:
        """Of the log factors of rows and columns before any is measured."""
        shared = (
            shared_deviations(prior, self.excess)[:, None]
            * shared_deviations(prior, self.their_excess)[None]
        )
        return np.asarray(shared * self.kernel + prior.own**2 * self.same)


def shared_deviations(prior: ResidualPrior, excess: Floats) -> Floats:
    """Deviations of log factors that alike tables share, by how far outside they lie."""
    doubt = np.minimum(prior.extrapolation * excess, _MAX_DOUBT)
    return np.asarray(np.sqrt(prior.shared**2 + np.square(doubt)))


@dataclass(frozen=True)
class ResidualPosterior:
    """Log factors of some tables: means [directions, tables], and roots of their covariances
    [directions, tables, tables].
    """

    means: Floats
    roots: Floats

    @property
    def deviations(self) -> Floats:
        """Of each log factor [directions, tables]."""
        return np.asarray(np.sqrt(np.square(self.roots).sum(-1)))


@dataclass(frozen=True)
class ShardResidual:
    """What measuring a shard itself tells beyond its tables: `times` that its cost is of what they
    explain, and the share of all `doubt` about it that is left.
    """

    factor: float = 1.0
    uncertainty: float = 1.0


_NOT_MEASURED = ShardResidual()


class TableResiduals:
    """What is known of tables' factors, of any tables.

    Args:
        model: what the factors correct; also knows what to believe of them beforehand (`prior`).
        batch_size: samples of the batches that costs are told for.
    """

    def __init__(self, model: ComputeCostModel, batch_size: int) -> None:
        self._model = model
        self.prior = model.prior
        self.batch_size = batch_size
        self._known: list[EmbeddingTable] = []
        self._digests: frozenset[str] = frozenset()
        self._left: dict[str, ShardResidual] = {}
        self._inputs = piece_inputs([], batch_size)
        # Of the known tables, for each direction: prior's inverse times mean, and what measuring
        # took off the prior's covariance, between inverses of the prior.
        self._pulls: list[Floats] = []
        self._gains: list[Floats] = []

    @property
    def tables(self) -> int:
        """How many have been measured."""
        return len(self._known)

    def learn(self, data: "CostDataset", of: Sequence[EmbeddingTable] = ()) -> "TableResiduals":
        """What is known after these measurements alone, those with our batch size.

        Where they are of very many tables, those of shards with tables `of` come first, and what is
        left out is the rest.
        """
        ours = _worth_knowing(data, self.batch_size, of)
        found = TableResiduals(self._model, self.batch_size)
        if not ours:
            return found
        data = data.subset(ours)
        found.prior = _fitting(self.prior, Evidence.of(self._model, subsample(data)))
        found._known = distinct_tables(data)
        found._digests = frozenset(table.access_digest for table in found._known)
        found._inputs = _inputs(found._known, self.batch_size)
        before = found._covariance(found._known, found._inputs, found._known, found._inputs)
        noise = np.sqrt(found.prior.rest**2 + np.square(data.errors))
        held = EmbeddedShards(self._model, data.shards, data.batch_sizes, found._known)
        residuals, costs = np.zeros((DIRECTIONS, len(before))), np.log(data.costs_ms)
        for number in range(_STEPS):
            said = held.contributions(residuals)
            found._pulls, found._gains = [], []
            for direction in range(DIRECTIONS):
                information, moments = _step(
                    said, direction, residuals[direction], costs[:, direction], noise, number == 0
                )
                # Posterior covariance: (K^-1 + I)^-1 = K - K (I K + 1)^-1 I K, and so its mean.
                solved = scipy.linalg.solve(np.eye(len(before)) + information @ before, information)
                found._gains.append(solved)
                found._pulls.append(moments - solved @ (before @ moments))
                residuals[direction] = before @ found._pulls[-1]
        explained = held.contributions(residuals).together()[0]
        # What no factor explains is the shard's own, but for the noise of its cost.
        missed = np.log(data.totals_ms / explained)
        known = np.square(found.prior.rest / noise) * np.minimum(1.0, _trust(missed / noise))
        times = np.exp(missed * known)
        doubts = np.sqrt(1 - known)
        found._left = {
            shard.digest: ShardResidual(float(ms), float(doubt))
            for shard, ms, doubt in zip(data.shards, times, doubts, strict=True)
        }
        return found

    def knows(self, table: EmbeddingTable) -> bool:
        """True if it has been measured, whole or in part."""
        return table.access_digest in self._digests

    def of_shard(self, shard: Shard) -> ShardResidual:
        """What is known of a shard beyond what its tables explain."""
        return self._left.get(shard.digest, _NOT_MEASURED)

    def estimates(self, tables: Sequence[EmbeddingTable]) -> tuple[Floats, Floats]:
        """Of each of these tables: its log factors [directions, tables], and of what was doubted
        of it beforehand the share that is left [tables].
        """
        distinct = list({id(table): table for table in tables}.values())
        numbers = {id(table): number for number, table in enumerate(distinct)}
        parts = [self._estimated(distinct[n : n + _AT_ONCE])
                 for n in range(0, max(1, len(distinct)), _AT_ONCE)]  # fmt: skip
        of = np.array([numbers[id(table)] for table in tables], np.int64)
        means, left = (np.concatenate(some, axis=-1) for some in zip(*parts, strict=True))
        return means[:, of], left[of]

    def _estimated(self, tables: Sequence[EmbeddingTable]) -> tuple[Floats, Floats]:
        """The same, of so few tables that they may be compared with all that are known."""
        if not self._known:
            return np.zeros((DIRECTIONS, len(tables))), np.ones(len(tables))
        inputs = _inputs(tables, self.batch_size)
        before = np.square(shared_deviations(self.prior, self._excess(inputs))) + self.prior.own**2
        across = self._covariance(tables, inputs, self._known, self._inputs)
        means = np.stack([across @ pull for pull in self._pulls])
        told = np.mean([((across @ gain) * across).sum(1) for gain in self._gains], axis=0)
        return means, np.asarray(np.sqrt(np.clip(1 - told / before, 0.0, 1.0)))

    def covariances(self, tables: Sequence[EmbeddingTable]) -> Floats:
        """Of the log factors of these tables, measured or not: [directions, tables, tables]."""
        return self._together(tables)[1]

    def posterior(self, tables: Sequence[EmbeddingTable]) -> ResidualPosterior:
        """What is known of these tables all together."""
        means, covariances = self._together(tables)
        if not self._known:  # both directions are alike
            return ResidualPosterior(means, np.stack([_root(covariances[0])] * DIRECTIONS))
        return ResidualPosterior(means, np.stack([_root(covariance) for covariance in covariances]))

    def similarity(self, tables: Sequence[EmbeddingTable]) -> TableSimilarity:
        """Of these tables to each other."""
        inputs = _inputs(tables, self.batch_size)
        return self._likeness(tables, inputs, tables, inputs)

    def _together(self, tables: Sequence[EmbeddingTable]) -> tuple[Floats, Floats]:
        """Means and covariances of the log factors of these tables."""
        inputs = _inputs(tables, self.batch_size)
        prior = self._covariance(tables, inputs, tables, inputs)
        if not self._known:
            return np.zeros((DIRECTIONS, len(tables))), np.stack([prior] * DIRECTIONS)
        across = self._covariance(tables, inputs, self._known, self._inputs)
        means = np.stack([across @ pull for pull in self._pulls])
        return means, np.stack([prior - across @ gain @ across.T for gain in self._gains])

    def _covariance(
        self,
        tables: Sequence[EmbeddingTable],
        inputs: torch.Tensor,
        others: Sequence[EmbeddingTable],
        their_inputs: torch.Tensor,
    ) -> Floats:
        """Of log factors, before measuring: [tables, others]."""
        return self._likeness(tables, inputs, others, their_inputs).covariance(self.prior)

    def _likeness(
        self,
        tables: Sequence[EmbeddingTable],
        inputs: torch.Tensor,
        others: Sequence[EmbeddingTable],
        their_inputs: torch.Tensor,
    ) -> TableSimilarity:
        scale = self._model.scale
        places, theirs = (
            ((some - scale.mean) / scale.deviation).clamp(-_FAR, _FAR).double()
            for some in (inputs, their_inputs)
        )
        # In torch, whose threads are ours to count: on a busy machine numpy's wait for each other.
        squares, their_squares = places.square().sum(1), theirs.square().sum(1)
        apart = squares[:, None] + their_squares - 2 * places @ theirs.T
        numbers: dict[str, int] = {}
        own, other = (
            np.array([numbers.setdefault(t.access_digest, len(numbers)) for t in some], np.int64)
            for some in (tables, others)
        )
        same = own[:, None] == other[None]
        alike = (apart.clamp_min(0.0) / (-2 * _ALIKE)).exp().numpy()
        return TableSimilarity(same, alike, self._excess(inputs), self._excess(their_inputs))

    def _excess(self, inputs: torch.Tensor) -> Floats:
        if not len(inputs):
            return np.zeros(0)
        return np.asarray(self._model.excess(inputs).amax(1).double().numpy())


@dataclass(frozen=True)
class Evidence:
    """Measured shards of one batch size: a model's `errors` in log space, the `shares` of tables in
    their costs [shards, tables], how `noisy` the costs are, how tables are alike.
    """

    errors: Floats
    shares: Floats
    noisy: Floats
    similarity: TableSimilarity

    @staticmethod
    def of(model: ComputeCostModel, data: "CostDataset") -> "Evidence":
        """What the shards say of the model."""
        tables = distinct_tables(data)
        total, parts = (
            EmbeddedShards(model, data.shards, data.batch_sizes, tables).contributions().together()
        )
        errors = np.log(data.totals_ms / total)
        # One that is farther off than all others was disturbed: it says nothing of them.
        most = _FAR_OFF * float(np.median(np.abs(errors))) / NORMAL_MEDIAN
        return Evidence(
            np.clip(errors, -most, most),
            (scipy.sparse.diags(1 / total) @ parts).toarray(),
            data.errors,
            TableResiduals(model, data.most_common_batch).similarity(tables),
        )

    def negative_log_likelihood(self, prior: ResidualPrior) -> float:
        """Of the errors, where factors of tables are as believed."""
        left = np.diag(prior.rest**2 + np.square(self.noisy))
        covariance = self.shares @ self.similarity.covariance(prior) @ self.shares.T + left
        factor = scipy.linalg.cho_factor(covariance)
        fit = self.errors @ scipy.linalg.cho_solve(factor, self.errors)
        return float(fit / 2 + np.log(np.diag(factor[0])).sum())


def _step(
    said: Contributions,
    direction: int,
    residuals: Floats,
    known: Floats,
    noise: Floats,
    first: bool,
) -> tuple[Floats, Floats]:
    """Information about log factors from shards with log costs `known`, and what it pulls to, where
    the model is taken to be linear at `factors`: `information @ factors` is `moments` where the
    shards alone decide.
    """
    total, parts = said.of(direction)
    slopes = scipy.sparse.diags(1 / total) @ parts
    missed = known - np.log(total)
    trust = np.ones(len(known)) if first else _trust(missed / noise)
    weighted = slopes.T @ scipy.sparse.diags(trust / np.square(noise))
    return (weighted @ slopes).toarray(), np.asarray(weighted @ (missed + slopes @ residuals))


def _trust(deviations: Floats) -> Floats:
    """Of costs that are so far off: what they count, by Student's t."""
    return np.asarray((_FREEDOM + 1) / (_FREEDOM + np.square(deviations)))


def _fitting(prior: ResidualPrior, evidence: Evidence) -> ResidualPrior:
    """The prior, as much wider as these shards show it to be too narrow.

    It was found on tables like those that the model learned from; a user's may be others.
    """
    candidates = [
        replace(prior, own=prior.own * wider, shared=prior.shared * wider, rest=prior.rest * louder)
        for wider in _WIDER
        for louder in _LOUDER
    ]
    return min(candidates, key=evidence.negative_log_likelihood)


def subsample(data: "CostDataset") -> "CostDataset":
    """Some of the shards, evenly spread: enough to find a few numbers by."""
    return data.subset(range(0, len(data), max(1, -(-len(data) // _MAX_EVIDENCE))))


def _worth_knowing(data: "CostDataset", batch_size: int, of: Sequence[EmbeddingTable]) -> list[int]:
    """Numbers of shards of at most so many tables, those with tables `of` first."""
    wanted = {table.access_digest for table in of}
    digests = [{p.table.access_digest for p in shard.pieces} for shard in data.shards]
    ours = [n for n, batch in enumerate(data.batch_sizes) if batch == batch_size]
    ours.sort(key=lambda n: digests[n].isdisjoint(wanted))
    tables: set[str] = set()
    kept = []
    for number in ours:
        if not digests[number] <= tables and len(tables | digests[number]) > _MAX_TABLES:
            continue
        tables |= digests[number]
        kept.append(number)
    return sorted(kept)


def distinct_tables(data: "CostDataset") -> list[EmbeddingTable]:
    """The tables of all shards, once each, whatever their name and width."""
    return list(
        {p.table.access_digest: p.table for shard in data.shards for p in shard.pieces}.values()
    )


def _inputs(tables: Sequence[EmbeddingTable], batch_size: int) -> torch.Tensor:
    return piece_inputs([table.whole() for table in tables], batch_size)


def _root(covariance: Floats) -> Floats:
    """A root [n, n] of a covariance, though rounding may have left it a little below nothing."""
    jittered = torch.from_numpy(covariance) + _JITTER * torch.eye(len(covariance))
    root, failed = torch.linalg.cholesky_ex(jittered)
    if not failed:
        return np.asarray(root.numpy())
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
