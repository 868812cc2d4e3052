"""Corrections of tables: log factors that are fitted to the measured shards of each table.

Each table has a factor forward and one backward, which scale the ensemble's prediction. Their prior
is a Gaussian process: normal, wider for out-of-distribution tables, and correlated between similar
tables. A shard's cost is the start plus its tables' contributions, each times its factor. That is
linear but for the logarithm, so a few Gauss-Newton steps find the posterior.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy  # which loads its parts when they are used
import torch

from autoshard.benchmark.statistics import NORMAL_MEDIAN
from autoshard.cost_model.networks.compute import ComputeCostModel, ResidualPrior
from autoshard.cost_model.networks.inputs import piece_inputs
from autoshard.cost_model.networks.network import DIRECTIONS
from autoshard.cost_model.uncertainty.contributions import Contributions, EmbeddedShards
from autoshard.workload import EmbeddingTable, Shard
from autoshard.workload.arrays import Floats

if TYPE_CHECKING:
    from autoshard.cost_model.networks.dataset import CostDataset


_STEPS = 5  # Gauss-Newton steps
_FREEDOM = 4.0  # degrees of freedom of Student's t: outliers count little
_MAX_EXTRAPOLATION = 1.0  # largest deviation of a log factor by extrapolation
_OUTLIER = 3.0  # deviations
_MAX_EVIDENCE = 400  # shards that the prior is fitted to
_WIDER = (1.0, 2.0, 4.0, 8.0)  # candidates for the scale of the prior's deviations
_NOISE_SCALES = (1.0, 2.0)  # candidates for the scale of shard residuals
_MAX_TABLES = 1500  # with a posterior: its time grows with the cube of their number
_BLOCK = 500  # tables compared with all measured ones at once: more take much memory
_JITTER = 1e-9
_SQUARED_LENGTH = 8.0  # squared length scale of the kernel, in deviations of inputs
_FAR = 3.0  # deviations to which inputs are clamped in the kernel


class _TableFeatures(NamedTuple):
    """Features of tables that their similarity depends on.

    `digests` say how rows are looked up, whatever the dim; `positions` are normalised inputs;
    `excess` is the largest deviation outside of the training data.
    """

    digests: list[str]
    positions: torch.Tensor
    excess: Floats


@dataclass(frozen=True)
class TableSimilarity:
    """Similarity of tables (rows) to other tables (columns).

    Args:
        same: True where both look rows up in the same way.
        kernel: 1 for equal inputs, falling with their distance.
        excess: Largest deviation of each row outside of the training data.
        column_excess: The same of columns.
    """

    same: npt.NDArray[np.bool_]
    kernel: Floats
    excess: Floats
    column_excess: Floats

    @staticmethod
    def of(rows: _TableFeatures, columns: _TableFeatures) -> "TableSimilarity":
        """Returns the similarity of tables with these features."""
        # In torch, whose number of threads is limited: numpy's wait for each other on busy cores.
        squares, their_squares = (f.positions.square().sum(1) for f in (rows, columns))
        apart = squares[:, None] + their_squares - 2 * rows.positions @ columns.positions.T
        _, numbers = np.unique([*rows.digests, *columns.digests], return_inverse=True)
        own, other = np.split(numbers, [len(rows.digests)])
        kernel = (apart.clamp_min(0.0) / (-2 * _SQUARED_LENGTH)).exp().numpy()
        return TableSimilarity(own[:, None] == other, kernel, rows.excess, columns.excess)

    def covariance(self, prior: ResidualPrior) -> Floats:
        """Returns the prior covariance of log factors, shape [rows, columns]."""
        deviations = shared_deviations(prior, self.excess)[:, None]
        shared = deviations * shared_deviations(prior, self.column_excess)[None]
        return np.asarray(shared * self.kernel + prior.own**2 * self.same)


def shared_deviations(prior: ResidualPrior, excess: Floats) -> Floats:
    """Returns the deviations of the part of log factors that similar tables share."""
    extrapolation = np.minimum(prior.extrapolation * excess, _MAX_EXTRAPOLATION)
    return np.asarray(np.sqrt(prior.shared**2 + np.square(extrapolation)))


@dataclass(frozen=True)
class ResidualPosterior:
    """Joint posterior of log factors: means [directions, tables], covariances [.., tables]."""

    means: Floats
    covariances: Floats

    @cached_property
    def roots(self) -> Floats:
        """Cholesky factors of the covariances, [directions, tables, tables]."""
        return np.stack([_root(covariance) for covariance in self.covariances])

    @property
    def deviations(self) -> Floats:
        """Standard deviation of each log factor, [directions, tables]."""
        return np.asarray(np.sqrt(np.square(self.roots).sum(-1)))


@dataclass(frozen=True)
class ShardResidual:
    """Correction and remaining uncertainty of a shard, beyond those of its tables.

    `factor` scales the cost that its tables explain; `uncertainty` is the share that remains.
    """

    factor: float = 1.0
    uncertainty: float = 1.0


_NOT_MEASURED = ShardResidual()


class TableResiduals:
    """Posterior of table corrections, for any tables.

    Args:
        model: Model that is corrected; has the prior of the corrections.
        batch_size: Batch size of the measurements that count.
    """

    def __init__(self, model: ComputeCostModel, batch_size: int) -> None:
        self._model = model
        self.prior = model.prior
        self.batch_size = batch_size
        self._shards: dict[str, ShardResidual] = {}
        self._known = self._features([])
        # For each direction: K^-1 times the mean of known tables, and K^-1 (K - C) K^-1 for their
        # prior covariance K and posterior covariance C.
        self._alphas: list[Floats] = []
        self._gains: list[Floats] = []

    @property
    def tables(self) -> int:
        """Number of measured tables."""
        return len(self._known.digests)

    def learn(self, data: "CostDataset", of: Sequence[EmbeddingTable] = ()) -> "TableResiduals":
        """Returns the posterior given these measurements alone, of this batch size.

        If they have too many tables, shards with tables `of` come first.
        """
        ours = _select_shards(data, self.batch_size, of)
        found = TableResiduals(self._model, self.batch_size)
        if not ours:
            return found
        data = data.subset(ours)
        found.prior = _fitting(self.prior, Evidence.of(self._model, subsample(data)))
        tables = distinct_tables(data)
        found._known = found._features(tables)
        before = found._covariance(found._known, found._known)
        rest = found.prior.rest_of(data.totals_ms)
        noise = np.hypot(rest, data.errors)
        embedded = EmbeddedShards(self._model, data.shards, data.batch_sizes, tables)
        residuals, costs = np.zeros((DIRECTIONS, len(before))), np.log(data.costs_ms)
        for number in range(_STEPS):
            parts = embedded.contributions(residuals)
            found._alphas, found._gains = [], []
            for direction in range(DIRECTIONS):
                information, moments = _step(
                    parts, direction, residuals[direction], costs[:, direction], noise, number == 0
                )
                # Posterior covariance: (K^-1 + I)^-1 = K - K (I K + 1)^-1 I K, and so its mean.
                solved = scipy.linalg.solve(np.eye(len(before)) + information @ before, information)
                found._gains.append(solved)
                found._alphas.append(moments - solved @ (before @ moments))
                residuals[direction] = before @ found._alphas[-1]
        explained = embedded.contributions(residuals).together()[0]
        # What no factor explains is the shard's own, except for the noise of its cost.
        missed = np.log(data.totals_ms / explained)
        known = np.square(rest / noise) * np.minimum(1.0, _student_weights(missed / noise))
        found._shards = {
            shard.digest: ShardResidual(float(factor), float(uncertainty))
            for shard, factor, uncertainty in zip(
                data.shards, np.exp(missed * known), np.sqrt(1 - known), strict=True
            )
        }
        return found

    def knows(self, table: EmbeddingTable) -> bool:
        """Returns whether the table was measured, whole or in part."""
        return table.access_digest in self._digests

    @cached_property
    def _digests(self) -> frozenset[str]:
        return frozenset(self._known.digests)

    def of_shard(self, shard: Shard) -> ShardResidual:
        """Returns the residual of a shard."""
        return self._shards.get(shard.digest, _NOT_MEASURED)

    def estimates(self, tables: Sequence[EmbeddingTable]) -> tuple[Floats, Floats]:
        """Returns mean log factors, and the share of each prior deviation that remains.

        Shapes are [directions, tables] and [tables].
        """
        distinct = list({id(table): table for table in tables}.values())
        numbers = {id(table): number for number, table in enumerate(distinct)}
        parts = [self._estimated(distinct[n : n + _BLOCK])
                 for n in range(0, max(1, len(distinct)), _BLOCK)]  # fmt: skip
        of = np.array([numbers[id(table)] for table in tables], np.int64)
        means, shares = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
        return means[:, of], shares[of]

    def _estimated(self, tables: Sequence[EmbeddingTable]) -> tuple[Floats, Floats]:
        if not self.tables:
            return np.zeros((DIRECTIONS, len(tables))), np.ones(len(tables))
        features = self._features(tables)
        before = np.square(shared_deviations(self.prior, features.excess)) + self.prior.own**2
        across = self._covariance(features, self._known)
        means = np.stack([across @ alpha for alpha in self._alphas])
        gained = np.mean([((across @ gain) * across).sum(1) for gain in self._gains], axis=0)
        return means, np.asarray(np.sqrt(np.clip(1 - gained / before, 0.0, 1.0)))

    def posterior(self, tables: Sequence[EmbeddingTable]) -> ResidualPosterior:
        """Returns the joint posterior of these tables, measured or not."""
        features = self._features(tables)
        prior = self._covariance(features, features)
        if not self.tables:
            means = np.zeros((DIRECTIONS, len(tables)))
            return ResidualPosterior(means, np.stack([prior] * DIRECTIONS))
        across = self._covariance(features, self._known)
        means = np.stack([across @ alpha for alpha in self._alphas])
        covariances = [prior - across @ gain @ across.T for gain in self._gains]
        return ResidualPosterior(means, np.stack(covariances))

    def similarity(self, tables: Sequence[EmbeddingTable]) -> TableSimilarity:
        """Returns the similarity of these tables to each other."""
        features = self._features(tables)
        return TableSimilarity.of(features, features)

    def _covariance(self, rows: _TableFeatures, columns: _TableFeatures) -> Floats:
        return TableSimilarity.of(rows, columns).covariance(self.prior)

    def _features(self, tables: Sequence[EmbeddingTable]) -> _TableFeatures:
        inputs, scale = (
            piece_inputs([t.whole() for t in tables], self.batch_size),
            self._model.scale,
        )
        positions = ((inputs - scale.mean) / scale.deviation).clamp(-_FAR, _FAR).double()
        excess = scale.excess(inputs).amax(1).double().numpy()
        return _TableFeatures([t.access_digest for t in tables], positions, np.asarray(excess))


@dataclass(frozen=True)
class Evidence:
    """Measured shards of one batch size, to fit a prior to.

    Attributes:
        errors: Errors of a model in log space, shape [shards].
        shares: Shares of tables in costs, shape [shards, tables].
        noisy: Relative standard errors of costs, shape [shards].
        totals_ms: Costs, shape [shards].
        similarity: Similarity of the tables.
    """

    errors: Floats
    shares: Floats
    noisy: Floats
    totals_ms: Floats
    similarity: TableSimilarity

    @staticmethod
    def of(model: ComputeCostModel, data: "CostDataset") -> "Evidence":
        """Returns the evidence of these shards about a model."""
        tables = distinct_tables(data)
        total, parts = (
            EmbeddedShards(model, data.shards, data.batch_sizes, tables).contributions().together()
        )
        errors = np.log(data.totals_ms / total)
        # Outliers were disturbed, and would decide the fit.
        limit = _OUTLIER * float(np.median(np.abs(errors))) / NORMAL_MEDIAN
        return Evidence(
            np.clip(errors, -limit, limit),
            (scipy.sparse.diags(1 / total) @ parts).toarray(),
            data.errors,
            data.totals_ms,
            TableResiduals(model, data.most_common_batch).similarity(tables),
        )

    def negative_log_likelihood(self, prior: ResidualPrior) -> float:
        """Returns it for the errors, up to a constant."""
        residual = np.diag(np.square(prior.rest_of(self.totals_ms)) + np.square(self.noisy))
        covariance = self.shares @ self.similarity.covariance(prior) @ self.shares.T + residual
        factor = scipy.linalg.cho_factor(covariance)
        fit = self.errors @ scipy.linalg.cho_solve(factor, self.errors)
        return float(fit / 2 + np.log(np.diag(factor[0])).sum())


def _step(
    contributions: Contributions,
    direction: int,
    residuals: Floats,
    known: Floats,
    noise: Floats,
    first: bool,
) -> tuple[Floats, Floats]:
    """Linearises the model at `residuals` and returns information about log factors and moments.

    `information @ residuals` equals `moments` at the maximum likelihood of the shards alone.
    `known` are their log costs.
    """
    total, parts = contributions.of(direction)
    slopes = scipy.sparse.diags(1 / total) @ parts
    missed = known - np.log(total)
    weights = np.ones(len(known)) if first else _student_weights(missed / noise)
    weighted = slopes.T @ scipy.sparse.diags(weights / np.square(noise))
    return (weighted @ slopes).toarray(), np.asarray(weighted @ (missed + slopes @ residuals))


def _student_weights(deviations: Floats) -> Floats:
    """Returns the weights of normalised errors by Student's t."""
    return np.asarray((_FREEDOM + 1) / (_FREEDOM + np.square(deviations)))


def _fitting(prior: ResidualPrior, evidence: Evidence) -> ResidualPrior:
    """Returns the prior, widened as far as these shards show it to be too narrow.

    It was fitted on tables like the model's training data; a user's may differ.
    """
    candidates = [
        replace(
            prior,
            own=prior.own * wider,
            shared=prior.shared * wider,
            rest=prior.rest * noise_scale,
            rest_ms=prior.rest_ms * noise_scale,
        )
        for wider in _WIDER
        for noise_scale in _NOISE_SCALES
    ]
    return min(candidates, key=evidence.negative_log_likelihood)


def subsample(data: "CostDataset") -> "CostDataset":
    """Returns at most about `_MAX_EVIDENCE` of the shards, evenly spaced."""
    return data.subset(range(0, len(data), max(1, -(-len(data) // _MAX_EVIDENCE))))


def _select_shards(data: "CostDataset", batch_size: int, of: Sequence[EmbeddingTable]) -> list[int]:
    """Returns numbers of shards with at most `_MAX_TABLES` tables, those with tables `of` first."""
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
    """Returns the tables of all shards, distinct by how rows are looked up."""
    return list(
        {p.table.access_digest: p.table for shard in data.shards for p in shard.pieces}.values()
    )


def _root(covariance: Floats) -> Floats:
    """Returns the Cholesky factor, or a root by eigenvalues if rounding made one negative."""
    jittered = torch.from_numpy(covariance) + _JITTER * torch.eye(len(covariance))
    root, failed = torch.linalg.cholesky_ex(jittered)
    if not failed:
        return np.asarray(root.numpy())
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
